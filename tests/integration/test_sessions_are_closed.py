import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from tests.database import Database
from tests.jobs import add_job
from tests.session_sources import SOURCES, Source, checked_out, start_on
from unstuck.db import Sessions
from unstuck.errors import SessionUnavailable


def tight_engine(database: Database, timeout: float) -> AsyncEngine:
    return create_async_engine(database.url, pool_size=1, max_overflow=0, pool_timeout=timeout)


async def test_an_exhausted_pool_fails_the_sweep_and_does_not_hang_it(database: Database) -> None:
    engine = tight_engine(database, timeout=0.05)
    unstuck = await start_on(database, engine)
    await add_job(database)
    async with engine.connect():
        (error,) = (await unstuck.sweep()).errors
        assert "QueuePool limit of size 1 overflow 0 reached" in error
        with pytest.raises(SessionUnavailable):
            await unstuck.history("jobs", 1)
    assert (await unstuck.sweep()).left_processing == 1
    await engine.dispose()


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
async def test_a_session_is_closed_after_an_error(database: Database, source: Source) -> None:
    sessions = Sessions(source(database))
    engine = database.engine if sessions._owned is None else sessions._owned

    async def work() -> None:
        async with sessions.open():
            assert checked_out(engine) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert checked_out(engine) == 0
    await sessions.close()


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
async def test_a_session_is_closed_after_a_cancellation(database: Database, source: Source) -> None:
    sessions = Sessions(source(database))
    engine = database.engine if sessions._owned is None else sessions._owned
    opened = asyncio.Event()

    async def work() -> None:
        async with sessions.open() as session:
            await session.execute(text("SELECT 1"))
            opened.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await opened.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert checked_out(engine) == 0
    await sessions.close()


async def test_a_wait_for_a_connection_can_be_cancelled(database: Database) -> None:
    engine = tight_engine(database, timeout=60)
    sessions = Sessions(async_sessionmaker(engine))
    async with engine.connect():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), sessions.open():
                raise AssertionError("there is no second connection")
    assert checked_out(engine) == 0
    async with sessions.open() as session:
        assert await session.scalar(text("SELECT 1")) == 1
    await engine.dispose()
