"""Hosts as they are: other keys, inherited models, servers in another time zone, databases in
memory, tests in a transaction of their own."""

import asyncio
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import DateTime, Enum, ForeignKey, String, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import StaticPool

from tests.database import Database
from tests.integration.decorated_types import Ticket
from tests.integration.models import State
from tests.interleaving import until
from tests.jobs import Base as JobBase
from tests.jobs import Job, Status, ago, get_job, start
from tests.lookup import rewrite
from tests.looping import queue_job, queue_jobs, read_claims, run
from unstuck import Registry, Unstuck, ZombieSettings, metadata
from unstuck.tables import claims


class Base(DeclarativeBase):
    pass


def utc_now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


class WithState:
    state: Mapped[State] = mapped_column(Enum(State), default=State.queued)
    error: Mapped[str] = mapped_column(String(50), default="")
    updated_at: Mapped[datetime] = mapped_column(
        DateTime, default=lambda: ago(60).replace(tzinfo=None)
    )


class Composite(WithState, Base):
    __tablename__ = "composites"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)


class Keyed(WithState, Base):
    __tablename__ = "keyed"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)


class Decorated(WithState, Base):
    __tablename__ = "decorated"

    id: Mapped[str] = mapped_column(Ticket(), primary_key=True)


class Task(WithState, Base):
    __tablename__ = "tasks"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "task"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]


