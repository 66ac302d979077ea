"""Several status columns on one row share its `updated_at`: none may hide the others."""

from datetime import datetime
from typing import Any

from sqlalchemy import DateTime, Enum
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tests.database import Database
from tests.jobs import HOUR, Status, ago
from unstuck import Registry, Unstuck, ZombieSettings, metadata
from unstuck.events import Zombie


class Base(DeclarativeBase):
    pass


class Page(Base):
    __tablename__ = "pages"

    id: Mapped[int] = mapped_column(primary_key=True)
    fetch_status: Mapped[Status] = mapped_column(Enum(Status), default=Status.Processing)
    index_status: Mapped[Status] = mapped_column(Enum(Status), default=Status.Processing)
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


async def start(database: Database, **parameters: Any) -> Unstuck:
    """One page, stuck in both of its columns for two hours; `parameters` are for the first."""
    await database.create(Base.metadata)
    await database.create(metadata)
    registry = Registry()
    registry.register(Page, name="fetch", status="fetch_status", **parameters)
    registry.register(Page, name="index", status="index_status")
    async with database.sessions.begin() as session:
        session.add(Page(id=1, updated_at=ago(2 * HOUR)))
    return Unstuck(database.sessions, ZombieSettings(), registry)


async def get_page(database: Database) -> Page:
    async with database.sessions() as session:
        return await session.get_one(Page, 1)


async def seconds_since_update(database: Database) -> float:
    async with database.engine.connect() as connection:
        from_database = (
            "SELECT date_part('epoch', now() - updated_at) FROM pages"
            if database.dialect == "postgresql"
            else "SELECT (julianday('now') - julianday(updated_at)) * 86400 FROM pages"
        )
        return float((await connection.exec_driver_sql(from_database)).scalar_one())


async def test_one_sweep_brings_back_every_column_that_its_dry_run_named(
    database: Database,
) -> None:
    unstuck = await start(database)
    foreseen = (await unstuck.sweep(dry_run=True)).zombies
    report = await unstuck.sweep()
    page = await get_page(database)
    assert (page.fetch_status, page.index_status) == (Status.Queued, Status.Queued)
    assert sorted(zombie.workflow for zombie in foreseen) == ["fetch", "index"]
    assert report.left_processing == 2


async def test_the_last_column_to_leave_touches_the_clock(database: Database) -> None:
    unstuck = await start(database)
    await unstuck.sweep()
    assert await seconds_since_update(database) < HOUR


async def test_a_custom_recovery_does_not_hide_the_other_column(database: Database) -> None:
    async def recover(zombie: Zombie, session: AsyncSession) -> None:
        assert zombie.workflow == "fetch"

    unstuck = await start(database, recover=recover)
    await unstuck.sweep()
    page = await get_page(database)
    assert (page.fetch_status, page.index_status) == (Status.Queued, Status.Queued)


async def test_a_human_decision_does_not_hide_the_other_column(database: Database) -> None:
    unstuck = await start(database)
    await unstuck.cancel("fetch", 1, by="ada", why="wrong page")
    report = await unstuck.sweep()
    page = await get_page(database)
    assert (page.fetch_status, page.index_status) == (Status.Failed, Status.Queued)
    assert report.left_processing == 1


async def test_work_on_one_column_does_not_end_the_hold_of_the_other(database: Database) -> None:
    unstuck = await start(database, reapable=False)
    await unstuck.sweep()
    async with database.sessions.begin() as session:
        page = await session.get_one(Page, 1)
        page.index_status, page.updated_at = Status.Completed, ago(-60)
    await unstuck.release("fetch", 1, by="ada", why="it may run again")
    assert (await get_page(database)).fetch_status is Status.Queued
