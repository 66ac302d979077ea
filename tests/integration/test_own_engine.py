"""The engine that unstuck opens itself from a URL."""

import logging
import socket
from typing import Any

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.pool import QueuePool

from tests.database import Database
from tests.jobs import start
from unstuck import Unstuck, ZombieSettings
from unstuck.db import Sessions
from unstuck.db.engine import async_url, make_engine
from unstuck.errors import SettingsError, UnstuckError, UnsupportedDatabase

SYNC_AND_ASYNC = {
    "postgres://u@h/d": "postgresql+asyncpg://u@h/d",
    "postgresql://u@h/d": "postgresql+asyncpg://u@h/d",
    "postgresql+psycopg2://u@h/d": "postgresql+asyncpg://u@h/d",
    "postgresql+asyncpg://u@h/d": "postgresql+asyncpg://u@h/d",
    "postgresql+psycopg://u@h/d": "postgresql+psycopg://u@h/d",
    "postgresql://u@h/d?sslmode=require": "postgresql+asyncpg://u@h/d?ssl=require",
    "postgresql+psycopg://u@h/d?sslmode=require": "postgresql+psycopg://u@h/d?sslmode=require",
    "sqlite:///app.db": "sqlite+aiosqlite:///app.db",
    "sqlite+pysqlite:///app.db": "sqlite+aiosqlite:///app.db",
}


@pytest.mark.parametrize(("given", "used"), SYNC_AND_ASYNC.items())
def test_a_url_is_turned_into_one_that_can_await(given: str, used: str) -> None:
    assert async_url(given).render_as_string(hide_password=False) == used
    assert async_url(make_url(given)) == make_url(used)


async def test_the_pool_is_tiny_and_proof_against_poolers(postgres: Database) -> None:
    engine = make_engine(postgres.url)
    assert isinstance(engine.pool, QueuePool)
    assert engine.pool.size() + engine.pool._max_overflow == 2
    async with engine.connect() as connection:
        for _ in range(3):
            await connection.execute(text("SELECT 1"))
        # A pooler may hand the next transaction to another server that knows none of these.
        named = await connection.execute(text("SELECT name FROM pg_prepared_statements"))
        assert [name for (name,) in named if not name.startswith("unstuck_")] == []
        driver: Any = (await connection.get_raw_connection()).driver_connection
        assert driver._config.statement_cache_size == 0
    await engine.dispose()


UNREADABLE = ["", "nonsense", "postgresql://app:s3cret@db:port/app", "postgresql://a:b@s3cret:x@h/"]


@pytest.mark.parametrize("url", UNREADABLE)
def test_a_url_that_cannot_be_read_is_one_sentence_without_the_password(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^The database URL cannot be read; it should") as told:
        Sessions(url)
    assert "s3cret" not in str(told.value)
    assert told.value.__cause__ is None
    assert told.value.__suppress_context__


@pytest.mark.parametrize("driver", ["mysql", "mysql+aiomysql", "oracle", "mssql+pyodbc"])
def test_a_database_that_is_not_supported_is_one_sentence_without_the_password(driver: str) -> None:
    name = driver.partition("+")[0]
    with pytest.raises(
        UnsupportedDatabase, match=rf"^unstuck works on PostgreSQL and SQLite; .*'{name}'\.$"
    ) as told:
        Sessions(f"{driver}://app:s3cret@db/app")
    assert "s3cret" not in str(told.value)


def test_a_wrong_url_is_told_at_set_up() -> None:
    settings = ZombieSettings(database_url="mysql://app:s3cret@db/app")
    with pytest.raises(UnsupportedDatabase):
        Unstuck(settings=settings).setup()


def test_no_database_at_all_is_told_at_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("ZOMBIE_DATABASE_URL", raising=False)
    with pytest.raises(SettingsError, match=r"pass session_factory=, or set ZOMBIE_DATABASE_URL"):
        Unstuck().setup()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_the_password_is_neither_logged_nor_reported(
    postgres: Database, closed_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    registry = (await start(postgres)).registry
    url = f"postgresql://app:s3cret@127.0.0.1:{closed_port}/app"
    settings = ZombieSettings(database_url=url)
    unstuck = Unstuck(settings=settings, registry=registry)
    (error,) = (await unstuck.sweep()).errors
    assert error.startswith("jobs: No database session: ")
    assert str(closed_port) in error
    with pytest.raises(UnstuckError) as told:
        await unstuck.create_tables()
    await unstuck.close()
    for words in (error, caplog.text, str(told.value), repr(settings), repr(unstuck)):
        assert "s3cret" not in words
