"""What a sweep says of itself: its report, its log lines, its number."""

import logging
import uuid
from collections.abc import Iterator

import pytest

from tests.database import Database
from tests.jobs import HOUR, Base, Job, Status, add_claim, add_job, ago, get_job, start
from tests.lookup import remember
from unstuck import (
    Registry,
    Unstuck,
    ZombieSettings,
    cleanup_zombie_records,
    configure,
    defaults,
    metadata,
)
from unstuck.decisions import Outcome
from unstuck.events import SweepReport, Zombie


@pytest.fixture(autouse=True)
def _leave_no_default_behind() -> Iterator[None]:
    before = defaults._Default.instance
    yield
    defaults._Default.instance = before


async def test_a_report_counts_every_outcome(database: Database) -> None:
    unstuck = await start(database, reapable="idempotent", held=Status.Held, max_resets=2)
    for strikes in (0, 0, 1, 2):  # two are requeued, one is deferred, one is given up
        job = await add_job(database, idempotent=True)
        await remember(database, job, zombie_count=strikes)
    await add_job(database, idempotent=False, updated_at=ago(5 * HOUR))
    await add_job(database, updated_at=None)
    await add_claim(database, await add_job(database), token=uuid.uuid4())
    (report,) = (await unstuck.sweep()).workflows
    assert report.workflow == "jobs"
    assert (report.found, report.requeued, report.deferred) == (6, 3, 1)
    assert (report.failed, report.held, report.recovered) == (1, 1, 0)
    assert (report.skipped, report.locked, report.left_processing) == (1, 0, 5)
    assert report.oldest_seconds == pytest.approx(5 * HOUR, abs=60)
    assert 0 < report.seconds < 60
    assert (report.errors, report.zombies, report.capped) == ([], [], False)


async def test_a_quiet_sweep_reports_zeros(database: Database) -> None:
    unstuck = await start(database)
    report = await unstuck.sweep()
    assert (report.found, report.left_processing, report.zombies, report.errors) == (0, 0, [], [])
    assert str(report).startswith("Zombie sweep found 0: 0 requeued in 0.")


async def test_a_locked_row_is_counted_and_taken_by_the_next_sweep(postgres: Database) -> None:
    unstuck = await start(postgres)
    locked, free = await add_job(postgres), await add_job(postgres)
    async with postgres.sessions() as session:
        await session.get(Job, locked, with_for_update=True)
        report = await unstuck.sweep()
    assert (report.total("requeued"), report.total("locked")) == (1, 1)
    assert (await get_job(postgres, free)).status is Status.Queued
    assert (await unstuck.sweep()).total("requeued") == 1


def sweep_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    lines = [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "unstuck.sweep"]
    caplog.clear()
    return lines


async def test_one_warning_sums_up_a_sweep_that_changed_something(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start(database)
    for _ in range(3):
        await add_job(database)
    with caplog.at_level(logging.DEBUG, "unstuck"):
        await unstuck.sweep(dry_run=True)
        ((level, line),) = sweep_lines(caplog)
        assert level == logging.DEBUG
        assert line.startswith("Zombie sweep would take 3: 3 requeued in ")
        await unstuck.sweep()
        ((level, line),) = sweep_lines(caplog)
        assert level == logging.WARNING
        assert line.startswith("Zombie sweep found 3: 3 requeued in ")
        await unstuck.sweep()
        ((level, line),) = sweep_lines(caplog)
        assert level == logging.DEBUG


async def test_a_sweep_that_only_skipped_is_no_warning(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def recover(zombie: Zombie, session: object) -> Outcome:
        return Outcome.skipped

    unstuck = await start(database, recover=recover)
    await add_job(database)
    with caplog.at_level(logging.DEBUG, "unstuck"):
        await unstuck.sweep()
    ((level, line),) = sweep_lines(caplog)
    assert level == logging.DEBUG
    assert "1 skipped" in line


async def test_a_workflow_that_fails_is_named_and_stops_no_other(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await database.create(Base.metadata)
    await database.create(metadata)
    registry = Registry()
    registry.register(Job, name="broken", reapable=lambda job: job.id / job.zombie_count > 0)
    registry.register(Job, name="sound")
    unstuck = Unstuck(database.sessions, ZombieSettings(), registry)
    stuck = await add_job(database, zombie_count=0)
    if database.dialect == "sqlite":  # where a division by zero is NULL
        await database.execute("ALTER TABLE jobs RENAME COLUMN zombie_count TO lost")
    report = await unstuck.sweep()
    broken, sound = report.workflows
    assert (broken.workflow, len(broken.errors)) == ("broken", 1)
    assert (sound.workflow, sound.errors, sound.requeued) == ("sound", [], 1)
    status = await database.execute("SELECT status FROM jobs WHERE id = :id", id=stuck)
    assert status[0][0] == "Queued"
    assert report.errors == [f"broken: {broken.errors[0]}"]
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert line == f"Zombie sweep of broken failed: {broken.errors[0]}"


async def test_a_table_that_is_gone_fails_its_workflow_and_not_the_sweep(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start(database)
    await database.execute("DROP TABLE jobs")
    report = await unstuck.sweep()
    (error,) = report.errors
    assert error.startswith("jobs: ")
    assert "jobs" in error.removeprefix("jobs: ")
    assert "SELECT" not in error
    await database.create(Base.metadata)
    await add_job(database)
    assert (await unstuck.sweep()).left_processing == 1


async def test_missing_tables_of_its_own_are_said_to_be_missing(database: Database) -> None:
    await database.create(Base.metadata)
    registry = Registry()
    registry.register(Job, name="jobs")
    unstuck = Unstuck(database.sessions, ZombieSettings(), registry)
    (error,) = (await unstuck.sweep()).errors
    assert "create_tables=True" in error
    await unstuck.create_tables()
    assert (await unstuck.sweep()).errors == []


async def test_another_workflow_goes_first_each_time(database: Database) -> None:
    await database.create(Base.metadata)
    await database.create(metadata)
    registry = Registry()
    for name in ("a", "b", "c"):
        registry.register(Job, name=name)
    unstuck = Unstuck(database.sessions, ZombieSettings(), registry)
    orders = ["".join(w.workflow for w in (await unstuck.sweep()).workflows) for _ in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


async def test_cleanup_gives_the_number_of_records_that_left_processing(
    database: Database,
) -> None:
    told: list[SweepReport] = []

    class Listener:
        def on_sweep_finished(self, report: SweepReport) -> None:
            told.append(report)

    prepared = await start(database, reapable="idempotent")
    configure(database.sessions, ZombieSettings(), prepared.registry, [Listener()])
    for flag in (True, True, False):  # the last is held where it is
        await add_job(database, idempotent=flag)
    assert await cleanup_zombie_records() == 2
    assert await cleanup_zombie_records() == 0
    assert [report.found for report in told] == [3, 0]
