"""What the ledger can answer: whole stories, counts by day, repeat offenders, recoveries."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from tests.database import Database
from tests.jobs import (
    HOUR,
    Job,
    Status,
    add_claim,
    add_job,
    ago,
    change,
    get_job,
    get_stuck_again,
    start,
)
from tests.lookup import rewrite
from unstuck import Registry, Unstuck, ZombieSettings
from unstuck.ledger import RepeatOffender, ZombieCount
from unstuck.tables import events, records

Story = list[tuple[str, str | None, int | None]]


async def read_story(unstuck: Unstuck, record_id: int) -> Story:
    history = await unstuck.history("jobs", record_id)
    assert [entry.id for entry in history] == sorted(entry.id for entry in history)
    assert all(entry.record_id == str(record_id) for entry in history)
    return [(entry.kind, entry.outcome, entry.zombie_count) for entry in history]


async def get_stuck_and_sweep(unstuck: Unstuck, database: Database, job: int) -> None:
    await get_stuck_again(database, job)
    await unstuck.sweep()


async def wait_out_the_deferral(unstuck: Unstuck, database: Database) -> None:
    await rewrite(database, records, retry_at=ago(1))
    await unstuck.sweep()


async def test_the_story_of_a_record_that_was_given_up_retried_and_came_good(
    database: Database,
) -> None:
    unstuck = await start(database, max_resets=2)
    job = await add_job(database)
    await unstuck.sweep()
    await get_stuck_and_sweep(unstuck, database, job)
    await wait_out_the_deferral(unstuck, database)
    await get_stuck_and_sweep(unstuck, database, job)
    await unstuck.retry("jobs", job, by="ada", why="the disk is empty again")
    await change(database, job, status=Status.Completed)
    await unstuck.sweep()
    assert await read_story(unstuck, job) == [
        ("zombie", "requeued", 1),
        ("zombie", "deferred", 2),
        ("deferral_ended", "requeued", 2),
        ("zombie", "failed", 3),
        ("retried", None, 3),
        ("recovered", None, 0),
    ]
    assert await unstuck.has_recovered("jobs", job)


async def test_the_story_of_a_record_that_was_held_and_released(database: Database) -> None:
    unstuck = await start(database, reapable=False)
    job = await add_job(database)
    await unstuck.sweep()
    await unstuck.release("jobs", job, by="ada", why="ran twice before, no harm done")
    await change(database, job, status=Status.Completed)
    await unstuck.sweep()
    assert await read_story(unstuck, job) == [
        ("zombie", "held", 1),
        ("released", None, 1),
        ("recovered", None, 0),
    ]
    released = (await unstuck.history("jobs", job))[1]
    assert released.data["by"] == "ada"
    assert released.data["why"] == "ran twice before, no harm done"


async def test_the_story_of_a_mass_stall_has_no_strikes(database: Database) -> None:
    unstuck = await start(database, settings={"mass_stall_records": 3}, max_resets=0)
    jobs = [await add_job(database) for _ in range(3)]
    await unstuck.sweep()
    for job in jobs:
        assert await read_story(unstuck, job) == [("zombie", "requeued", 0)]
    rows = await database.execute("SELECT kind, record_id FROM zombie_events ORDER BY id")
    assert tuple(rows[0]) == ("mass_stall", None)


async def test_stories_are_kept_apart_by_record_and_workflow(database: Database) -> None:
    unstuck = await start(database, name="others")
    job, bystander = await add_job(database), await add_job(database, updated_at=ago(1))
    await unstuck.sweep()
    registry = Registry()
    registry.register(Job, name="jobs")
    same_table = Unstuck(database.sessions, ZombieSettings(), registry)
    assert len(await unstuck.history("others", job)) == 1
    assert await unstuck.history("others", bystander) == []
    assert await same_table.history("jobs", job) == []


async def test_the_time_of_an_entry_is_aware_and_now(database: Database) -> None:
    unstuck = await start(database)
    job = await add_job(database)
    await unstuck.sweep()
    (entry,) = await unstuck.history("jobs", job)
    assert abs(entry.at - datetime.now(UTC)) < timedelta(minutes=1)


async def test_yesterdays_zombies_by_workflow_cause_and_outcome(database: Database) -> None:
    unstuck = await start(database, reapable="idempotent", backoff=0)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    yesterday = today - timedelta(days=1)
    for _ in range(2):
        await add_job(database, idempotent=True)
    held = await add_job(database, idempotent=False)
    lost = await add_job(database, idempotent=True)
    await add_claim(database, lost, token=uuid.uuid4(), started_at=ago(2 * HOUR))
    await add_job(database, updated_at=None)  # a clock that was started is no zombie
    await unstuck.sweep()
    await unstuck.release("jobs", held, by="ada", why="a decision is no zombie")
    # The span has its start and not its end.
    await rewrite(database, events, at=yesterday)
    for day, job in ((today, lost), (yesterday - timedelta(microseconds=1000), lost)):
        last = await database.execute("SELECT max(id) FROM zombie_events")
        await get_stuck_and_sweep(unstuck, database, job)
        await rewrite(database, events, events.c.id > last[0][0], at=day)
    assert await unstuck.count_zombies(yesterday, today) == [
        ZombieCount("jobs", "aged", "held", 1),
        ZombieCount("jobs", "aged", "requeued", 2),
        ZombieCount("jobs", "lost_heartbeat", "requeued", 1),
    ]
    assert await unstuck.count_zombies(today - timedelta(days=9), yesterday) == [
        ZombieCount("jobs", "aged", "requeued", 1)
    ]


async def test_repeat_offenders_are_named_worst_first(database: Database) -> None:
    unstuck = await start(database, backoff=0, max_resets=9)
    once, twice, often = [await add_job(database) for _ in range(3)]
    await unstuck.sweep()
    for job in (twice, often, often):
        await get_stuck_and_sweep(unstuck, database, job)
    worst = [RepeatOffender("jobs", str(often), 3), RepeatOffender("jobs", str(twice), 2)]
    assert await unstuck.repeat_offenders(1) == worst
    assert await unstuck.repeat_offenders(2) == worst[:1]
    assert await unstuck.repeat_offenders(3) == []
    assert await unstuck.repeat_offenders(0) == [*worst, RepeatOffender("jobs", str(once), 1)]


async def test_repeat_offenders_can_be_asked_for_since_a_time(database: Database) -> None:
    unstuck = await start(database, backoff=0)
    job = await add_job(database)
    await unstuck.sweep()
    await rewrite(database, events, at=ago(48 * HOUR))
    await get_stuck_and_sweep(unstuck, database, job)
    assert len(await unstuck.repeat_offenders(1)) == 1
    assert await unstuck.repeat_offenders(1, since=ago(24 * HOUR)) == []


async def test_a_record_has_recovered_until_it_is_a_zombie_again(database: Database) -> None:
    unstuck = await start(database, backoff=0)
    job = await add_job(database)
    assert not await unstuck.has_recovered("jobs", job)
    await unstuck.sweep()
    assert not await unstuck.has_recovered("jobs", job)
    await change(database, job, status=Status.Completed)
    await unstuck.sweep()
    assert await unstuck.has_recovered("jobs", job)
    await get_stuck_and_sweep(unstuck, database, job)
    assert not await unstuck.has_recovered("jobs", job)


@pytest.mark.parametrize("spread", [0, 300])
async def test_a_zombie_without_a_strike_is_seen_to_recover_as_well(
    database: Database, spread: float
) -> None:
    settings = {"mass_stall_records": 2, "mass_stall_spread_seconds": spread}
    unstuck = await start(database, settings=settings)
    unstarted = await add_job(database)
    await add_claim(database, unstarted, token=uuid.uuid4())
    await unstuck.sweep()
    stalled = [await add_job(database) for _ in range(2)]
    await unstuck.sweep()
    for job in (unstarted, *stalled):
        assert (await get_job(database, job)).status is Status.Queued
        await change(database, job, status=Status.Completed)
    await unstuck.sweep()
    for job in (unstarted, *stalled):
        assert await unstuck.has_recovered("jobs", job)


async def test_many_recoveries_are_noticed_batch_by_batch(database: Database) -> None:
    unstuck = await start(database, settings={"batch_size": 2})
    jobs = [await add_job(database) for _ in range(5)]
    await unstuck.sweep()
    await database.execute("UPDATE jobs SET status = 'Completed'")
    await change(database, jobs[3], status=Status.Waiting)
    await unstuck.sweep()
    assert [await unstuck.has_recovered("jobs", job) for job in jobs] == [
        True,
        True,
        True,
        False,
        True,
    ]
