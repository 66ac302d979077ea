"""Very many zombies at once are an outage, not bad records."""

import uuid
from datetime import UTC, datetime

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
    change,
    get_job,
    get_stuck_again,
    start,
)
from tests.lookup import Witness, read_everything, recall, rewrite
from unstuck.tables import events, records

STALL = {"mass_stall_records": 10, "mass_stall_spread_seconds": 300}


async def add_jobs(database: Database, count: int) -> list[int]:
    return [await add_job(database) for _ in range(count)]


async def read_stalls(database: Database) -> list[int]:
    """How many zombies each noted mass stall had at least."""
    async with database.engine.connect() as connection:
        kind = events.c.kind == "mass_stall"
        rows = await connection.scalars(select(events.c.data).where(kind).order_by(events.c.id))
        return [data["at_least"] for data in rows]


async def read_strikes(database: Database) -> set[int]:
    async with database.engine.connect() as connection:
        return set(await connection.scalars(select(records.c.zombie_count)))


async def test_a_mass_stall_is_requeued_spread_out_and_without_strikes(
    database: Database,
) -> None:
    witness = Witness()
    unstuck = await start(database, settings=STALL, retry_at="retry_at", observers=[witness])
    await add_jobs(database, 10)
    report = await unstuck.sweep()
    assert (report.workflows[0].requeued, report.workflows[0].mass_stall) == (10, True)
    assert await read_strikes(database) == {0}
    async with database.sessions() as session:
        jobs = list(await session.scalars(select(Job)))
    now = datetime.now(UTC)
    waits = []
    for job in jobs:
        assert job.status is Status.Queued
        assert "no strike, mass stall" in str(job.error)
        assert job.retry_at is not None
        waits.append((job.retry_at.replace(tzinfo=UTC) - now).total_seconds())
    assert max(waits) <= 300
    assert max(waits) - min(waits) > 30  # ten draws from 300 that close together: 1 in 10**8

    assert await read_stalls(database) == [10]
    (stall,) = witness.heard("on_mass_stall")
    assert (stall.workflow, stall.zombies) == ("jobs", 10)


async def test_just_below_a_mass_stall_strikes_count_as_usual(database: Database) -> None:
    witness = Witness()
    unstuck = await start(database, settings=STALL, observers=[witness])
    await add_jobs(database, 9)
    assert not (await unstuck.sweep()).workflows[0].mass_stall
    assert await read_strikes(database) == {1}
    assert await read_stalls(database) == []
    assert witness.heard("on_mass_stall") == []


async def test_a_host_that_knows_no_retry_at_gets_a_mass_stall_back_at_once(
    database: Database,
) -> None:
    unstuck = await start(database, settings=STALL)
    jobs = await add_jobs(database, 10)
    assert (await unstuck.sweep()).left_processing == 10
    memory = await recall(database, jobs[0])
    assert memory is not None
    assert memory.retry_at is not None


@pytest.mark.parametrize("indexed", [False, True])
async def test_a_mass_stall_over_several_batches_and_sweeps_is_one(
    database: Database, indexed: bool
) -> None:
    witness = Witness()
    settings = {**STALL, "batch_size": 4, "max_per_sweep": 9}
    unstuck = await start(database, settings=settings, observers=[witness])
    if indexed:
        await database.execute("CREATE INDEX stuck ON jobs (id) WHERE status = 'Processing'")
    await add_jobs(database, 21)
    for _ in range(2):
        report = (await unstuck.sweep()).workflows[0]
        assert (report.requeued, report.capped, report.mass_stall) == (9, True, True)
    last = (await unstuck.sweep()).workflows[0]  # three: by themselves they were no mass stall
    assert (last.requeued, last.mass_stall) == (3, True)
    assert await read_strikes(database) == {0}
    assert len(await read_stalls(database)) == 1
    assert len(witness.heard("on_mass_stall")) == 1


