"""One record that the database refuses must not keep the others stuck."""

import pytest
from sqlalchemy import event

from tests.database import Database
from tests.jobs import Status, add_job, get_job, start

UNIQUE = "CREATE UNIQUE INDEX one_queued ON jobs (zombie_count) WHERE status = 'Queued'"
WALK = "CREATE INDEX walk ON jobs (id) WHERE status = 'Processing'"


async def prepare(database: Database) -> tuple[int, list[int]]:
    """A record that cannot be queued, for its like is queued already; and others that can be."""
    await database.execute(UNIQUE)
    await add_job(database, status=Status.Queued, zombie_count=100)
    good = [await add_job(database, zombie_count=n) for n in range(1, 4)]
    bad = await add_job(database, zombie_count=100)
    good += [await add_job(database, zombie_count=n) for n in range(4, 7)]
    return bad, good


@pytest.mark.parametrize("index", [None, WALK])
@pytest.mark.parametrize("batch_size", [1000, 3])
async def test_the_others_come_back(database: Database, batch_size: int, index: str | None) -> None:
    unstuck = await start(database, settings={"batch_size": batch_size})
    bad, good = await prepare(database)
    if index:
        await database.execute(index)
    report = await unstuck.sweep()
    assert {(await get_job(database, job)).status for job in good} == {Status.Queued}
    assert (await get_job(database, bad)).status is Status.Processing
    (error,) = report.errors
    assert error.startswith(f"jobs: record {bad} cannot be written: ")
    assert report.left_processing == len(good)
    assert await database.execute("SELECT count(*) FROM zombie_events") == [(len(good),)]


async def test_where_every_record_is_refused_it_gives_up(database: Database) -> None:
    unstuck = await start(database)
    await database.execute("CREATE UNIQUE INDEX one ON jobs (status) WHERE status = 'Queued'")
    await add_job(database, status=Status.Queued)
    for _ in range(100):
        await add_job(database)
    statements = 0

    def count(*_: object) -> None:
        nonlocal statements
        statements += 1

    event.listen(database.engine.sync_engine, "before_cursor_execute", count)
    report = await unstuck.sweep()
    assert len(report.errors) == 21
    assert statements < 1000


async def test_a_mass_stall_is_written_down_though_a_batch_was_refused(database: Database) -> None:
    unstuck = await start(database, settings={"mass_stall_records": 5})
    _, good = await prepare(database)
    report = await unstuck.sweep()
    assert report.left_processing == len(good)
    stalls = await database.execute("SELECT 1 FROM zombie_events WHERE kind = 'mass_stall'")
    assert len(stalls) == 1


async def test_a_constraint_that_is_checked_at_the_commit_counts_as_well(
    postgres: Database,
) -> None:
    unstuck = await start(postgres)
    await postgres.execute(
        "ALTER TABLE jobs ADD CONSTRAINT once UNIQUE (zombie_count, status) "
        "DEFERRABLE INITIALLY DEFERRED"
    )
    await add_job(postgres, status=Status.Queued, zombie_count=100)
    bad, good = await add_job(postgres, zombie_count=100), await add_job(postgres, zombie_count=1)
    report = await unstuck.sweep()
    assert (await get_job(postgres, good)).status is Status.Queued
    assert (await get_job(postgres, bad)).status is Status.Processing
    assert len(report.errors) == 1
