"""What a batch takes, what it passes over, and what the next one finds."""

from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.database import Database
from tests.jobs import Status, add_job, ago, get_job, start
from unstuck.tables import records


async def remember(database: Database, record_id: int, **values: Any) -> None:
    async with database.engine.begin() as connection:
        row = {"workflow": "jobs", "record_id": str(record_id), "zombie_count": 1, **values}
        await connection.execute(records.insert().values(**row))


async def count_processing(database: Database) -> int:
    rows = await database.execute("SELECT count(*) FROM jobs WHERE status = 'Processing'")
    return int(rows[0][0])


async def test_no_statement_takes_more_than_a_batch(postgres: Database) -> None:
    unstuck = await start(postgres, settings={"batch_size": 10, "mass_stall_records": 0})
    for _ in range(35):
        await add_job(postgres)
    assert (await unstuck.sweep()).left_processing == 35
    # `at` is the transaction's time, and a transaction takes once.
    batches = await postgres.execute("SELECT count(*) FROM zombie_events GROUP BY at ORDER BY 1")
    assert [size for (size,) in batches] == [5, 10, 10, 10]


@pytest.mark.parametrize("indexed", [True, False])
async def test_what_waits_for_others_does_not_starve_the_rest(
    database: Database, indexed: bool
) -> None:
    unstuck = await start(database, settings={"batch_size": 3, "mass_stall_records": 0})
    if indexed:
        await database.execute("CREATE INDEX walk ON jobs (id) WHERE status = 'Processing'")
    held = [await add_job(database) for _ in range(4)]
    deferred = [await add_job(database) for _ in range(4)]
    for job in held:
        await remember(database, job, held_at=ago(60))
    for job in deferred:
        await remember(database, job, deferred_at=ago(60), retry_at=ago(-600))
    stuck = [await add_job(database) for _ in range(4)]
    assert (await unstuck.sweep()).left_processing == len(stuck)
    assert [(await get_job(database, job)).status for job in stuck] == [Status.Queued] * 4
    assert await count_processing(database) == len(held + deferred)


@pytest.mark.parametrize("indexed", [True, False])
async def test_locked_records_are_counted_and_do_not_starve_the_rest(
    postgres: Database, indexed: bool
) -> None:
    unstuck = await start(postgres, settings={"batch_size": 3, "mass_stall_records": 0})
    if indexed:
        await postgres.execute("CREATE INDEX walk ON jobs (id) WHERE status = 'Processing'")
    for _ in range(8):
        await add_job(postgres)
    async with postgres.engine.begin() as worker:
        await worker.exec_driver_sql("SELECT FROM jobs ORDER BY id LIMIT 4 FOR UPDATE")
        report = await unstuck.sweep()
    assert (report.left_processing, report.total("locked"), report.errors) == (4, 4, [])
    assert await count_processing(postgres) == 4
    report = await unstuck.sweep()
    assert (report.left_processing, report.total("locked")) == (4, 0)


async def test_a_record_locked_by_a_live_transaction_is_taken_by_the_next_sweep(
    postgres: Database,
) -> None:
    unstuck = await start(postgres)
    stuck = await add_job(postgres)
    async with AsyncExitStack() as transaction:
        worker = await transaction.enter_async_context(postgres.engine.begin())
        await worker.exec_driver_sql("UPDATE jobs SET error = 'still at it'")
        report = await unstuck.sweep()
        assert (report.found, report.total("locked")) == (0, 1)
    assert (await unstuck.sweep()).left_processing == 1
    assert (await get_job(postgres, stuck)).status is Status.Queued


@pytest.mark.parametrize(
    ("strikes", "policy", "outcome"),
    [
        (0, {}, "requeued"),
        (1, {}, "deferred"),
        (3, {}, "failed"),
        (0, {"reapable": False}, "held"),
        (0, {"reapable": False, "held": Status.Held}, "held"),
    ],
)
async def test_the_same_zombie_is_not_handled_again_by_the_next_scan(
    database: Database, strikes: int, policy: Any, outcome: str
) -> None:
    unstuck = await start(database, **policy)
    stuck = await add_job(database)
    if strikes:
        await remember(database, stuck, zombie_count=strikes)
    assert (await unstuck.sweep()).total(outcome) == 1
    report = await unstuck.sweep()
    assert (report.found, report.left_processing, report.total("locked")) == (0, 0, 0)
    events = await database.execute("SELECT outcome, zombie_count FROM zombie_events")
    assert [tuple(row) for row in events] == [(outcome, strikes + 1)]


async def test_a_record_without_any_time_gets_its_clock_started_once(database: Database) -> None:
    unstuck = await start(database)
    mute = await add_job(database, updated_at=None)
    await unstuck.sweep()
    started = (await get_job(database, mute)).updated_at
    assert started is not None
    await unstuck.sweep()
    assert (await get_job(database, mute)).updated_at == started
    events = await database.execute("SELECT kind FROM zombie_events")
    assert [kind for (kind,) in events] == ["clock_started"]
