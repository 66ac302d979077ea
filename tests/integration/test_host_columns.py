"""Columns of the host's that are stricter, or looser, than ours would be."""

from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import DateTime, Dialect, String, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tests.database import Database
from tests.jobs import HOUR, ago
from unstuck import Registry, Unstuck, ZombieSettings, metadata
from unstuck.errors import WrongState
from unstuck.registry import Workflow


class Base(DeclarativeBase):
    pass


class Lowered(TypeDecorator[str]):
    """Says something else than what is stored."""

    impl = String
    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else value.lower()


class Task(Base):
    __tablename__ = "tasks"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20), default="Processing")
    run_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class Odd(Base):
    __tablename__ = "odd"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(Lowered(20))
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


async def start(database: Database, row: Any, **parameters: Any) -> Unstuck:
    await database.create(Base.metadata)
    await database.create(metadata)
    async with database.sessions.begin() as session:
        session.add(row)
    registry = Registry()
    statuses = {"queued": "Queued", "processing": "Processing", "failed": "Failed"}
    workflow: Workflow = registry.register(type(row), **{**statuses, **parameters})
    assert workflow.retry_at is None or not workflow.retry_at.nullable
    return Unstuck(database.sessions, ZombieSettings(), registry)


async def test_a_retry_column_that_must_not_be_null_is_given_now(database: Database) -> None:
    task = Task(id=1, run_at=ago(3 * HOUR), updated_at=ago(2 * HOUR))
    unstuck = await start(database, task, retry_at="run_at")
    report = await unstuck.sweep()
    assert report.errors == []
    async with database.sessions() as session:
        again = await session.get_one(Task, 1)
        assert again.status == "Queued"
        assert again.run_at == again.updated_at


async def test_a_retry_column_that_must_not_be_null_survives_a_decision(database: Database) -> None:
    task = Task(id=1, status="Failed", run_at=ago(3 * HOUR), updated_at=ago(2 * HOUR))
    unstuck = await start(database, task, retry_at="run_at")
    await unstuck.retry("Task", 1, by="ada", why="mended")
    async with database.sessions() as session:
        assert (await session.get_one(Task, 1)).status == "Queued"


async def test_a_decision_that_changed_nothing_is_not_said_to_be_done(database: Database) -> None:
    unstuck = await start(
        database,
        Odd(id=1, status="Processing", updated_at=ago(0)),
        processing=["Processing", "processing"],
    )
    with pytest.raises(WrongState, match="Odd 1 could not be changed from processing"):
        await unstuck.cancel("Odd", 1, by="ada", why="wrong")
    assert await unstuck.history("Odd", 1) == []


async def test_a_zone_that_sqlite_cannot_convert_is_refused(database: Database) -> None:
    task = Task(id=1, run_at=ago(0), updated_at=ago(2 * HOUR))
    unstuck = await start(database, task, time_zone="America/New_York")
    report = await unstuck.sweep()
    if database.dialect == "sqlite":
        (error,) = report.errors
        assert "time_zone='America/New_York' needs PostgreSQL" in error
    assert report.left_processing == (database.dialect == "postgresql")
