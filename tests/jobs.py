"""A plain host table for tests of the sweep: one model with every column that a policy can name."""

import enum
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Unpack

from sqlalchemy import Boolean, DateTime, Enum, Integer, String, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tests.database import Database
from unstuck import Registry, Unstuck, ZombieSettings, metadata
from unstuck.registry import Parameters
from unstuck.tables import claims

HOUR = 3600.0


class Base(DeclarativeBase):
    pass


class Status(enum.Enum):
    Queued = "queued"
    Processing = "processing"
    Completed = "completed"
    Failed = "failed"
    Held = "held"
    Crashed = "crashed"
    Waiting = "waiting"


class Job(Base):
    __tablename__ = "jobs"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Status] = mapped_column(Enum(Status), default=Status.Processing)
    error: Mapped[str | None] = mapped_column(String(500))
    updated_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    leased_until: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    retry_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    zombie_count: Mapped[int] = mapped_column(Integer, default=0)
    idempotent: Mapped[bool | None] = mapped_column(Boolean)


def ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


async def start(
    database: Database,
    *,
    settings: dict[str, Any] | None = None,
    observers: Iterable[object] = (),
    **parameters: Unpack[Parameters],
) -> Unstuck:
    """An empty jobs table with unstuck's tables beside it, and `Job` registered as "jobs"."""
    await database.create(Base.metadata)
    await database.create(metadata)
    registry = Registry()
    parameters.setdefault("name", "jobs")
    registry.register(Job, **parameters)
    return Unstuck(database.sessions, ZombieSettings(**(settings or {})), registry, observers)


async def add_job(database: Database, **values: Any) -> int:
    """A job, stuck for two hours unless told otherwise."""
    values.setdefault("updated_at", ago(2 * HOUR))
    async with database.sessions.begin() as session:
        job = Job(**values)
        session.add(job)
        await session.flush()
        return job.id


async def add_claim(database: Database, record_id: int, **values: Any) -> None:
    """A claim on a job, as the job loop would have left it."""
    values = {"worker_id": "worker-1", "claimed_at": ago(2 * HOUR), **values}
    async with database.engine.begin() as connection:
        await connection.execute(
            claims.insert().values(workflow="jobs", record_id=str(record_id), **values)
        )


async def get_job(database: Database, record_id: int) -> Job:
    async with database.sessions() as session:
        return (await session.execute(select(Job).where(Job.id == record_id))).scalar_one()


async def change(database: Database, record_id: int, **values: Any) -> None:
    async with database.sessions.begin() as session:
        await session.execute(update(Job).where(Job.id == record_id).values(**values))


async def get_stuck_again(database: Database, record_id: int) -> None:
    """The job was taken up once more and its worker died once more, two hours ago."""
    await change(database, record_id, status=Status.Processing, updated_at=ago(2 * HOUR))
