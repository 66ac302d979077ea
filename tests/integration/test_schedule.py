import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from tests.database import Database
from tests.jobs import Status, add_job, get_job
from tests.scheduling import AT_ONCE, OFTEN, running, start_reporting
from unstuck import Unstuck, ZombieSettings
from unstuck.errors import SettingsError

JOB_ID = "cleanup_zombie_records"


def quiet(**settings: object) -> Unstuck:
    """One whose database is never asked."""
    return Unstuck("sqlite:///nowhere.db", ZombieSettings(**settings))


def test_the_job_is_what_operators_look_for() -> None:
    scheduler = AsyncIOScheduler(timezone="America/New_York")
    quiet(cleanup_interval_minutes=1.5, cleanup_jitter_seconds=7).setup(scheduler)
    (job,) = scheduler.get_jobs()
    assert (job.id, job.name) == (JOB_ID, "Zombie Record Cleanup")
    assert job.trigger.interval == timedelta(seconds=90)
    assert job.trigger.jitter == 7
    assert (job.max_instances, job.coalesce, job.misfire_grace_time) == (1, True, None)
    assert timedelta(0) < job.next_run_time - datetime.now(UTC) <= timedelta(seconds=5)


def test_no_jitter_is_possible() -> None:
    scheduler = AsyncIOScheduler()
    quiet(cleanup_jitter_seconds=0).setup(scheduler)
    assert scheduler.get_job(JOB_ID).trigger.jitter is None


async def test_a_second_set_up_takes_the_place_of_the_first_on_a_scheduler_that_runs() -> None:
    async with running(AsyncIOScheduler()) as scheduler:
        first = quiet().setup(scheduler)
        quiet(cleanup_interval_minutes=2).setup(scheduler)
        (job,) = scheduler.get_jobs()
        assert job.trigger.interval == timedelta(minutes=2)
        await first.shutdown()
        assert scheduler.get_jobs() == [job]


async def test_a_second_set_up_takes_the_place_of_the_first_before_the_start() -> None:
    scheduler = AsyncIOScheduler()
    first = quiet().setup(scheduler)
    second = quiet(cleanup_interval_minutes=2).setup(scheduler)
    await first.shutdown()
    (job,) = scheduler.get_jobs()
    assert job.trigger.interval == timedelta(minutes=2)
    await second.shutdown()
    assert scheduler.get_jobs() == []


async def test_a_job_of_the_host_with_the_same_id_is_left_alone() -> None:
    async with running(AsyncIOScheduler()) as scheduler:
        scheduler.add_job(quiet, "interval", hours=1, id=JOB_ID, name="the host's own")
        handle = quiet().setup(scheduler)
        assert len(scheduler.get_jobs()) == 2
        await handle.shutdown()
        assert [job.name for job in scheduler.get_jobs()] == ["the host's own"]


def plain(_: Path) -> AsyncIOScheduler:
    return AsyncIOScheduler()


def with_a_persistent_store(directory: Path) -> AsyncIOScheduler:
    store = SQLAlchemyJobStore(url=f"sqlite:///{directory / 'schedule.db'}")
    return AsyncIOScheduler(jobstores={"default": store})


def with_a_thread_pool(_: Path) -> AsyncIOScheduler:
    return AsyncIOScheduler(executors={"default": ThreadPoolExecutor(2)})


@pytest.mark.parametrize("make", [plain, with_a_persistent_store, with_a_thread_pool])
async def test_a_stuck_job_comes_back_by_itself_on_a_scheduler(
    database: Database, tmp_path: Path, make: Callable[[Path], AsyncIOScheduler]
) -> None:
    unstuck, reports = await start_reporting(database, **AT_ONCE)
    stuck = await add_job(database)
    async with running(make(tmp_path)) as scheduler:
        handle = unstuck.setup(scheduler)
        assert (await reports.next()).errors == []
        assert (await get_job(database, stuck)).status is Status.Queued
        await handle.shutdown()


@pytest.mark.parametrize("make", [plain, with_a_persistent_store, with_a_thread_pool])
async def test_a_scheduler_may_be_started_after_the_set_up(
    database: Database, tmp_path: Path, make: Callable[[Path], AsyncIOScheduler]
) -> None:
    unstuck, reports = await start_reporting(database, **AT_ONCE)
    await add_job(database)
    scheduler = make(tmp_path)
    handle = unstuck.setup(scheduler)
    async with running(scheduler):
        assert (await reports.next()).left_processing == 1
        await handle.shutdown()


async def test_the_timetable_goes_on(database: Database) -> None:
    unstuck, reports = await start_reporting(database, **OFTEN)
    handle = unstuck.setup()
    for _ in range(3):
        await add_job(database)
        assert (await reports.next_that_took()).left_processing == 1
    await handle.shutdown()


async def test_a_sweep_can_be_had_at_once(database: Database) -> None:
    unstuck, _ = await start_reporting(database)
    handle = unstuck.setup()
    await add_job(database)
    assert (await handle.run_now()).left_processing == 1
    await handle.shutdown()


async def test_disabled_says_so_once_and_adds_nothing(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    unstuck, _ = await start_reporting(database, cleanup_enabled=False)
    async with running(AsyncIOScheduler()) as scheduler:
        handle = unstuck.setup(scheduler)
        assert scheduler.get_jobs() == []
        assert handle.scheduler is None
        ours = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "unstuck"]
        assert ours == [("INFO", "Zombie cleanup is disabled by ZOMBIE_CLEANUP_ENABLED=false")]
        await add_job(database)
        assert (await handle.run_now()).left_processing == 1
        await handle.shutdown()


def test_a_scheduler_that_cannot_await_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^scheduler=BackgroundScheduler cannot await a sweep"):
        quiet().setup(BackgroundScheduler())


def test_a_scheduler_of_its_own_needs_a_running_loop() -> None:
    with pytest.raises(SettingsError, match=r"needs a running event loop: call it inside the life"):
        quiet().setup()
