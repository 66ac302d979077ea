"""How much a sweep takes, asks and leaves behind."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Mapped, mapped_column

from tests.database import Database
from tests.jobs import Base, Job, Status, add_job, change, start
from unstuck import Registry, Unstuck, ZombieSettings
from unstuck.claims import can_walk
from unstuck.db.engine import make_engine

SMALL: dict[str, Any] = {"batch_size": 10, "mass_stall_records": 0}
PARTIAL = "CREATE INDEX walk ON jobs (id) WHERE status = 'Processing'"
FULL = "CREATE INDEX walk ON jobs (status, id)"
INDEXES = pytest.mark.parametrize("index", [PARTIAL, FULL, "SELECT 1"], ids=["part", "full", "no"])


@contextmanager
def listening(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """Every statement that is sent meanwhile, with its parameters."""
    heard: list[tuple[str, Any]] = []

    def on_execute(_connection: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        heard.append((statement, values))

    engine = database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", on_execute)
    try:
        yield heard
    finally:
        event.remove(engine, "before_cursor_execute", on_execute)


@INDEXES
async def test_a_sweep_stops_at_its_cap_and_the_next_one_goes_on(
    database: Database, index: str
) -> None:
    unstuck = await start(database, settings={**SMALL, "max_per_sweep": 25})
    await database.execute(index)
    for _ in range(40):
        await add_job(database)
    reports = [await unstuck.sweep() for _ in range(3)]
    assert [report.left_processing for report in reports] == [25, 15, 0]
    assert [report.workflows[0].capped for report in reports] == [True, False, False]


class Part(Base):
    """A composite key whose order is not that of its text."""

    __tablename__ = "parts"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str]
    updated_at: Mapped[Any] = mapped_column(Job.__table__.c.updated_at.type)


@pytest.mark.parametrize("indexed", [True, False])
async def test_composite_keys_are_taken_batch_after_batch(
    database: Database, indexed: bool
) -> None:
    await start(database)
    if indexed:
        await database.execute(
            "CREATE INDEX walk ON parts (tenant, number) WHERE status = 'Processing'"
        )
    async with database.sessions.begin() as session:
        stale = (await session.get_one(Job, await add_job(database))).updated_at
        for tenant in ("a", "a,b", "b"):
            for number in range(1, 12):
                row = {"tenant": tenant, "number": number, "updated_at": stale}
                session.add(Part(status="Processing", **row))
    registry = Registry()
    registry.register(Part, queued="Queued", processing="Processing")
    unstuck = Unstuck(database.sessions, ZombieSettings(**SMALL), registry)
    assert (await unstuck.sweep()).left_processing == 33
    statuses = await database.execute("SELECT DISTINCT status FROM parts")
    assert [status for (status,) in statuses] == ["Queued"]
    ids = await database.execute("SELECT count(DISTINCT record_id), count(*) FROM zombie_events")
    assert tuple(ids[0]) == (33, 33)


@pytest.mark.parametrize(
    ("index", "walks"),
    [
        ("(id) WHERE status = 'Processing'", True),
        ("(id) INCLUDE (error) WHERE status = 'Processing'", True),
        ("(id DESC) WHERE status IN ('Processing')", True),
        ("(status, id)", True),
        ("(status, id, updated_at)", True),
        ("(status)", False),
        ("(id, status)", False),
        ("(status, updated_at, id)", False),
        ("(updated_at) WHERE status = 'Processing'", False),
        ("(id) WHERE status = 'Queued'", False),
        ("(id) WHERE status <> 'Processing'", False),
        ("(id) WHERE status IN ('Processing', 'Completed')", False),
        ("(id) WHERE status = 'Processing' AND error IS NULL", False),
        ("USING hash (id) WHERE status = 'Processing'", False),
        ("((id + 1), id) WHERE status = 'Processing'", False),
    ],
)
async def test_only_an_index_that_a_walk_can_use_makes_it_walk(
    postgres: Database, index: str, walks: bool
) -> None:
    unstuck = await start(postgres)
    (workflow,) = unstuck.registry
    using, columns = ("", index) if index.startswith("(") else (index[:10], index[10:])
    await postgres.execute(f"CREATE INDEX walk ON jobs {using} {columns}")
    async with postgres.engine.connect() as connection:
        assert await can_walk(connection, workflow) is walks


async def test_a_sqlite_table_always_lies_in_the_order_of_its_key(database: Database) -> None:
    unstuck = await start(database)
    (workflow,) = unstuck.registry
    async with database.engine.connect() as connection:
        assert await can_walk(connection, workflow) is (database.dialect == "sqlite")


async def test_a_walk_reads_its_index_and_never_the_whole_table(postgres: Database) -> None:
    unstuck = await start(postgres, settings={**SMALL, "max_per_sweep": 30})
    await postgres.execute(PARTIAL)
    await postgres.execute(
        "INSERT INTO jobs (status, updated_at, zombie_count) "
        "SELECT (CASE WHEN n % 50 = 0 THEN 'Processing' ELSE 'Completed' END)::status, "
        "now() - interval '2 hours', 0 FROM generate_series(1, 50000) n"
    )
    await postgres.execute("ANALYZE jobs")
    with listening(postgres) as heard:
        await unstuck.sweep()
    walks = [(statement, values) for statement, values in heard if "found AS" in statement]
    assert len(walks) == 3
    async with postgres.engine.connect() as connection:
        for statement, values in walks:
            rows = await connection.exec_driver_sql(f"EXPLAIN {statement}", tuple(values))
            plan = "\n".join(line for (line,) in rows)
            assert "using walk on jobs" in plan
            assert "Seq Scan on jobs" not in plan


async def test_an_idle_and_a_small_sweep_ask_a_handful_of_questions(database: Database) -> None:
    unstuck = await start(database)
    with listening(database) as heard:
        await unstuck.sweep()
    assert len(heard) == 2  # prepare, survey
    job = await add_job(database)
    with listening(database) as heard:
        assert (await unstuck.sweep()).left_processing == 1
    # SQLite takes in steps: make the batch, six statements over it, drop it.
    assert len(heard) == (3 if database.dialect == "postgresql" else 2 + 8)
    await change(database, job, status=Status.Completed)
    with listening(database) as heard:
        await unstuck.sweep()
    # What is remembered is settled: prepare, list, look, forget, write down.
    assert len(heard) == 2 + 5


async def test_the_host_s_connection_is_given_back_as_it_was(postgres: Database) -> None:
    unstuck = await start(postgres)
    await add_job(postgres)
    engine = create_async_engine(postgres.url, pool_size=1, max_overflow=0)
    settings = "SELECT name, setting FROM pg_settings ORDER BY name"
    async with engine.connect() as connection:
        before = (await connection.exec_driver_sql(settings)).all()
    hosted = Unstuck(engine, unstuck.settings, unstuck.registry)
    assert (await hosted.sweep()).left_processing == 1
    async with engine.connect() as connection:
        assert (await connection.exec_driver_sql(settings)).all() == before
        locks = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory'"
        assert (await connection.exec_driver_sql(locks)).all() == []
    await engine.dispose()


async def test_an_engine_of_its_own_leaves_no_prepared_statement_behind(
    postgres: Database,
) -> None:
    unstuck = await start(postgres)
    await add_job(postgres)
    engine = make_engine(postgres.url)
    assert (await Unstuck(engine, unstuck.settings, unstuck.registry).sweep()).left_processing == 1
    async with engine.connect() as connection:
        left = "SELECT statement FROM pg_prepared_statements"
        rows = (await connection.exec_driver_sql(left)).all()
    await engine.dispose()
    assert [statement for (statement,) in rows if statement != left] == []


@INDEXES
async def test_no_lock_outlives_its_transaction(postgres: Database, index: str) -> None:
    unstuck = await start(postgres, settings=SMALL)
    await postgres.execute(index)
    for _ in range(25):
        await add_job(postgres)
    with listening(postgres) as heard:
        await unstuck.create_tables()
        await unstuck.sweep()
    locks = [lock for sql, _ in heard for lock in re.findall(r"\w*advisory\w*(?=\()", sql)]
    assert set(locks) == {"pg_try_advisory_xact_lock", "pg_advisory_xact_lock"}
