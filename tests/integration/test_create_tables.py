import asyncio
import logging

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from tests.database import Database
from tests.jobs import Base, Job, add_job
from tests.scheduling import AT_ONCE, Reports
from unstuck import Registry, Unstuck, ZombieSettings, metadata
from unstuck.db import SessionSource

REPLICAS = 6


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.register(Job, name="jobs")
    return registry


async def count_tables(database: Database) -> int:
    catalogue = {
        "postgresql": "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'zombie%'",
        "sqlite": "SELECT count(*) FROM sqlite_master WHERE type='table' AND name LIKE 'zombie%'",
    }
    ((tables,),) = await database.execute(catalogue[database.dialect])
    return int(tables)


async def test_the_first_sweep_makes_the_tables(database: Database, registry: Registry) -> None:
    await database.create(Base.metadata)
    await add_job(database)
    reports = Reports()
    unstuck = Unstuck(database.sessions, ZombieSettings(**AT_ONCE), registry, [reports])
    assert await count_tables(database) == 0
    handle = unstuck.setup(create_tables=True)
    assert (await reports.next()).left_processing == 1
    assert await count_tables(database) == len(metadata.tables)
    await handle.shutdown()


async def test_replicas_that_start_at_once_make_the_tables_once(
    database: Database, registry: Registry
) -> None:
    await database.create(Base.metadata)
    await add_job(database)
    replicas = [Unstuck(database.url, ZombieSettings(), registry) for _ in range(REPLICAS)]
    handles = [replica.setup(AsyncIOScheduler(), create_tables=True) for replica in replicas]
    reports = await asyncio.gather(*(handle.run_now() for handle in handles))
    assert [report.errors for report in reports] == [[]] * REPLICAS
    assert sum(report.left_processing for report in reports) == 1
    assert await count_tables(database) == len(metadata.tables)
    for handle in handles:
        await handle.shutdown()


async def test_tables_that_are_there_keep_what_is_in_them(
    database: Database, registry: Registry
) -> None:
    await database.create(Base.metadata)
    unstuck = Unstuck(database.sessions, ZombieSettings(), registry)
    await unstuck.create_tables()
    record = await add_job(database)
    await unstuck.sweep()
    await unstuck.create_tables()
    assert len(await unstuck.history("jobs", record)) == 1


async def test_tables_that_cannot_be_made_yet_are_made_by_a_later_sweep(
    database: Database, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    await database.create(Base.metadata)
    await add_job(database)
    available: list[SessionSource] = []

    def get_session() -> SessionSource:
        return available[0]() if available else None

    unstuck = Unstuck(get_session, ZombieSettings(), registry)
    handle = unstuck.setup(AsyncIOScheduler(), create_tables=True)
    assert len((await handle.run_now()).errors) == 1
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert told[0].startswith("The tables of unstuck cannot be created: No database session: ")
    available.append(database.sessions)
    assert (await handle.run_now()).left_processing == 1
    await handle.shutdown()
