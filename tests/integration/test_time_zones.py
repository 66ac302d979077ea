"""A server in New York, times with and without a zone, and mappings that say the opposite of what
the column is."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from freezegun import freeze_time
from sqlalchemy import DateTime, make_url, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tests.database import Database
from tests.jobs import HOUR, add_claim, add_job, start
from unstuck import Registry, Unstuck, ZombieSettings, metadata
from unstuck.tables import claims, events, records

NEW_YORK = "America/New_York"
# Stuck is what is older than an hour: far less than New York is away from UTC.
AGES = {"busy": 3300, "future": -5 * HOUR, "long stuck": 6 * HOUR, "stuck": 3900}
STUCK = ["long stuck", "stuck"]


def map_page(kind: DateTime) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Page(Base):
        __tablename__ = "pages"
        id: Mapped[str] = mapped_column(primary_key=True)
        status: Mapped[str]
        updated_at: Mapped[datetime] = mapped_column(kind)
        leased_until: Mapped[datetime | None] = mapped_column(kind)
        retry_at: Mapped[datetime | None] = mapped_column(kind)

    return Page


MAPPINGS = {"naive": map_page(DateTime()), "aware": map_page(DateTime(timezone=True))}
COLUMNS = {"naive": "timestamp", "aware": "timestamptz"}


@pytest.fixture
async def new_york(postgres: Database) -> Database:
    name = make_url(postgres.url).database
    await postgres.execute(f"ALTER DATABASE {name} SET timezone TO '{NEW_YORK}'")
    await postgres.engine.dispose()  # only a new connection starts in the new zone
    assert (await postgres.execute("SHOW timezone"))[0][0] == NEW_YORK
    return postgres


async def fill(database: Database, column: str, local: str = "UTC") -> None:
    """A page of each age; where the column has no zone, its time is that of `local`."""
    kind = COLUMNS[column]
    await database.create(metadata)
    await database.execute(
        f"CREATE TABLE pages (id text PRIMARY KEY, status text NOT NULL, updated_at {kind} "
        f"NOT NULL, leased_until {kind}, retry_at {kind})"
    )
    clock = f"now() AT TIME ZONE '{local}'" if column == "naive" else "now()"
    for page, age in AGES.items():
        await database.execute(
            "INSERT INTO pages (id, status, updated_at) "
            f"VALUES (:page, 'Processing', {clock} - make_interval(secs => :age))",
            page=page,
            age=float(age),
        )


def make_unstuck(database: Database, mapping: str, **parameters: Any) -> Unstuck:
    registry = Registry()
    parameters = {"queued": "Queued", "processing": "Processing", **parameters}
    registry.register(MAPPINGS[mapping], name="pages", **parameters)
    return Unstuck(database.sessions, ZombieSettings(), registry)


async def check_what_was_taken(database: Database, column: str, local: str = "UTC") -> None:
    zone = f" AT TIME ZONE '{local}'" if column == "naive" else ""
    rows = await database.execute(
        f"SELECT id, abs(date_part('epoch', now() - updated_at{zone})) AS age, "
        f"date_part('epoch', retry_at{zone} - now()) AS wait "
        "FROM pages WHERE status = 'Queued' ORDER BY id"
    )
    assert [row.id for row in rows] == STUCK
    assert all(row.age < 60 for row in rows)
    assert all(0 < row.wait < 300 for row in rows)
    told = await database.execute("SELECT record_id, stale_seconds FROM zombie_events ORDER BY 1")
    assert [tuple(row) for row in told] == [
        (page, pytest.approx(AGES[page], abs=60)) for page in STUCK
    ]


async def remember_strikes(database: Database) -> None:
    """With a strike before it, a requeue is to wait: so `retry_at` is written too."""
    for page in STUCK:
        row = {"workflow": "pages", "record_id": page, "zombie_count": 1}
        async with database.engine.begin() as connection:
            await connection.execute(records.insert().values(**row))


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("column", COLUMNS)
async def test_a_server_in_new_york_takes_the_same_records_however_times_are_stored_and_mapped(
    new_york: Database, column: str, mapping: str
) -> None:
    await fill(new_york, column)
    await remember_strikes(new_york)
    report = await make_unstuck(new_york, mapping, retry_at="retry_at").sweep()
    assert (report.errors, report.left_processing) == ([], 2)
    assert report.workflows[0].oldest_seconds == pytest.approx(6 * HOUR, abs=60)
    await check_what_was_taken(new_york, column)


@pytest.mark.parametrize("mapping", MAPPINGS)
async def test_a_workflow_may_keep_its_naive_times_in_another_zone(
    postgres: Database, mapping: str
) -> None:
    await fill(postgres, "naive", NEW_YORK)
    await remember_strikes(postgres)
    unstuck = make_unstuck(postgres, mapping, retry_at="retry_at", time_zone=NEW_YORK)
    assert (await unstuck.sweep()).errors == []
    await check_what_was_taken(postgres, "naive", NEW_YORK)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("column", COLUMNS)
async def test_a_lease_ends_at_the_same_moment_however_it_is_stored_and_mapped(
    new_york: Database, column: str, mapping: str
) -> None:
    await fill(new_york, column)
    await new_york.execute("UPDATE pages SET leased_until = updated_at")
    unstuck = make_unstuck(new_york, mapping, lease="leased_until", grace=HOUR)
    assert (await unstuck.sweep()).left_processing == 2
    rows = await new_york.execute("SELECT id FROM pages WHERE status = 'Queued' ORDER BY id")
    assert [page for (page,) in rows] == STUCK


@pytest.mark.parametrize("days", [-400, 400])
async def test_an_application_clock_that_is_wrong_by_days_changes_nothing(
    postgres: Database, days: int
) -> None:
    await fill(postgres, "aware")
    await remember_strikes(postgres)
    unstuck = make_unstuck(postgres, "aware", retry_at="retry_at")
    with freeze_time(datetime.now(UTC) + timedelta(days=days), real_asyncio=True):
        report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], 2)
    await check_what_was_taken(postgres, "aware")


async def test_own_times_come_back_aware_and_right(database: Database) -> None:
    if database.dialect == "postgresql":
        name = make_url(database.url).database
        await database.execute(f"ALTER DATABASE {name} SET timezone TO '{NEW_YORK}'")
        await database.engine.dispose()
    unstuck = await start(database, reapable=False)
    stuck = await add_job(database)
    await unstuck.sweep()
    (entry,) = await unstuck.history("jobs", stuck)
    now = datetime.now(UTC)
    moments = [entry.at]
    await add_claim(database, stuck, token=uuid4(), claimed_at=now)
    async with database.engine.connect() as connection:
        for column in (events.c.at, records.c.held_at, claims.c.claimed_at):
            moments.append((await connection.execute(select(column))).scalar_one())
    assert all(moment.tzinfo is not None for moment in moments)
    assert all(abs(moment - now) < timedelta(seconds=60) for moment in moments)


@pytest.mark.parametrize("level", ["AUTOCOMMIT", "READ COMMITTED", "SERIALIZABLE"])
async def test_an_engine_s_isolation_level_does_not_change_what_is_taken(
    new_york: Database, level: str
) -> None:
    """In autocommit nothing could be set for a transaction: neither the zone nor who leads."""
    await fill(new_york, "naive")
    await remember_strikes(new_york)
    engine = create_async_engine(new_york.url, isolation_level=level)
    hosted = Database(new_york.url)
    hosted.engine = engine
    report = await make_unstuck(hosted, "naive", retry_at="retry_at").sweep()
    await engine.dispose()
    assert (report.errors, report.left_processing) == ([], 2)
    await check_what_was_taken(new_york, "naive")
