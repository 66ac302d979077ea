"""Whatever ends a job loop, and wherever it is just then: no claim is lost with it, and what it
tells of its records is true."""

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import DateTime, Enum, Table, select, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tests.conftest import POSTGRES
from tests.database import Database
from tests.interleaving import before_statement, until
from tests.jobs import HOUR, Job, Status, ago, change, get_job, start
from tests.lookup import Witness, recall
from tests.looping import queue_job, queue_jobs, read_claims, read_ledger, run
from tests.outages import alert, alerts, nothing, read_spool, start_spooling
from unstuck import Claim, Observer, Unstuck
from unstuck.events import Ended
from unstuck.tables import records

BRISK = {"heartbeat_interval_seconds": 0.1}
STOPPED = "Stopped by a shutdown in mid-work; queued again"


class Inside:
    """A processing function that says when it is inside, and stays there."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.seen: list[int] = []

    async def __call__(self, item_id: int, session: AsyncSession) -> None:
        self.seen.append(item_id)
        self.reached.set()
        await asyncio.Event().wait()


async def begin(unstuck: Unstuck, inside: Inside) -> asyncio.Task[Any]:
    task = asyncio.create_task(run(unstuck, inside, order_by_column=Job.id))
    await inside.reached.wait()
    return task


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def cancel_all_but(mine: asyncio.Task[Any] | None) -> list[asyncio.Task[Any]]:
    others = [task for task in asyncio.all_tasks() if task is not mine]
    for task in others:
        task.cancel()
    return others


async def end_the_program() -> None:
    """As `asyncio.run` ends: it cancels every task, waits for these, and for nothing else. What is
    not written by then never will be."""
    others = cancel_all_but(asyncio.current_task())
    await asyncio.gather(*others, return_exceptions=True)


async def read_statuses(database: Database, wanted: list[int]) -> list[Status]:
    return [(await get_job(database, job)).status for job in wanted]


class Scripted:
    """A source of sessions that gives the first, for the claim; and after so many failures none
    any more, to whoever waits for one."""

    def __init__(self, database: Database, *, failures: int = 0) -> None:
        self._database = database
        self._failures = failures
        self._asked = 0
        self.waited_for = asyncio.Event()
        self.is_mended = False

    async def __call__(self) -> AsyncSession:
        self._asked += 1
        if self._asked == 1 or self.is_mended:
            return self._database.sessions()
        if self._asked - 1 <= self._failures:
            raise ConnectionError("no route to host")
        self.waited_for.set()
        return await asyncio.Future()


async def test_attempts_without_a_first_step_go_back_when_the_program_ends(
    database: Database,
) -> None:
    """A task that is cancelled before its first step never learns of it."""
    mine, cancelled = asyncio.current_task(), dict[str, str]()

    class EndsWithTheFirst(Observer):
        def on_attempt_ended(self, ended: Ended) -> None:
            """In the same step the loop goes on to the next record."""
            if not cancelled:
                asyncio.get_running_loop().call_soon(self.end_the_program)

        def end_the_program(self) -> None:
            for task in cancel_all_but(mine):
                coroutine = task.get_coro()
                assert inspect.iscoroutine(coroutine)
                cancelled[task.get_name()] = inspect.getcoroutinestate(coroutine)

    unstuck = await start(database, observers=[EndsWithTheFirst()])
    first, second, third = await queue_jobs(database, 3)
    seen: list[int] = []
    task = asyncio.create_task(
        run(unstuck, lambda item_id, session: seen.append(item_id), order_by_column=Job.id)
    )
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled[f"jobs {second}"] == inspect.CORO_CREATED
    assert seen == [first]
    assert await read_claims(database) == []
    assert await read_statuses(database, [first, second, third]) == [
        Status.Completed,
        Status.Queued,
        Status.Queued,
    ]
    ledger = await read_ledger(database)
    for job in (second, third):
        assert (str(job), "returned", "shutdown", "requeued") in ledger


async def test_an_end_that_is_being_tried_for_is_written_when_the_program_ends(
    database: Database,
) -> None:
    prepared = await start(database)
    source = Scripted(database, failures=1)
    unstuck = Unstuck(source, prepared.settings, prepared.registry)
    first, second = await queue_jobs(database, 2)
    loop = asyncio.create_task(run(unstuck, nothing, order_by_column=Job.id))
    await source.waited_for.wait()
    await end_the_program()
    assert loop.cancelled()
    assert await read_claims(database) == []
    failed = await get_job(database, first)
    assert (failed.status, failed.error) == (Status.Failed, "Failed to obtain processing session")
    assert await read_statuses(database, [second]) == [Status.Queued]
    assert set(await read_ledger(database)) == {
        (str(first), "attempt", "no_session", "failed"),
        (str(second), "returned", "shutdown", "requeued"),
    }


async def test_a_claim_just_committed_goes_back_when_the_program_ends(
    database: Database,
) -> None:
    closing = asyncio.Event()

    class SlowToClose(AsyncSession):
        async def close(self) -> None:
            try:
                if not closing.is_set():
                    closing.set()
                    await asyncio.Event().wait()
            finally:
                await super().close()

    unstuck = await start(database)
    waiting = await queue_jobs(database, 3)
    sessions = async_sessionmaker(database.engine, class_=SlowToClose)
    loop = asyncio.create_task(run(unstuck, nothing, session_factory=sessions))
    await closing.wait()
    assert await read_statuses(database, waiting) == [Status.Processing] * 3
    await end_the_program()
    assert loop.cancelled()
    assert await read_statuses(database, waiting) == [Status.Queued] * 3
    assert await read_claims(database) == []


@pytest.mark.parametrize(
    "part",
    [
        "UPDATE jobs SET",
        "INTO zombie_claims",
        "UPDATE zombie_claims SET",
        "DELETE FROM zombie_claims WHERE zombie_claims",
        "INSERT INTO zombie_events",
    ],
)
async def test_a_program_that_ends_at_any_statement_leaves_nothing_in_processing(
    database: Database, part: str
) -> None:
    unstuck = await start(database)
    waiting = await queue_jobs(database, 3)
    mine, cut = asyncio.current_task(), asyncio.Event()
    others: list[asyncio.Task[Any]] = []

    async def cut_in() -> None:
        others.extend(cancel_all_but(mine))
        cut.set()

    with before_statement(database, part, cut_in):
        loop = asyncio.create_task(run(unstuck, nothing))
        await cut.wait()
        await asyncio.gather(*others, return_exceptions=True)
    assert loop.cancelled()
    assert set(await read_statuses(database, waiting)) <= {Status.Queued, Status.Completed}
    assert await read_claims(database) == []


@pytest.mark.parametrize("is_passing", [True, False], ids=["passing", "lasting"])
async def test_a_session_that_fails_after_the_claim_was_committed_gives_the_claims_back(
    database: Database, is_passing: bool
) -> None:
    prepared = await start(database)
    waiting = await queue_jobs(database, 3)
    error = ConnectionError("reset by peer") if is_passing else ValueError("not closed")
    torn_down = 0

    async def get_session() -> AsyncIterator[AsyncSession]:
        nonlocal torn_down
        async with database.sessions() as session:
            yield session
        torn_down += 1
        if torn_down == 1:
            assert await read_statuses(database, waiting) == [Status.Processing] * 3
            raise error

    unstuck = Unstuck(get_session, prepared.settings, prepared.registry)
    if is_passing:
        result = await run(unstuck, nothing)
        assert (result.claimed, result.completed) == (0, 0)
        assert "reset by peer" in str(result.error)
    else:
        with pytest.raises(ValueError, match="not closed"):
            await run(unstuck, nothing)
    assert await read_statuses(database, waiting) == [Status.Queued] * 3
    assert await read_claims(database) == []
    assert {entry[1:] for entry in await read_ledger(database)} == {
        ("returned", "no_session", "requeued")
    }
    assert (await run(unstuck, nothing)).completed == 3


async def test_a_locked_record_does_not_keep_the_others_from_going_back(
    postgres: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Witness()
    unstuck = await start_spooling(postgres, tmp_path, observers=[witness])
    all_jobs = await queue_jobs(postgres, 5)
    locked, others = all_jobs[3], all_jobs[:3] + all_jobs[4:]
    task = await begin(unstuck, Inside())
    async with postgres.engine.begin() as neighbour:
        await neighbour.execute(update(Job).where(Job.id == locked).values(idempotent=True))
        await cancel(task)
        assert await read_statuses(postgres, others) == [Status.Queued] * 4
        assert await read_statuses(postgres, [locked]) == [Status.Processing]
    assert alerts(caplog) == [alert(locked)]
    told = {int(ended.record_id): ended.outcome for ended in witness.heard("on_attempt_ended")}
    assert told == {**dict.fromkeys(others, "requeued"), locked: "spooled"}
    (entry,) = await read_spool(postgres, unstuck.settings)
    assert (entry.record_id, entry.outcome, entry.cause) == (str(locked), "returned", "shutdown")
    await unstuck.sweep()
    assert await read_statuses(postgres, [locked]) == [Status.Queued]
    assert await read_claims(postgres) == []


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(Status.Failed, "failed"), (Status.Completed, "completed"), (Status.Waiting, "moved")],
)
async def test_a_waiting_record_that_was_moved_by_hand_is_not_told_as_requeued(
    database: Database, status: Status, outcome: str
) -> None:
    witness = Witness()
    unstuck = await start(database, observers=[witness])
    ran, moved, waited = await queue_jobs(database, 3)
    task = await begin(unstuck, Inside())
    await change(database, moved, status=status)
    await cancel(task)
    assert await read_statuses(database, [ran, moved, waited]) == [
        Status.Queued,
        status,
        Status.Queued,
    ]
    told = {int(ended.record_id): ended.outcome for ended in witness.heard("on_attempt_ended")}
    assert told == {ran: "requeued", moved: outcome, waited: "requeued"}
    assert (str(moved), "returned", "shutdown", outcome) in await read_ledger(database)
    assert await read_claims(database) == []


async def test_an_end_that_is_still_tried_for_at_the_shutdown_is_spooled_and_beaten_for_no_more(
    database: Database, tmp_path: Path
) -> None:
    limit = {"shutdown_timeout_seconds": 0.3}
    prepared = await start_spooling(database, tmp_path, settings={**BRISK, **limit})
    source = Scripted(database, failures=1)
    unstuck = Unstuck(source, prepared.settings, prepared.registry)
    job = await queue_job(database)
    task = asyncio.create_task(run(unstuck, nothing))
    await source.waited_for.wait()
    await cancel(task)

    async def is_spooled() -> bool:
        spooled = await read_spool(database, unstuck.settings)
        told = [(entry.record_id, entry.outcome, entry.cause) for entry in spooled]
        return told == [(str(job), "failed", "no_session")]

    async def nothing_beats() -> bool:
        return not any(thread.name == "unstuck-lifeline" for thread in threading.enumerate())

    await until(is_spooled)
    await until(nothing_beats)
    assert len(await read_claims(database)) == 1
    source.is_mended = True
    await unstuck.sweep()
    assert await read_statuses(database, [job]) == [Status.Failed]
    assert await read_claims(database) == []


async def test_what_still_waits_for_its_session_never_began_and_is_not_held(
    database: Database,
) -> None:
    prepared = await start(database, reapable=False, held=Status.Held)
    source = Scripted(database)
    unstuck = Unstuck(source, prepared.settings, prepared.registry)
    job = await queue_job(database)
    inside = Inside()
    task = asyncio.create_task(run(unstuck, inside))
    await source.waited_for.wait()
    await cancel(task)
    assert inside.seen == []
    assert await read_statuses(database, [job]) == [Status.Queued]
    assert await recall(database, job) is None
    assert await read_ledger(database) == [(str(job), "returned", "shutdown", "requeued")]


async def test_what_is_just_marked_as_started_never_began_and_is_not_held(
    database: Database,
) -> None:
    unstuck = await start(database, reapable=False, held=Status.Held)
    job = await queue_job(database)
    inside = Inside()
    task: asyncio.Task[Any] | None = None

    async def cut_in() -> None:
        assert task is not None
        task.cancel()

    with before_statement(database, "UPDATE zombie_claims SET started_at", cut_in):
        task = asyncio.create_task(run(unstuck, inside))
        with pytest.raises(asyncio.CancelledError):
            await task
    assert inside.seen == []
    assert await read_statuses(database, [job]) == [Status.Queued]
    assert await read_ledger(database) == [(str(job), "returned", "shutdown", "requeued")]


class Broken(Observer):
    def __init__(self) -> None:
        self.told = 0

    def on_attempt_ended(self, ended: Ended) -> None:
        self.told += 1
        raise ValueError("the observer's own")


class Sleepy(Observer):
    def __init__(self) -> None:
        self.told = 0

    async def on_attempt_ended(self, ended: Ended) -> None:
        self.told += 1
        await asyncio.Event().wait()


async def test_a_failing_observer_does_not_replace_the_cancellation(database: Database) -> None:
    observer = Broken()
    unstuck = await start(database, observers=[observer])
    waiting = await queue_jobs(database, 3)
    await cancel(await begin(unstuck, Inside()))
    assert observer.told == 3
    assert await read_statuses(database, waiting) == [Status.Queued] * 3


async def test_a_failing_observer_does_not_replace_a_timeout_around_the_loop(
    database: Database,
) -> None:
    observer = Broken()
    unstuck = await start(database, observers=[observer])
    (job,) = await queue_jobs(database, 1)
    inside = Inside()

    async def hurry() -> None:
        async with asyncio.timeout(None) as limit:
            waiting = asyncio.create_task(inside.reached.wait())
            waiting.add_done_callback(lambda _: limit.reschedule(0))
            await run(unstuck, inside)

    with pytest.raises(TimeoutError):
        await hurry()
    assert observer.told == 1
    assert await read_statuses(database, [job]) == [Status.Queued]


@pytest.mark.parametrize("database", [POSTGRES[-1], "sqlite"], indirect=True)
async def test_a_slow_observer_does_not_overrun_the_shutdown(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Sleepy()
    settings = {"shutdown_timeout_seconds": 1.5}
    unstuck = await start(database, settings=settings, observers=[observer])
    waiting = await queue_jobs(database, 8)
    task = await begin(unstuck, Inside())
    began = time.monotonic()
    await cancel(task)
    assert time.monotonic() - began < 8  # an observer alone may keep a sweep waiting for 10 s
    assert observer.told == 1
    assert "Observers took longer than a shutdown may take" in caplog.text
    assert await read_statuses(database, waiting) == [Status.Queued] * 8


async def test_an_exception_group_that_answers_a_cancellation_is_a_stop(
    database: Database,
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    inside = asyncio.Event()

    async def stream() -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("the stream was closed") from None

    async def work(item_id: int, session: AsyncSession) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(stream())

    task = asyncio.create_task(run(unstuck, work))
    await inside.wait()
    await cancel(task)
    stopped = await get_job(database, job)
    assert (stopped.status, stopped.error) == (Status.Queued, STOPPED)
    assert await read_ledger(database) == [(str(job), "attempt", "shutdown", "requeued")]


class Base(DeclarativeBase):
    pass


class Leased(Base):
    """A lease that cannot be none, but only over."""

    __tablename__ = "leased"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Status] = mapped_column(Enum(Status), default=Status.Queued)
    leased_until: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), default=lambda: ago(HOUR)
    )


async def pass_time(database: Database, table: Table, column: str, seconds: float) -> None:
    """The times in this column, if any, are that much longer ago."""
    async with database.engine.begin() as connection:
        (then,) = await connection.scalars(select(table.c[column]))
        if then is not None:
            earlier = {column: then - timedelta(seconds=seconds)}
            await connection.execute(update(table).values(**earlier))


@pytest.mark.parametrize("model", [Job, Leased], ids=["nullable", "not nullable"])
async def test_a_record_that_is_held_in_place_stays_held_when_its_lease_runs_out(
    database: Database, model: Any
) -> None:
    unstuck = await start(database, lease="leased_until")
    await database.create(Base.metadata)
    unstuck.registry.register(Leased, name="leased", lease="leased_until")
    table = model.__table__
    async with database.sessions.begin() as session:
        session.add(model(status=Status.Queued))
    inside = asyncio.Event()

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        async with claim.effect("send invoice"):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run(unstuck, work, model=model))
    await inside.wait()
    await cancel(task)
    # The lease was for an hour, as the threshold is.
    await pass_time(database, table, "leased_until", 2 * HOUR)
    await pass_time(database, records, "held_at", 2 * HOUR)
    assert (await unstuck.sweep()).found == 0
    assert (await run(unstuck, nothing, model=model)).claimed == 0
    async with database.sessions() as session:
        (held,) = await session.scalars(select(model))
        assert held.status is Status.Processing
    kept = await recall(database, held.id)
    assert kept is not None
    assert "the side effect 'send invoice' had begun" in kept.held_reason


async def test_a_record_that_is_held_in_place_can_be_released_at_once(
    database: Database,
) -> None:
    """Its lease would still run for an hour."""
    unstuck = await start(database, reapable=False, lease="leased_until")
    job = await queue_job(database)
    await cancel(await begin(unstuck, Inside()))
    assert await read_statuses(database, [job]) == [Status.Processing]
    await unstuck.release("jobs", job, by="ada", why="checked")
    assert await read_statuses(database, [job]) == [Status.Queued]
