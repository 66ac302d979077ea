"""A deploy cuts in: what was not begun is queued again at once, what ran follows its policy."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy import text, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from tests.database import Database
from tests.interleaving import before_statement, until
from tests.jobs import Job, Status, get_job, start
from tests.lookup import Witness, recall
from tests.looping import queue_jobs, read_claims, read_ledger, run
from tests.session_sources import checked_out
from unstuck import Claim, Unstuck


class Gate:
    """A processing function that says when it is inside, and stays there."""

    def __init__(self) -> None:
        self.inside = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, item_id: int, session: AsyncSession) -> None:
        await session.execute(update(Job).where(Job.id == item_id).values(zombie_count=7))
        self.inside.set()
        await self.open.wait()


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def begin(unstuck: Unstuck, gate: Gate, **named: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(run(unstuck, gate, order_by_column=Job.id, **named))
    await gate.inside.wait()
    return task


async def test_what_ran_and_what_did_not_begin_are_queued_again_at_once(
    database: Database,
) -> None:
    unstuck = await start(database)
    first, *rest = await queue_jobs(database, 4)
    await cancel(await begin(unstuck, Gate()))
    ran = await get_job(database, first)
    assert (ran.status, ran.zombie_count) == (Status.Queued, 0)
    assert ran.error == "Stopped by a shutdown in mid-work; queued again"
    assert [(await get_job(database, job)).status for job in rest] == [Status.Queued] * 3
    assert await read_claims(database) == []
    assert await recall(database, first) is None  # a deploy is no strike
    ledger = await read_ledger(database)
    assert ledger.count((str(first), "attempt", "shutdown", "requeued")) == 1
    for job in rest:
        assert ledger.count((str(job), "returned", "shutdown", "requeued")) == 1


async def test_what_must_not_run_twice_is_held(database: Database) -> None:
    unstuck = await start(database, reapable=False, held=Status.Held)
    ran, waited = await queue_jobs(database, 2)
    await cancel(await begin(unstuck, Gate()))
    assert (await get_job(database, ran)).status is Status.Held
    assert (await get_job(database, waited)).status is Status.Queued  # user code never ran
    kept = await recall(database, ran)
    assert kept is not None
    assert "not reapable, a human decides" in kept.held_reason
    await unstuck.release("jobs", ran, by="ada", why="checked")
    assert (await get_job(database, ran)).status is Status.Queued


async def test_where_the_host_has_no_held_status_it_is_marked(database: Database) -> None:
    unstuck = await start(database, reapable=False)
    (ran,) = await queue_jobs(database, 1)
    await cancel(await begin(unstuck, Gate()))
    assert (await get_job(database, ran)).status is Status.Processing
    kept = await recall(database, ran)
    assert kept is not None
    assert kept.held_at is not None
    assert (await unstuck.sweep()).found == 0


async def test_several_at_once_all_go_back(database: Database) -> None:
    unstuck = await start(database)
    jobs = await queue_jobs(database, 5)
    entered: list[int] = []
    all_inside = asyncio.Event()

    async def work(item_id: int, session: AsyncSession) -> None:
        entered.append(item_id)
        if len(entered) == 3:
            all_inside.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run(unstuck, work, concurrency=3))
    await all_inside.wait()
    await cancel(task)
    assert [(await get_job(database, job)).status for job in jobs] == [Status.Queued] * 5


async def test_a_function_that_finishes_all_the_same_is_completed(database: Database) -> None:
    unstuck = await start(database)
    (job,) = await queue_jobs(database, 1)
    inside = asyncio.Event()

    async def work(item_id: int, session: AsyncSession) -> None:
        inside.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    task = asyncio.create_task(run(unstuck, work))
    await inside.wait()
    await cancel(task)
    assert (await get_job(database, job)).status is Status.Completed


STATEMENTS = {
    "claiming": ["UPDATE jobs SET", "INTO zombie_claims"],
    "starting": ["UPDATE zombie_claims SET"],
    "ending": ["DELETE FROM zombie_claims", "INSERT INTO zombie_events"],
}


@pytest.mark.parametrize("part", [part for parts in STATEMENTS.values() for part in parts])
async def test_a_cancellation_at_any_statement_leaves_nothing_in_processing(
    database: Database, part: str
) -> None:
    """The cancellation comes just before the statement is sent."""
    unstuck = await start(database)
    jobs = await queue_jobs(database, 3)

    async def work(item_id: int, session: AsyncSession) -> None:
        """Nothing; the loop writes the end."""

    task: asyncio.Task[Any] | None = None

    async def cut_in() -> None:
        assert task is not None
        task.cancel()

    with before_statement(database, part, cut_in):
        task = asyncio.create_task(run(unstuck, work))
        with pytest.raises(asyncio.CancelledError):
            await task
    statuses = {(await get_job(database, job)).status for job in jobs}
    assert statuses <= {Status.Queued, Status.Completed}
    assert await read_claims(database) == []


async def test_a_second_cancellation_does_not_cut_the_first_short(database: Database) -> None:
    """As `asyncio.run` does it at its end, to every task that is left."""
    unstuck = await start(database)
    jobs = await queue_jobs(database, 3)
    task = await begin(unstuck, Gate())
    mine = asyncio.current_task()
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
        for other in asyncio.all_tasks() - {mine}:
            other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def all_queued() -> bool:
        return [(await get_job(database, job)).status for job in jobs] == [Status.Queued] * 3

    await until(all_queued)


async def test_a_cancelled_statement_leaves_no_connection_that_holds_a_lock(
    postgres: Database,
) -> None:
    unstuck = await start(postgres)
    (job,) = await queue_jobs(postgres, 1)
    engine = create_async_engine(postgres.url, pool_size=1, max_overflow=0)
    inside = asyncio.Event()

    async def work(item_id: int, session: AsyncSession) -> None:
        await session.execute(update(Job).where(Job.id == item_id).values(zombie_count=7))
        inside.set()
        await session.execute(text("SELECT pg_sleep(60)"))

    task = asyncio.create_task(run(unstuck, work, session_factory=async_sessionmaker(engine)))
    await inside.wait()
    await cancel(task)
    assert (await get_job(postgres, job)).status is Status.Queued
    locked = await postgres.execute(
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
        "AND state LIKE 'idle in transaction%'"
    )
    assert locked == []
    assert checked_out(engine) == 0
    await postgres.execute("UPDATE jobs SET zombie_count = 0")  # would wait for ever
    await engine.dispose()


async def test_an_exhausted_pool_does_not_keep_claims_from_going_back(database: Database) -> None:
    """The last words go by a connection of their own."""
    unstuck = await start(database)
    jobs = await queue_jobs(database, 3)
    engine = create_async_engine(database.url, pool_size=1, max_overflow=0, pool_timeout=30)
    gate = Gate()

    async def quiet(item_id: int, session: AsyncSession) -> None:
        gate.inside.set()
        await gate.open.wait()

    sessions = async_sessionmaker(engine)
    task = asyncio.create_task(run(unstuck, quiet, session_factory=sessions))
    await gate.inside.wait()
    async with engine.connect():  # somebody takes the only connection, and keeps it
        await cancel(task)
        assert [(await get_job(database, job)).status for job in jobs] == [Status.Queued] * 3
    await engine.dispose()


async def test_a_scheduler_that_is_shut_down_leaves_nothing_in_processing(
    database: Database,
) -> None:
    unstuck = await start(database)
    jobs = await queue_jobs(database, 3)
    gate = Gate()
    scheduler = AsyncIOScheduler()
    ended = asyncio.Event()

    async def job() -> None:
        try:
            await run(unstuck, gate)
        finally:
            ended.set()

    scheduler.add_job(job)
    scheduler.start()
    await gate.inside.wait()
    scheduler.shutdown(wait=False)
    await ended.wait()
    assert [(await get_job(database, job)).status for job in jobs] == [Status.Queued] * 3


async def test_a_function_that_does_not_end_is_left_behind_in_time(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    # Within it the other record is given back, over a connection of its own.
    unstuck = await start(database, settings={"shutdown_timeout_seconds": 3})
    stubborn, waited = await queue_jobs(database, 2)
    inside, release = asyncio.Event(), asyncio.Event()

    async def work(item_id: int, session: AsyncSession) -> None:
        inside.set()
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    task = asyncio.create_task(run(unstuck, work, order_by_column=Job.id))
    await inside.wait()
    try:
        await cancel(task)
        assert "was not ended in time; the sweep finds it" in caplog.text
        assert (await get_job(database, waited)).status is Status.Queued
    finally:
        release.set()  # else the event loop would wait for it for ever

    async def is_done() -> bool:
        return (await get_job(database, stubborn)).status is Status.Completed

    await until(is_done)  # it still has its claim, so it may finish


async def test_a_stop_inside_a_side_effect_holds_the_record_with_that_evidence(
    database: Database,
) -> None:
    unstuck = await start(database, held=Status.Held)
    (job,) = await queue_jobs(database, 1)
    inside = asyncio.Event()

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        async with claim.effect("charge card"):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run(unstuck, work))
    await inside.wait()
    await cancel(task)
    assert (await get_job(database, job)).status is Status.Held
    kept = await recall(database, job)
    assert kept is not None
    assert "the side effect 'charge card' had begun" in kept.held_reason


async def test_what_was_cancelled_is_counted_for_observers(database: Database) -> None:
    witness = Witness()
    unstuck = await start(database, observers=[witness])
    await queue_jobs(database, 3)
    await cancel(await begin(unstuck, Gate()))
    assert [ended.outcome for ended in witness.heard("on_attempt_ended")] == ["requeued"] * 3
