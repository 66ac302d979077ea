"""The database goes away under a running job loop: ends that cannot be written are kept, and
written when it is back."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from tests.database import Database
from tests.interleaving import before_statement
from tests.jobs import Job, Status, get_job, start
from tests.looping import queue_job, queue_jobs, read_claims, read_ledger, run
from tests.outages import (
    AT_ONCE,
    Begin,
    alert,
    alerts,
    impatient,
    nothing,
    outage,
    read_spool,
)
from tools.embedded_postgres import EmbeddedPostgres
from unstuck import Unstuck


async def write(session: AsyncSession, item_id: int, **values: Any) -> None:
    """Some work, not committed."""
    job = await session.get(Job, item_id)
    assert job is not None
    for name, value in values.items():
        setattr(job, name, value)


async def start_impatient(database: Database, spool: Path) -> Unstuck:
    return await start(impatient(database), settings={**AT_ONCE, "spool_url": str(spool)})


async def spool_one(
    database: Database,
    spool: Path,
    work: Callable[[Begin, int, AsyncSession], Awaitable[Any]],
) -> tuple[Unstuck, int]:
    """A job whose function is given an outage to begin, and whose end was spooled. The outage is
    over; what was spooled is not yet written."""
    unstuck = await start_impatient(database, spool)
    job = await queue_job(database)
    async with outage(database) as begin:

        async def function(item_id: int, session: AsyncSession) -> Any:
            return await work(begin, item_id, session)

        result = await run(unstuck, function)
    assert (result.claimed, result.spooled) == (1, 1)
    assert len(await read_claims(database)) == 1
    return unstuck, job


async def test_a_function_that_raised_is_spooled_with_its_own_error_and_later_failed_with_it(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(begin_outage: Begin, item_id: int, session: AsyncSession) -> None:
        await begin_outage()
        raise ValueError("no such page at redis://:s3cret@cache/0")

    unstuck, job = await spool_one(database, tmp_path, work)
    assert alerts(caplog) == [alert(job)]
    (entry,) = await read_spool(database, unstuck.settings)
    words = "no such page at redis://:***@cache/0"
    assert (entry.outcome, entry.error) == ("failed", words)
    await run(unstuck, nothing)
    done = await get_job(database, job)
    assert (done.status, done.error) == (Status.Failed, words)
    assert await read_claims(database) == []
    assert await read_ledger(database) == [(str(job), "attempt", None, "failed")]
    assert "s3cret" not in caplog.text


async def test_work_that_was_committed_is_spooled_as_completed_and_later_completed(
    database: Database, tmp_path: Path
) -> None:
    async def work(begin_outage: Begin, item_id: int, session: AsyncSession) -> None:
        await write(session, item_id, zombie_count=7)
        await session.commit()
        await begin_outage()

    unstuck, job = await spool_one(database, tmp_path, work)
    (entry,) = await read_spool(database, unstuck.settings)
    assert (entry.outcome, entry.error) == ("completed", None)
    await run(unstuck, nothing)
    done = await get_job(database, job)
    assert (done.status, done.error, done.zombie_count) == (Status.Completed, None, 7)
    assert await read_claims(database) == []
    assert await read_ledger(database) == [(str(job), "attempt", None, "completed")]


async def test_work_that_was_lost_with_its_connection_is_spooled_as_failed(
    database: Database, tmp_path: Path
) -> None:
    async def work(begin_outage: Begin, item_id: int, session: AsyncSession) -> None:
        await write(session, item_id, zombie_count=7)
        await begin_outage()

    unstuck, job = await spool_one(database, tmp_path, work)
    (entry,) = await read_spool(database, unstuck.settings)
    assert entry.outcome == "failed"
    assert entry.error is not None
    assert "closed" in entry.error or "locked" in entry.error
    await run(unstuck, nothing)
    done = await get_job(database, job)
    assert (done.status, done.error, done.zombie_count) == (Status.Failed, entry.error, 0)


async def test_an_error_that_the_function_wrote_itself_outlives_the_spool(
    database: Database, tmp_path: Path
) -> None:
    async def work(begin_outage: Begin, item_id: int, session: AsyncSession) -> bool:
        await write(session, item_id, error="page 7 of 9 is blank")
        await session.commit()
        await begin_outage()
        return False

    unstuck, job = await spool_one(database, tmp_path, work)
    await run(unstuck, nothing)
    done = await get_job(database, job)
    assert (done.status, done.error) == (Status.Failed, "page 7 of 9 is blank")


async def test_a_status_that_the_function_set_itself_outlives_the_spool(
    database: Database, tmp_path: Path
) -> None:
    async def work(begin_outage: Begin, item_id: int, session: AsyncSession) -> None:
        await write(session, item_id, status=Status.Waiting)
        await session.commit()
        await begin_outage()
        raise ValueError("after all was done")

    unstuck, job = await spool_one(database, tmp_path, work)
    await run(unstuck, nothing)
    assert (await get_job(database, job)).status is Status.Waiting
    assert await read_claims(database) == []
    assert await read_ledger(database) == [(str(job), "attempt", None, "moved")]


class Forgetful(AsyncSession):
    """Once, a commit reaches the database, and its answer does not reach us."""

    forgets = False

    async def commit(self) -> None:
        await super().commit()
        if Forgetful.forgets:
            Forgetful.forgets = False
            raise ConnectionResetError("connection reset by peer")


@pytest.fixture
async def forgetful(database: Database, tmp_path: Path) -> Unstuck:
    prepared = await start(database, settings={**AT_ONCE, "spool_url": str(tmp_path)})
    Forgetful.forgets = False
    source = async_sessionmaker(database.engine, class_=Forgetful)
    return Unstuck(source, prepared.settings, prepared.registry)


@pytest.mark.parametrize("commits", [True, False], ids=["work committed before", "work left open"])
async def test_an_end_whose_commit_was_never_answered_is_no_late_finish(
    database: Database, forgetful: Unstuck, commits: bool
) -> None:
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        await write(session, item_id, zombie_count=7)
        if commits:
            await session.commit()
        Forgetful.forgets = True

    result = await run(forgetful, work)
    assert (result.completed, result.lost) == (1, 0)
    done = await get_job(database, job)
    assert (done.status, done.error, done.zombie_count) == (Status.Completed, None, 7)
    assert await read_ledger(database) == [(str(job), "attempt", None, "completed")]


async def test_an_error_session_whose_commit_was_never_answered_is_no_late_failure(
    database: Database, forgetful: Unstuck
) -> None:
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        Forgetful.forgets = True
        raise ValueError("no such page")

    result = await run(forgetful, work)
    assert (result.failed, result.lost) == (1, 0)
    assert (await get_job(database, job)).error == "no such page"
    assert await read_ledger(database) == [(str(job), "attempt", None, "failed")]


@pytest.fixture
async def mortal(own_postgres: EmbeddedPostgres) -> AsyncIterator[Database]:
    database = Database(own_postgres.url(), own_postgres)
    yield database
    await database.dispose()


async def start_mortal(mortal: Database, spool: Path, **settings: Any) -> Unstuck:
    said = {**AT_ONCE, "spool_url": str(spool), "breaker_reset_seconds": 0, **settings}
    return await start(mortal, settings=said)


def restart(database: Database) -> None:
    assert database.server is not None
    database.server.start()


def kill(database: Database) -> None:
    assert database.server is not None
    database.server.kill()


async def read_statuses(database: Database, jobs: list[int]) -> list[Status]:
    return [(await get_job(database, job)).status for job in jobs]


async def test_a_database_that_is_restarted_loses_neither_claims_nor_ends(
    mortal: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first comes to its end without a database; two find no session; then the breaker opens,
    and the others cannot even be given back."""
    unstuck = await start_mortal(mortal, tmp_path, breaker_failures=2)
    jobs = await queue_jobs(mortal, 5)

    async def work(item_id: int, session: AsyncSession) -> None:
        kill(mortal)

    result = await run(unstuck, work, order_by_column=Job.id)
    assert (result.claimed, result.spooled, result.breaker_open) == (5, 5, True)
    assert sorted(alerts(caplog)) == [alert(job) for job in jobs]
    restart(mortal)
    assert len(await read_claims(mortal)) == 5
    spooled = await read_spool(mortal, unstuck.settings)
    assert [entry.outcome for entry in spooled] == ["completed", *["failed"] * 2, *["returned"] * 2]
    seen: list[int] = []

    async def note(item_id: int, session: AsyncSession) -> None:
        seen.append(item_id)

    await run(unstuck, note)
    assert await read_spool(mortal, unstuck.settings) == []
    await run(unstuck, note)
    assert await read_statuses(mortal, jobs) == [
        Status.Completed,
        *[Status.Failed] * 2,
        *[Status.Completed] * 2,
    ]
    assert sorted(seen) == jobs[3:]
    assert await read_claims(mortal) == []
    assert {kind for _, kind, _, _ in await read_ledger(mortal)} == {"attempt", "returned"}