async def test_a_zombie_that_still_lived_after_the_stall_gets_its_strike(
    database: Database,
) -> None:
    unstuck = await start(database, settings=STALL, threshold=60)
    jobs = await add_jobs(database, 10)
    await unstuck.sweep()
    # The stall was 30 minutes ago; this one was taken up after it, and got stuck again since.
    await rewrite(database, events, at=ago(1800))
    await get_stuck_again(database, jobs[0])
    await change(database, jobs[0], updated_at=ago(300))
    await unstuck.sweep()
    memory = await recall(database, jobs[0])
    assert memory is not None
    assert memory.zombie_count == 1


async def test_after_its_window_a_mass_stall_excuses_nobody(database: Database) -> None:
    unstuck = await start(database, settings={**STALL, "mass_stall_window_minutes": 30})
    jobs = await add_jobs(database, 10)
    await unstuck.sweep()
    await rewrite(database, events, at=ago(HOUR))
    await get_stuck_again(database, jobs[0])
    assert not (await unstuck.sweep()).workflows[0].mass_stall
    memory = await recall(database, jobs[0])
    assert memory is not None
    assert memory.zombie_count == 1


async def test_what_is_not_reapable_is_held_in_a_mass_stall_as_well(database: Database) -> None:
    unstuck = await start(database, settings=STALL, reapable="idempotent", held=Status.Held)
    held = [await add_job(database, idempotent=False) for _ in range(5)]
    free = [await add_job(database, idempotent=True) for _ in range(5)]
    await unstuck.sweep()
    assert {(await get_job(database, job)).status for job in held} == {Status.Held}
    assert {(await get_job(database, job)).status for job in free} == {Status.Queued}
    assert await read_strikes(database) == {0}


async def test_a_job_with_its_strikes_used_up_is_not_given_up_in_a_mass_stall(
    database: Database,
) -> None:
    unstuck = await start(database, settings=STALL, max_resets=0)
    jobs = await add_jobs(database, 10)
    await unstuck.sweep()
    assert {(await get_job(database, job)).status for job in jobs} == {Status.Queued}


async def test_a_mass_stall_of_claims_that_never_started_is_spread_as_well(
    database: Database,
) -> None:
    unstuck = await start(database, settings=STALL, reapable=False, retry_at="retry_at")
    for job in await add_jobs(database, 10):
        await add_claim(database, job, token=uuid.uuid4())
    assert (await unstuck.sweep()).workflows[0].requeued == 10
    async with database.sessions() as session:
        assert None not in set(await session.scalars(select(Job.retry_at)))


async def test_mute_records_make_no_mass_stall(database: Database) -> None:
    unstuck = await start(database, settings=STALL)
    for _ in range(9):
        await add_job(database, updated_at=None)
    stuck = await add_job(database)
    assert not (await unstuck.sweep()).workflows[0].mass_stall
    memory = await recall(database, stuck)
    assert memory is not None
    assert memory.zombie_count == 1


async def test_zero_turns_the_notion_off(database: Database) -> None:
    unstuck = await start(database, settings={**STALL, "mass_stall_records": 0})
    await add_jobs(database, 12)
    assert not (await unstuck.sweep()).workflows[0].mass_stall
    assert await read_strikes(database) == {1}


async def test_a_dry_run_foresees_a_mass_stall_and_writes_nothing(database: Database) -> None:
    witness = Witness()
    settings = {**STALL, "batch_size": 4}
    unstuck = await start(database, settings=settings, max_resets=0, observers=[witness])
    await add_jobs(database, 10)
    before = await read_everything(database)
    report = await unstuck.sweep(dry_run=True)
    assert (report.workflows[0].mass_stall, report.workflows[0].requeued) == (True, 10)
    assert {zombie.zombie_count for zombie in report.zombies} == {0}
    assert await read_everything(database) == before
    assert witness.heard("on_mass_stall") == []


async def test_a_second_stall_within_the_window_is_another_one(database: Database) -> None:
    witness = Witness()
    unstuck = await start(database, settings=STALL, threshold=60, observers=[witness])
    await add_jobs(database, 10)
    await unstuck.sweep()
    # The first was 30 minutes ago; these were alive after it, and stalled together since.
    await rewrite(database, events, at=ago(1800))
    for _ in range(10):
        await add_job(database, updated_at=ago(300))
    assert (await unstuck.sweep()).workflows[0].mass_stall
    assert await read_stalls(database) == [10, 10]
    assert await read_strikes(database) == {0}
