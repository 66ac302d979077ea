"""The database dies, refuses, or keeps the sweep waiting."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from tests.database import Database, sqlite_database
from tests.interleaving import closed_gate, gated, until
from tests.jobs import Status, add_job, get_job, start
from tools.embedded_postgres import EmbeddedPostgres, _free_port
from unstuck import Observer, Unstuck

SMALL = {"batch_size": 10, "mass_stall_records": 0}
ZOMBIES = 35


@pytest.fixture
async def mortal(own_postgres: EmbeddedPostgres) -> AsyncIterator[Database]:
    database = Database(own_postgres.url(), own_postgres)
    yield database
    await database.dispose()


async def fill(database: Database) -> None:
    for _ in range(ZOMBIES):
        await add_job(database, idempotent=True)


async def count_taken(database: Database) -> int:
    """How many were taken; status, strike and ledger must say the same of each record."""
    rows = await database.execute(
        "SELECT status::text, coalesce(zombie_count_of, 0), coalesce(events_of, 0), count(*) "
        "FROM jobs "
        "LEFT JOIN (SELECT record_id AS r, zombie_count AS zombie_count_of FROM zombie_records) s "
        "  ON s.r = id::text "
        "LEFT JOIN (SELECT record_id AS e, count(*) AS events_of FROM zombie_events GROUP BY 1) t "
        "  ON t.e = id::text "
        "GROUP BY 1, 2, 3"
    )
    stories = {tuple(story): jobs for *story, jobs in map(tuple, rows)}
    assert stories.keys() <= {("Processing", 0, 0), ("Queued", 1, 1)}
    return int(stories.get(("Queued", 1, 1), 0))


async def check_recovery(database: Database, unstuck: Unstuck, *, before: int) -> None:
    assert database.server is not None
    database.server.start()
    assert await _connected(database)
    assert await count_taken(database) == before
    report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], ZOMBIES - before)
    assert await count_taken(database) == ZOMBIES


async def _connected(database: Database) -> bool:
    await database.engine.dispose()  # what the pool kept is dead
    return bool(await database.execute("SELECT 1"))


async def test_a_database_that_dies_between_two_batches_leaves_nothing_half_done(
    mortal: Database,
) -> None:
    assert mortal.server is not None
    kill = mortal.server.kill

    class Killer(Observer):
        told = 0

        def on_requeued(self, zombie: Any) -> None:
            self.told += 1
            if self.told == 20:
                kill()

    unstuck = await start(mortal, settings=SMALL, observers=[Killer()])
    await fill(mortal)
    report = await unstuck.sweep()
    assert len(report.errors) == 1
    assert report.left_processing == 20
    await check_recovery(mortal, unstuck, before=20)


async def test_a_database_that_dies_before_a_commit_leaves_nothing_half_done(
    mortal: Database,
) -> None:
    assert mortal.server is not None
    kill = mortal.server.kill
    unstuck = await start(mortal, settings=SMALL)
    await fill(mortal)
    commits = 0

    def on_commit(_connection: Any) -> None:
        nonlocal commits
        commits += 1
        if commits == 4:  # the survey, the reading of the keys, a batch; then this
            kill()

    event.listen(mortal.engine.sync_engine, "commit", on_commit)
    report = await unstuck.sweep()
    event.remove(mortal.engine.sync_engine, "commit", on_commit)
    assert len(report.errors) == 1
    assert report.left_processing == 10
    await check_recovery(mortal, unstuck, before=10)


async def test_a_database_that_dies_within_a_statement_leaves_nothing_half_done(
    mortal: Database,
) -> None:
    assert mortal.server is not None
    unstuck = await start(mortal, settings=SMALL, reapable=gated)
    await fill(mortal)
    keeper = Database(mortal.url)
    async with AsyncExitStack() as gate:
        sweep_waits = await gate.enter_async_context(closed_gate(keeper))
        sweep = asyncio.create_task(unstuck.sweep())
        await sweep_waits()
        mortal.server.kill()
        with pytest.raises(DBAPIError):  # the keeper's connection has died as well
            await gate.aclose()
    await keeper.dispose()
    report = await sweep
    assert len(report.errors) == 1
    assert report.left_processing == 0
    await check_recovery(mortal, unstuck, before=0)


async def test_a_pooled_connection_that_died_while_idle_costs_no_sweep(mortal: Database) -> None:
    assert mortal.server is not None
    unstuck = await start(mortal)
    stuck = await add_job(mortal)
    mortal.server.kill()
    mortal.server.start()
    report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], 1)
    assert (await get_job(mortal, stuck)).status is Status.Queued


async def test_a_refused_connection_is_reported_and_not_raised(postgres: Database) -> None:
    unstuck = await start(postgres)
    nowhere = f"postgresql+asyncpg://postgres@127.0.0.1:{_free_port()}/none"
    refused = Unstuck(nowhere, unstuck.settings, unstuck.registry)
    report = await refused.sweep()
    await refused.close()
    assert len(report.errors) == 1
    assert "No database session" in report.errors[0]


async def is_quiet(database: Database) -> bool:
    """Whether no other connection runs a statement or keeps a transaction open."""
    busy = await database.execute(
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND (state <> 'idle' OR backend_xid IS NOT NULL)"
    )
    return not busy


async def check_that_nothing_is_held(database: Database) -> None:
    """Soon, not at once: the server ends a statement by itself after it was told to."""
    await until(lambda: is_quiet(database))
    await database.execute("SELECT 1 FROM jobs FOR UPDATE NOWAIT")
    assert await database.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'") == []
    assert await database.execute("SELECT 1 FROM zombie_events") == []


async def test_a_lock_on_the_table_holds_a_sweep_up_no_longer_than_its_lock_timeout(
    postgres: Database,
) -> None:
    unstuck = await start(postgres, settings={"lock_timeout_seconds": 0.2})
    await add_job(postgres)
    async with postgres.engine.begin() as migration:
        await migration.exec_driver_sql("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
        report = await unstuck.sweep()
    assert report.errors == ["jobs: canceling statement due to lock timeout"]
    assert (await unstuck.sweep()).left_processing == 1


def slow(_model: Any) -> Any:
    """`reapable=`: true after half a minute."""
    return func.pg_sleep(30).is_not(None)


async def test_a_slow_statement_ends_with_its_statement_timeout(postgres: Database) -> None:
    unstuck = await start(postgres, settings={"statement_timeout_seconds": 0.2}, reapable=slow)
    await add_job(postgres)
    report = await unstuck.sweep()
    assert report.errors == ["jobs: canceling statement due to statement timeout"]
    await check_that_nothing_is_held(postgres)


async def test_a_sweep_that_runs_out_of_time_gives_everything_back(postgres: Database) -> None:
    unstuck = await start(postgres, settings={"sweep_timeout_seconds": 0.5}, reapable=slow)
    await add_job(postgres)
    report = await unstuck.sweep()
    assert report.errors == ["jobs: the sweep ran into its limit of 0.5 s"]
    assert postgres.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    await check_that_nothing_is_held(postgres)


async def test_a_cancelled_sweep_leaves_no_transaction_open(postgres: Database) -> None:
    unstuck = await start(postgres, reapable=gated)
    await add_job(postgres, idempotent=True)
    async with closed_gate(postgres) as sweep_waits:
        sweep = asyncio.create_task(unstuck.sweep())
        await sweep_waits()
        sweep.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sweep
    assert postgres.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    await check_that_nothing_is_held(postgres)
    assert (await unstuck.sweep()).left_processing == 1


async def test_a_sqlite_file_that_another_writes_is_reported_and_not_raised(tmp_path: Path) -> None:
    async with sqlite_database(tmp_path) as database:
        unstuck = await start(database)
        await add_job(database)
        impatient = create_async_engine(database.url, connect_args={"timeout": 0.1})
        hurried = Unstuck(impatient, unstuck.settings, unstuck.registry)
        async with database.engine.begin() as writer:
            await writer.exec_driver_sql("UPDATE jobs SET error = 'still at it'")
            assert (await hurried.sweep()).errors == ["jobs: database is locked"]
        assert (await hurried.sweep()).left_processing == 1
        await impatient.dispose()