@pytest.mark.parametrize("source", ["async_sessionmaker", "sessionmaker.begin"])
async def test_a_database_that_dies_before_a_record_is_begun_ends_no_loop(
    mortal: Database, tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection from the pool looked healthy, and no other can be had."""
    prepared = await start_mortal(mortal, tmp_path)
    sessions: Any = mortal.sessions if source == "async_sessionmaker" else mortal.sessions.begin
    unstuck = Unstuck(sessions, prepared.settings, prepared.registry)
    jobs = await queue_jobs(mortal, 2)

    async def die() -> None:
        kill(mortal)

    with before_statement(mortal, "SET started_at", die):
        result = await run(unstuck, nothing)
    assert (result.claimed, result.spooled) == (2, 2)
    assert sorted(alerts(caplog)) == [alert(job) for job in jobs]
    restart(mortal)
    await run(unstuck, nothing)
    assert await read_statuses(mortal, jobs) == [Status.Failed] * 2
    assert await read_claims(mortal) == []


async def test_a_restart_while_a_record_is_in_work_costs_it_nothing(
    mortal: Database, tmp_path: Path
) -> None:
    unstuck = await start_mortal(mortal, tmp_path)
    jobs = await queue_jobs(mortal, 2)

    async def work(item_id: int, session: AsyncSession) -> None:
        if item_id == jobs[0]:
            kill(mortal)
            restart(mortal)

    result = await run(unstuck, work, order_by_column=Job.id)
    assert result.completed == 2
    assert await read_statuses(mortal, jobs) == [Status.Completed] * 2
    assert await read_claims(mortal) == []


async def test_a_database_that_is_down_is_an_answer_of_the_loop_and_not_an_error(
    mortal: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start_mortal(mortal, tmp_path)
    job = await queue_job(mortal)
    kill(mortal)
    result = await run(unstuck, nothing)
    assert result.claimed == 0
    assert result.error is not None
    assert [r.levelno for r in caplog.records if "could not be claimed" in r.getMessage()] == [
        logging.ERROR
    ]
    restart(mortal)
    assert (await run(unstuck, nothing)).completed == 1
    assert (await get_job(mortal, job)).status is Status.Completed


async def test_a_loop_that_is_cancelled_while_the_database_is_down_spools_what_it_had_claimed(
    mortal: Database, tmp_path: Path
) -> None:
    unstuck = await start_mortal(mortal, tmp_path)
    jobs = await queue_jobs(mortal, 2)
    working = asyncio.Event()

    async def work(item_id: int, session: AsyncSession) -> None:
        kill(mortal)
        working.set()
        await asyncio.Event().wait()

    loop = asyncio.create_task(run(unstuck, work, order_by_column=Job.id))
    await working.wait()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop
    spooled = await read_spool(mortal, unstuck.settings)
    assert [entry.outcome for entry in spooled] == ["stopped", "returned"]
    restart(mortal)
    await unstuck.sweep()
    assert await read_statuses(mortal, jobs) == [Status.Queued] * 2
    assert await read_claims(mortal) == []
    assert (await run(unstuck, nothing)).completed == 2
