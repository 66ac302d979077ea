"""What goes wrong in one sweep is over with that sweep."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.jobs import add_job
from tests.scheduling import AT_ONCE, OFTEN, running, start_reporting
from unstuck import Registry, schedule
from unstuck.registry import Workflow

LIMITED = {**OFTEN, "sweep_timeout_seconds": 0.5}


class Hanging:
    """A session source that waits for ever until it is told to work."""

    def __init__(self, database: Database) -> None:
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()
        self.released = False
        self._sessions = database.sessions

    async def __call__(self) -> AsyncSession:
        if not self.released:
            self.asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        return self._sessions()


class Stubborn(Hanging):
    """One that does not even listen to a cancellation."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.let_go = asyncio.Event()

    async def __call__(self) -> AsyncSession:
        if not self.released:
            self.released = True
            while not self.let_go.is_set():
                with suppress(asyncio.CancelledError):
                    await self.let_go.wait()
            self.ended.set()
        return self._sessions()


async def test_a_sweep_that_hangs_is_ended_and_the_next_one_takes_place(database: Database) -> None:
    source = Hanging(database)
    unstuck, reports = await start_reporting(database, source, **LIMITED)
    await add_job(database)
    handle = unstuck.setup()
    assert (await reports.next()).errors == ["jobs: the sweep ran into its limit of 0.5 s"]
    assert source.ended.is_set()
    source.released = True
    assert (await reports.next_that_took()).left_processing == 1
    await handle.shutdown()


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_PATIENCE", 0.05)


@pytest.mark.usefixtures("impatience")
async def test_a_sweep_that_will_not_end_is_left_behind(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    source = Stubborn(database)
    unstuck, reports = await start_reporting(database, source, **LIMITED)
    await add_job(database)
    handle = unstuck.setup()
    try:
        assert (await reports.next_that_took()).left_processing == 1
        assert not source.ended.is_set()
        assert "ran for more than 0.55 s and is left behind, for it does not end" in caplog.text
    finally:
        source.let_go.set()  # else the event loop would wait for it for ever
    await source.ended.wait()
    await handle.shutdown()


@pytest.mark.usefixtures("impatience")
async def test_what_hangs_outside_of_the_workflows_is_ended_too(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    source = Hanging(database)
    unstuck, reports = await start_reporting(database, source, **LIMITED)
    handle = unstuck.setup(create_tables=True)
    await source.ended.wait()
    source.released = True
    await reports.next()
    assert "ran for more than 0.55 s and is ended" in caplog.text
    await handle.shutdown()


class Broken(Registry):
    """A registry that cannot be read the first time."""

    def __init__(self, workflows: Registry) -> None:
        super().__init__()
        self._given = workflows
        self._asked = 0

    def __iter__(self) -> Iterator[Workflow]:
        self._asked += 1
        if self._asked == 2:  # the first is the set-up
            raise LookupError("unexpected")
        return iter(self._given)


async def test_a_sweep_that_raises_does_not_stop_the_timetable(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck, reports = await start_reporting(database, **OFTEN)
    unstuck.registry = Broken(unstuck.registry)
    await add_job(database)
    handle = unstuck.setup()
    assert (await reports.next_that_took()).left_processing == 1
    (failure,) = [r for r in caplog.records if r.name == "unstuck.schedule"]
    assert failure.getMessage() == "Zombie sweep failed"
    assert "LookupError: unexpected" in caplog.text
    await handle.shutdown()


async def test_shutdown_ends_a_sweep_under_way_and_may_be_called_twice(database: Database) -> None:
    source = Hanging(database)
    unstuck, _ = await start_reporting(database, source, **AT_ONCE)
    async with running(AsyncIOScheduler()) as scheduler:
        handle = unstuck.setup(scheduler)
        await source.asked.wait()
        await handle.shutdown()
        assert source.ended.is_set()
        assert scheduler.get_jobs() == []
        assert scheduler.running
        await handle.shutdown()


async def test_a_host_that_stops_its_scheduler_ends_the_sweep_as_well(database: Database) -> None:
    source = Hanging(database)
    unstuck, _ = await start_reporting(database, source, **AT_ONCE)
    async with running(AsyncIOScheduler()) as scheduler:
        unstuck.setup(scheduler)
        await source.asked.wait()
    async with asyncio.timeout(10):
        await source.ended.wait()


async def test_shutdown_leaves_the_engine_of_the_host_open(database: Database) -> None:
    unstuck, reports = await start_reporting(database, database.engine, **AT_ONCE)
    handle = unstuck.setup()
    await reports.next()
    pool = database.engine.pool
    await handle.shutdown()
    assert database.engine.pool is pool


async def test_shutdown_closes_the_scheduler_and_the_engine_of_its_own(database: Database) -> None:
    unstuck, reports = await start_reporting(database, database.url, **AT_ONCE)
    handle = unstuck.setup()
    scheduler = handle.scheduler
    assert scheduler is not None
    await reports.next()
    engine = unstuck._sessions._owned
    assert engine is not None
    pool = engine.pool
    await handle.shutdown()
    assert engine.pool is not pool
    await asyncio.sleep(0)  # the scheduler stops at the loop's next turn
    assert not scheduler.running


async def test_missing_tables_are_a_sentence_and_no_error(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck, reports = await start_reporting(database, **AT_ONCE)
    for table in ("zombie_claims", "zombie_records", "zombie_events"):
        await database.execute(f"DROP TABLE {table}")
    handle = unstuck.setup()
    (error,) = (await reports.next()).errors
    assert "are missing or out of date in this database: pass create_tables=True to" in error
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert told.startswith("Zombie sweep of jobs failed: The tables zombie_claims, zombie_records")
    assert "Traceback" not in caplog.text
    await handle.shutdown()