class Download(Task):
    __tablename__ = "downloads"
    __mapper_args__ = {"polymorphic_identity": "download"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    url: Mapped[str] = mapped_column(default="")


class Versioned(WithState, Base):
    __tablename__ = "versioned"

    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


CALL: dict[str, Any] = {
    "status_enum": State,
    "queued_status": State.queued,
    "processing_status": State.processing,
    "completed_status": State.completed,
    "failed_status": State.failed,
    "batch_size": 10,
    "status_field_name": "state",
}
KEY = uuid.UUID("0f5c4b62-c1b1-4bd9-a3cf-2c1d63b7b0aa")


@pytest.mark.parametrize(
    ("record", "identity"),
    [
        (lambda: Composite(tenant="a,b\\c", number=7), ("a,b\\c", 7)),
        (lambda: Keyed(id=KEY), KEY),
        (lambda: Decorated(id="T-17"), "T-17"),
        (lambda: Download(id=1, url="x"), 1),
        (lambda: Versioned(id=1), 1),
    ],
    ids=["composite", "uuid", "decorated", "inherited", "versioned"],
)
async def test_the_item_id_is_the_key_as_the_host_knows_it(
    database: Database, record: Any, identity: Any
) -> None:
    await database.create(Base.metadata)
    await database.create(metadata)
    one = record()
    model = type(one)
    async with database.sessions.begin() as session:
        session.add(one)
    unstuck = Unstuck(database.sessions, ZombieSettings(), Registry())
    seen: list[Any] = []

    async def work(item_id: Any, session: AsyncSession) -> None:
        seen.append(item_id)
        found = await session.get(model, item_id)
        assert found is not None
        found.error = "touched"

    result = await unstuck.run_job_loop(model=model, processing_function=work, **CALL)
    assert (seen, result.completed) == ([identity], 1)
    async with database.sessions() as session:
        (done,) = await session.scalars(select(model))
    assert (done.state, done.error) == (State.completed, "touched")
    assert await read_claims(database) == []


async def test_a_database_in_memory_works_without_a_heart() -> None:
    engine = create_async_engine("sqlite+aiosqlite://", poolclass=StaticPool)
    async with engine.begin() as connection:
        await connection.run_sync(JobBase.metadata.create_all)
        await connection.run_sync(metadata.create_all)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    async with sessions.begin() as session:
        session.add_all([Job(status=Status.Queued, updated_at=ago(1)) for _ in range(3)])
    registry = Registry()
    registry.register(Job, name="jobs")
    unstuck = Unstuck(sessions, ZombieSettings(), registry)
    seen: list[int] = []

    async def work(item_id: int, session: AsyncSession) -> None:
        seen.append(item_id)
        if len(seen) == 2:
            await asyncio.Event().wait()

    task = asyncio.create_task(run(unstuck, work, order_by_column=Job.id))
    while len(seen) < 2:  # noqa: ASYNC110 - it is this very loop's turn
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    async with sessions() as session:
        statuses = list(await session.scalars(select(Job.status).order_by(Job.id)))
    assert statuses == [Status.Completed, Status.Queued, Status.Queued]
    await engine.dispose()


async def test_a_test_of_the_hosts_may_run_it_in_a_transaction_of_its_own(
    postgres: Database,
) -> None:
    """Every session hangs on one connection, and at the end everything is rolled back."""
    prepared = await start(postgres, settings={"heartbeat_interval_seconds": 0.05})
    job = await queue_job(postgres)
    async with postgres.engine.connect() as connection:
        outer = await connection.begin()

        def get_session() -> AsyncSession:
            return AsyncSession(bind=connection, join_transaction_mode="create_savepoint")

        unstuck = Unstuck(get_session, prepared.settings, prepared.registry)
        assert (await run(unstuck, lambda item_id, session: None)).completed == 1
        status = await connection.scalar(select(Job.status))
        assert status is Status.Completed
        await outer.rollback()
    assert (await get_job(postgres, job)).status is Status.Queued


async def test_times_are_written_in_the_zone_of_the_workflow(postgres: Database) -> None:
    """A naive column, on a server that lives in New York."""
    await postgres.create(Base.metadata)
    await postgres.create(metadata)
    async with postgres.sessions.begin() as session:
        session.add(Versioned(id=1))
    engine = create_async_engine(
        postgres.url, connect_args={"server_settings": {"TimeZone": "America/New_York"}}
    )
    unstuck = Unstuck(async_sessionmaker(engine), ZombieSettings(), Registry())
    seen: list[datetime] = []

    async def work(item_id: int, session: AsyncSession) -> None:
        async with postgres.sessions() as other:
            seen.extend(await other.scalars(select(Versioned.updated_at)))

    await unstuck.run_job_loop(model=Versioned, processing_function=work, **CALL)
    async with postgres.sessions() as session:
        seen.extend(await session.scalars(select(Versioned.updated_at)))
    now = utc_now()
    assert len(seen) == 2
    assert all(abs((now - moment).total_seconds()) < 60 for moment in seen)
    await engine.dispose()


@pytest.mark.parametrize("told", ["engine", "options", "server"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_host_with_a_stricter_isolation_keeps_it_and_is_beaten_for(
    postgres: Database, level: str, told: str
) -> None:
    """A beat changes the claim while the transaction still sees it as it was."""
    unstuck = await start(postgres, settings={"heartbeat_interval_seconds": 0.1})
    first, second = await queue_jobs(postgres, 2)
    engine = create_async_engine(postgres.url, **(_OPTIONS[told](level)))
    seen: list[str] = []

    async def work(item_id: int, session: AsyncSession) -> None:
        found = await session.get(Job, item_id)
        assert found is not None
        level = await session.scalar(text("SHOW transaction_isolation"))
        seen.append(str(level).upper())
        other = second if item_id == first else first
        (before,) = [c for c in await read_claims(postgres) if c.record_id == str(other)] or [None]

        async def has_beaten() -> bool:
            """For the record that waits, if there is one; ours is locked."""
            now = [c for c in await read_claims(postgres) if c.record_id == str(other)]
            return not now or before is None or now[0].heartbeat_at != before.heartbeat_at

        await until(has_beaten)
        found.error = "written"

    sessions = async_sessionmaker(engine)
    result = await run(unstuck, work, session_factory=sessions, order_by_column=Job.id)
    assert result.completed == 2
    assert seen == [level, level]
    assert (await get_job(postgres, first)).error == "written"
    await engine.dispose()


_OPTIONS: dict[str, Any] = {
    "engine": lambda level: {"isolation_level": level},
    "options": lambda level: {"execution_options": {"isolation_level": level}},
    "server": lambda level: {
        "connect_args": {"server_settings": {"default_transaction_isolation": level.lower()}}
    },
}


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_stricter_isolation_is_fenced_as_well(postgres: Database, level: str) -> None:
    unstuck = await start(postgres)
    job = await queue_job(postgres)
    engine = create_async_engine(postgres.url, isolation_level=level)

    async def work(item_id: int, session: AsyncSession) -> None:
        await postgres.execute("DELETE FROM zombie_claims")
        await session.execute(update(Job).where(Job.id == item_id).values(error="late"))
        await session.commit()

    result = await run(unstuck, work, session_factory=async_sessionmaker(engine))
    assert result.lost == 1
    assert (await get_job(postgres, job)).error is None
    await engine.dispose()


async def test_a_sweep_leaves_alone_what_a_stricter_transaction_has_locked(
    postgres: Database,
) -> None:
    unstuck = await start(postgres)
    await queue_job(postgres)
    engine = create_async_engine(postgres.url, isolation_level="REPEATABLE READ")

    async def work(item_id: int, session: AsyncSession) -> None:
        await rewrite(postgres, claims, claimed_at=ago(7200), started_at=ago(7200))
        await rewrite(postgres, claims, heartbeat_at=ago(7200))
        await session.execute(text("SELECT 1"))
        assert (await unstuck.sweep()).left_processing == 0

    result = await run(unstuck, work, session_factory=async_sessionmaker(engine))
    assert result.completed == 1
    await engine.dispose()


async def test_loops_and_sweeps_side_by_side_do_not_disturb_each_other(
    database: Database,
) -> None:
    unstuck = await start(database)
    jobs = await queue_jobs(database, 30)

    async def work(item_id: int, session: AsyncSession) -> None:
        await asyncio.sleep(0)

    async def sweep_on() -> int:
        taken = 0
        while not done.is_set():
            report = await unstuck.sweep()
            assert report.errors == []
            taken += report.found
        return taken

    done = asyncio.Event()
    sweeping = asyncio.create_task(sweep_on())
    result = await run(unstuck, work, batch_size=5, drain=True)
    done.set()
    assert await sweeping == 0
    assert result.completed == len(jobs)
