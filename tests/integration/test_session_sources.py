"""A session comes from whatever an application has, and the lack of one is no riddle."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.database import Database
from tests.jobs import Status, add_job, get_job
from tests.session_sources import SOURCES, Source, checked_out, from_scoped_session, start_on
from unstuck.db import Sessions


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
async def test_a_sweep_runs_on_sessions_from(database: Database, source: Source) -> None:
    unstuck = await start_on(database, source(database))
    stuck = await add_job(database)
    dry = await unstuck.sweep(dry_run=True)
    assert (dry.errors, len(dry.zombies)) == ([], 1)
    report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], 1)
    assert (await get_job(database, stuck)).status is Status.Queued
    assert checked_out(database.engine) == 0
    await unstuck.close()


async def test_a_scoped_session_keeps_nothing_of_a_sweep(database: Database) -> None:
    scoped = from_scoped_session(database)
    unstuck = await start_on(database, scoped)
    await asyncio.create_task(unstuck.sweep())
    assert not scoped.registry.registry


async def test_a_dependency_runs_to_its_end_and_sees_the_error(database: Database) -> None:
    seen: list[str] = []

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with database.sessions() as session:
            try:
                yield session
                seen.append("end")
            except ZeroDivisionError:
                seen.append("error")
                raise

    sessions = Sessions(get_session)
    async with sessions.open() as session:
        await session.execute(text("SELECT 1"))
    with pytest.raises(ZeroDivisionError):
        async with sessions.open():
            raise ZeroDivisionError
    assert seen == ["end", "error"]


async def test_a_dependency_cannot_swallow_an_error(database: Database) -> None:
    async def get_session() -> AsyncIterator[AsyncSession]:
        async with database.sessions() as session:
            try:
                yield session
            except Exception:
                await session.rollback()

    with pytest.raises(ZeroDivisionError):
        async with Sessions(get_session).open():
            raise ZeroDivisionError
    unstuck = await start_on(database, get_session)
    await database.execute("DROP TABLE jobs")
    assert "jobs" in (await unstuck.sweep()).errors[0]


async def give_none() -> None:
    return None


def raise_oops() -> AsyncSession:
    raise RuntimeError("out of sessions, postgresql://app:s3cret@db/app")


async def yield_nothing() -> AsyncIterator[AsyncSession]:
    return
    yield


TROUBLES = {
    give_none: "the session source gave None instead of an AsyncSession",
    raise_oops: "out of sessions, postgresql://app:***@db/app",
    yield_nothing: "generator didn't yield",
    Session: "the session source gave Session instead of an AsyncSession",
    lambda: "postgresql://app:s3cret@db/app": "gave str instead of an AsyncSession",
    lambda request: request: "missing 1 required positional argument: 'request'",
}


@pytest.mark.parametrize(("trouble", "words"), TROUBLES.items())
async def test_a_source_that_fails_is_told_and_asked_again_by_the_next_sweep(
    database: Database, trouble: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [trouble, database.sessions]
    unstuck = await start_on(database, lambda: answers.pop(0)())
    stuck = await add_job(database)
    (error,) = (await unstuck.sweep()).errors
    assert error.startswith("jobs: No database session: ")
    assert words in error
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert words in told
    assert "s3cret" not in caplog.text
    assert (await unstuck.sweep()).left_processing == 1
    assert (await get_job(database, stuck)).status is Status.Queued


async def test_what_cannot_give_sessions_is_refused_without_showing_it() -> None:
    class Dsn:
        def __repr__(self) -> str:
            return "Dsn('postgresql://app:s3cret@db/app')"

    with pytest.raises(TypeError, match=r"^session_factory=Dsn gives no sessions: pass an async_"):
        Sessions(Dsn())
