"""Sessions that fail when a test says so, what was spooled meanwhile, and who was alarmed."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Unpack
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.database import Database
from tests.interleaving import before_statement
from tests.jobs import add_claim, add_job, ago, start
from unstuck import Unstuck, ZombieSettings
from unstuck.db import Entry, Spool, make_spool
from unstuck.registry import Parameters

Begin = Callable[[], Awaitable[object]]

# No waiting between the tries for a session.
AT_ONCE = {"session_wait_seconds": 0, "session_jitter_seconds": 0}


async def nothing(item_id: int, session: AsyncSession) -> None:
    """The least that a processing function can do."""


def give_none() -> None:
    return None


class Unreliable:
    """A source of sessions that can be broken and mended; it counts how often it is asked."""

    def __init__(self, source: Callable[[], Any]) -> None:
        self._source = source
        self._trouble: Callable[[], Any] = give_none
        self._failures = 0.0
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        if self._failures <= 0:
            return self._source()
        self._failures -= 1
        return self._trouble()

    def fail(self, times: float = float("inf"), *, trouble: Callable[[], Any] = give_none) -> None:
        """That many times from now on, in this way."""
        self._failures, self._trouble = times, trouble

    def mend(self) -> None:
        self._failures = 0


async def start_unreliable(
    database: Database,
    spool: Path,
    *,
    settings: dict[str, Any] | None = None,
    observers: Iterable[object] = (),
    **parameters: Unpack[Parameters],
) -> tuple[Unstuck, Unreliable]:
    """`tests.jobs.start` on sessions that can be broken, with a spool of the test's own."""
    said = {**AT_ONCE, "spool_url": str(spool), **(settings or {})}
    prepared = await start(database, settings=said, **parameters)
    source = Unreliable(database.sessions)
    return Unstuck(source, prepared.settings, prepared.registry, observers), source


def failing_after_the_claim(
    database: Database, source: Unreliable, times: float = float("inf"), **how: Any
) -> AbstractContextManager[None]:
    """Breaks the source while a batch is being claimed, in a session that was had before."""

    async def fail() -> None:
        source.fail(times, **how)

    return before_statement(database, "INSERT INTO zombie_claims", fail)


def impatient(database: Database) -> Database:
    """The same database; on SQLite, with connections that hardly wait for a lock."""
    if database.dialect == "sqlite":
        database.engine = create_async_engine(database.url, connect_args={"timeout": 0.1})
    return database


@asynccontextmanager
async def outage(database: Database) -> AsyncIterator[Begin]:
    """Gives what begins one; it ends with the block. Connections are killed and new ones refused;
    or, on SQLite, which has none to kill, somebody else holds its one lock for writing."""
    if database.dialect == "sqlite":
        apart = Database(database.url)
        try:
            async with apart.engine.connect() as writer:
                yield lambda: writer.exec_driver_sql("UPDATE jobs SET id = id")
        finally:
            await apart.dispose()
        return
    name = database.engine.url.database
    apart = Database(database.engine.url.set(database="postgres").render_as_string(False))

    async def begin() -> None:
        await apart.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        kill = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = :name"
        await apart.execute(kill, name=name)

    try:
        yield begin
    finally:
        await apart.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        await apart.dispose()


def spool_of(database: Database, settings: ZombieSettings) -> Spool:
    return make_spool(settings, database.engine.sync_engine)


async def read_spool(database: Database, settings: ZombieSettings) -> list[Entry]:
    """Everything that is spooled for this database; it stays there."""
    found: list[Entry] = []

    async def keep(entry: Entry) -> bool:
        found.append(entry)
        return False

    assert await spool_of(database, settings).drain(keep) == []
    return sorted(found, key=lambda entry: entry.record_id)


def read_files(folder: Path) -> list[str]:
    """The spooled entries as they lie on the disk."""
    return [file.read_text() for file in folder.rglob("*.json")]


def make_entry(record_id: object, **values: Any) -> Entry:
    """That a claim on a job failed."""
    said = {
        "workflow": "jobs",
        "record_id": str(record_id),
        "token": uuid4(),
        "worker_id": "worker-1",
        "outcome": "failed",
        "cause": None,
        "error": "no such page",
        "data": {},
    }
    return Entry(**{**said, **values})


async def start_spooling(database: Database, root: Path, **named: Any) -> Unstuck:
    """`tests.jobs.start` with a spool of the test's own."""
    settings = {**AT_ONCE, "spool_url": str(root), **named.pop("settings", {})}
    return await start(database, settings=settings, **named)


async def add_busy(database: Database) -> int:
    """A job in Processing, and not for long."""
    return await add_job(database, updated_at=ago(60))


async def spool_end(database: Database, unstuck: Unstuck, job: int, **values: Any) -> Entry:
    """How a claim on this job ended, spooled."""
    entry = make_entry(job, **values)
    await add_claim(database, job, token=entry.token, claimed_at=ago(60), started_at=ago(60))
    await put_entry(database, unstuck, entry)
    return entry


async def put_entry(database: Database, unstuck: Unstuck, entry: Entry) -> None:
    await spool_of(database, unstuck.settings).put(entry)


def alert(record_id: int) -> str:
    return (
        f"ZOMBIE RECORD ALERT: Job ID {record_id} stuck in Processing - "
        "could not obtain error session"
    )


def said_at(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def alerts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return said_at(caplog, logging.CRITICAL)
