"""From its second strike on, a record waits before its next attempt, longer each time."""

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select

from tests.database import Database
from tests.jobs import (
    HOUR,
    Job,
    Status,
    add_claim,
    add_job,
    ago,
    get_job,
    get_stuck_again,
    start,
)
from tests.lookup import Witness, jobs, recall, rewrite
from unstuck import Unstuck
from unstuck.tables import records

SLACK = 30  # seconds that a slow machine may take between the sweep and the look at its result


async def start_with_one_strike(database: Database, **more: Any) -> tuple[Unstuck, int]:
    """A job that is stuck for the second time."""
    unstuck = await start(database, **more)
    job = await add_job(database)
    await unstuck.sweep()
    await get_stuck_again(database, job)
    return unstuck, job


def seconds_to(moment: datetime | None) -> float:
    assert moment is not None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - datetime.now(UTC)).total_seconds()


async def test_the_first_strike_does_not_wait(database: Database) -> None:
    unstuck = await start(database, retry_at="retry_at")
    job = await add_job(database)
    await unstuck.sweep()
    row = await get_job(database, job)
    assert (row.status, row.retry_at) == (Status.Queued, None)


async def test_a_host_that_knows_no_retry_at_is_made_to_wait_in_processing(
    database: Database,
) -> None:
    witness = Witness()
    unstuck, job = await start_with_one_strike(database, observers=[witness])
    report = await unstuck.sweep()
    assert (report.workflows[0].deferred, report.left_processing) == (1, 0)
    assert (await get_job(database, job)).status is Status.Processing
    memory = await recall(database, job)
    assert memory is not None
    assert memory.zombie_count == 2
    assert 30 - SLACK <= seconds_to(memory.retry_at) <= 60
    assert [zombie.zombie_count for zombie in witness.heard("on_deferred")] == [2]

    assert (await unstuck.sweep()).found == 0
    assert len(await unstuck.history("jobs", job)) == 2


async def test_a_deferred_job_is_requeued_when_due_and_is_no_other_zombie(
    database: Database,
) -> None:
    witness = Witness()
    unstuck, job = await start_with_one_strike(database, observers=[witness])
    await unstuck.sweep()
    await rewrite(database, records, retry_at=ago(1))
    assert (await unstuck.sweep()).left_processing == 1

    row = await get_job(database, job)
    assert row.status is Status.Queued
    assert row.error is not None
    assert "strike 2 of 3" in row.error
    memory = await recall(database, job)
    assert memory is not None
    assert (memory.zombie_count, memory.deferred_at, memory.retry_at) == (2, None, None)
    story = [(entry.kind, entry.outcome) for entry in await unstuck.history("jobs", job)]
    assert story == [
        ("zombie", "requeued"),
        ("zombie", "deferred"),
        ("deferral_ended", "requeued"),
    ]
    assert sum(count.zombies for count in await unstuck.count_zombies(ago(HOUR), ago(-HOUR))) == 2
    assert len(witness.heard("on_zombie_detected")) == 2
    assert len(witness.heard("on_requeued")) == 2


async def test_a_deferred_job_that_showed_life_and_got_stuck_anew_is_another_zombie(
    database: Database,
) -> None:
    unstuck, job = await start_with_one_strike(database)
    await unstuck.sweep()
    # It was deferred three hours ago, came to life all the same and got stuck two hours ago.
    await rewrite(database, records, deferred_at=ago(3 * HOUR), retry_at=ago(3 * HOUR))
    await unstuck.sweep()
    memory = await recall(database, job)
    assert memory is not None
    assert memory.zombie_count == 3


async def test_many_deferrals_that_end_at_once_are_no_mass_stall(database: Database) -> None:
    witness = Witness()
    unstuck = await start(
        database, observers=[witness], settings={"mass_stall_records": 2, "batch_size": 1}
    )
    for _ in range(2):  # one after the other, so that neither is a mass stall of its own
        job = await add_job(database)
        await unstuck.sweep()
        await get_stuck_again(database, job)
        await unstuck.sweep()
    await rewrite(database, records, retry_at=ago(1))
    report = await unstuck.sweep()
    assert (report.left_processing, report.workflows[0].mass_stall) == (2, False)
    assert witness.heard("on_mass_stall") == []


async def test_a_host_with_a_retry_column_gets_its_job_back_at_once(database: Database) -> None:
    unstuck, job = await start_with_one_strike(database, retry_at="retry_at")
    await unstuck.sweep()
    row, memory = await get_job(database, job), await recall(database, job)
    assert memory is not None
    assert row.status is Status.Queued
    assert 30 - SLACK <= seconds_to(row.retry_at) <= 60
    assert abs(seconds_to(row.retry_at) - seconds_to(memory.retry_at)) < 1


async def test_a_claimed_job_goes_back_at_once_for_our_loop_honours_retry_at(
    database: Database,
) -> None:
    unstuck, job = await start_with_one_strike(database)
    await add_claim(database, job, token=uuid.uuid4(), started_at=ago(2 * HOUR))
    await unstuck.sweep()
    assert (await get_job(database, job)).status is Status.Queued
    memory = await recall(database, job)
    assert memory is not None
    assert seconds_to(memory.retry_at) > 0
    assert memory.deferred_at is None


@pytest.mark.parametrize(
    ("strikes", "ceiling"), [(2, 100), (3, 200), (4, 400), (5, 500), (40, 500), (10**6, 500)]
)
async def test_the_wait_doubles_up_to_a_cap_and_is_spread_over_its_upper_half(
    database: Database, strikes: int, ceiling: float
) -> None:
    unstuck = await start(database, retry_at="retry_at", backoff=(100, 500), max_resets=10**6)
    for _ in range(20):
        await add_job(database)
    await unstuck.sweep()
    await rewrite(database, records, zombie_count=strikes - 1)
    await rewrite(database, jobs, status=Status.Processing, updated_at=ago(2 * HOUR))
    await unstuck.sweep()
    async with database.sessions() as session:
        waits = [seconds_to(at) for at in await session.scalars(select(Job.retry_at))]
    assert len(waits) == 20
    assert min(waits) >= ceiling / 2 - SLACK
    assert max(waits) <= ceiling
    assert max(waits) - min(waits) > ceiling / 20  # 20 draws that close together: 1 in 10**18


async def test_a_backoff_of_zero_requeues_every_strike_at_once(database: Database) -> None:
    unstuck, job = await start_with_one_strike(database, backoff=0)
    await unstuck.sweep()
    assert (await get_job(database, job)).status is Status.Queued
    memory = await recall(database, job)
    assert memory is not None
    assert (memory.zombie_count, memory.retry_at) == (2, None)


async def test_a_retry_time_of_the_past_is_cleared_by_the_next_strike_without_one(
    database: Database,
) -> None:
    unstuck = await start(database, retry_at="retry_at", settings={"backoff_base_seconds": 0})
    job = await add_job(database, retry_at=ago(HOUR))
    await unstuck.sweep()
    assert (await get_job(database, job)).retry_at is None
