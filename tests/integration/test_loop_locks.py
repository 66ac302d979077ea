"""Locks that loops, sweeps and humans meet, and other things that one worker must not do to the
rest: nobody waits for them for long, and nobody sees an error that is not his."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

from tests.database import Database
from tests.integration.test_loop_breaker import TWO_FAILURES, pass_the_wait, start_open
from tests.interleaving import until
from tests.jobs import HOUR, Job, Status, add_claim, add_job, ago, get_job, start
from tests.lookup import Witness, recall
from tests.looping import queue_job, queue_jobs, read_claims, read_ledger, run
from tests.outages import (
    add_busy,
    make_entry,
    nothing,
    put_entry,
    read_spool,
    spool_end,
    start_spooling,
    start_unreliable,
)
from unstuck import Claim, Unstuck, UnstuckError
from unstuck.errors import WrongState
from unstuck.tables import claims

IMPATIENT = {"lock_timeout_seconds": 0.2}


async def checkpoint_apart(claim: Claim) -> None:
    await claim.checkpoint({"page": 2})


async def begin_an_effect(claim: Claim) -> None:
    async with claim.effect("charge card"):
        pass


async def read_in_it(session: AsyncSession, claim: Claim) -> None:
    await session.scalar(select(Job.id))


async def checkpoint_in_it(session: AsyncSession, claim: Claim) -> None:
    await claim.checkpoint({"page": 1}, session=session)


@pytest.mark.parametrize("apart", [checkpoint_apart, begin_an_effect])
@pytest.mark.parametrize(
    ("level", "use"),
    [
        ("REPEATABLE READ", read_in_it),
        ("SERIALIZABLE", read_in_it),
        ("READ COMMITTED", checkpoint_in_it),
    ],
)
async def test_what_is_written_apart_while_the_own_session_has_locked_the_claim_is_refused_soon(
    postgres: Database,
    level: str,
    use: Callable[[AsyncSession, Claim], Awaitable[None]],
    apart: Callable[[Claim], Awaitable[None]],
) -> None:
    unstuck = await start(postgres, settings=IMPATIENT)
    job = await queue_job(postgres)
    engine = create_async_engine(postgres.url, isolation_level=level)

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        await use(session, claim)
        began = time.monotonic()
        with pytest.raises(UnstuckError) as refused:
            await apart(claim)
        assert time.monotonic() - began < 4  # and not 5, which is what is usual
        assert str(refused.value) == (
            f"jobs {job} is locked, most likely by the session that works on it (SQLite has one "
            "writer at a time): commit it before a checkpoint or an effect, or say "
            "checkpoint(..., session=session)."
        )
        await session.commit()
        await apart(claim)
        (kept,) = await read_claims(postgres)
        assert kept.effect is None

    result = await run(unstuck, work, session_factory=async_sessionmaker(engine))
    assert result.completed == 1
    await engine.dispose()


async def add_old_claim(database: Database, job: int) -> None:
    """Of a worker that began two hours ago, and beats."""
    then = ago(2 * HOUR)
    await add_claim(database, job, token=uuid4(), started_at=then, heartbeat_at=ago(1))


async def lock_claim(connection: Any, job: int) -> None:
    """As its own worker does that commits, or checkpoints in its session."""
    mine = claims.c.record_id == str(job)
    locked = await connection.execute(select(claims.c.token).where(mine).with_for_update())
    assert len(locked.all()) == 1


async def test_a_hung_claim_that_is_locked_does_not_keep_the_sweep_from_telling_of_the_others(
    postgres: Database,
) -> None:
    unstuck = await start(postgres, settings={**IMPATIENT, "hung_after_minutes": 60})
    locked, other = [await add_busy(postgres) for _ in range(2)]
    for job in (locked, other):
        await add_old_claim(postgres, job)
    async with postgres.engine.begin() as worker:
        await lock_claim(worker, locked)
        report = await unstuck.sweep()
        assert (report.total("hung"), report.errors) == (1, [])
        assert await read_ledger(postgres) == [(str(other), "hung", "hung", None)]
    report = await unstuck.sweep()
    assert (report.total("hung"), report.errors) == (1, [])
    assert (await read_ledger(postgres))[1:] == [(str(locked), "hung", "hung", None)]


async def test_a_left_over_claim_that_is_locked_does_not_keep_the_loop_from_the_other_records(
    postgres: Database,
) -> None:
    """Somebody requeued the record by hand while its worker was about to commit."""
    unstuck = await start(postgres, settings=IMPATIENT)
    locked, *others = await queue_jobs(postgres, 3)
    await add_old_claim(postgres, locked)
    async with postgres.engine.begin() as worker:
        await lock_claim(worker, locked)
        result = await run(unstuck, nothing, order_by_column=Job.id)
        assert (result.claimed, result.completed, result.error) == (2, 2, None)
        for job in others:
            assert (await get_job(postgres, job)).status is Status.Completed
        assert (await get_job(postgres, locked)).status is Status.Queued
    assert (await run(unstuck, nothing)).completed == 1


def patient_engine(database: Database, seconds: float) -> AsyncEngine:
    """Its connections look for a deadlock only after so many seconds of waiting, and who looks
    first is the one whose transaction is ended."""
    server_settings = {"deadlock_timeout": f"{seconds * 1000:g}ms"}
    return create_async_engine(database.url, connect_args={"server_settings": server_settings})


@pytest.mark.parametrize("victim", ["human", "worker"])
async def test_a_humans_cancel_that_meets_a_worker_in_the_opposite_order_shows_no_deadlock(
    postgres: Database, victim: str
) -> None:
    """The worker has locked its claim and wants the record, the human the other way round."""
    prepared = await start(postgres)
    job = await queue_job(postgres)
    engines = {
        who: patient_engine(postgres, 0.5 if who == victim else 60) for who in ("human", "worker")
    }
    human = Unstuck(engines["human"], prepared.settings, prepared.registry)
    worker = Unstuck(engines["worker"], prepared.settings, prepared.registry)
    cancelling: list[asyncio.Task[None]] = []

    async def human_waits() -> bool:
        blocked = "cardinality(pg_blocking_pids(pid)) > 0 AND datname = current_database()"
        return bool(await postgres.execute(f"SELECT 1 FROM pg_stat_activity WHERE {blocked}"))

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        await claim.checkpoint({"page": 1}, session=session)
        cancel = human.cancel("jobs", item_id, by="ada", why="not needed")
        cancelling.append(asyncio.create_task(cancel))
        await until(human_waits)

    result = await run(worker, work)
    if victim == "human":
        with pytest.raises(WrongState, match="is Completed, not processing; nothing was changed"):
            await cancelling[0]
        assert result.completed == 1
        assert (await get_job(postgres, job)).status is Status.Completed
    else:
        await cancelling[0]
        assert result.lost == 1
        cancelled = await get_job(postgres, job)
        assert cancelled.status is Status.Failed
        assert cancelled.error == "Cancelled by ada: not needed"
    assert await read_claims(postgres) == []
    for engine in engines.values():
        await engine.dispose()


async def stop_in(unstuck: Unstuck, work: Callable[..., Awaitable[None]]) -> None:
    """A deploy stops the worker where it says so, and never comes to an end by itself."""
    reached = asyncio.Event()

    async def function(item_id: int, session: AsyncSession, claim: Claim) -> None:
        await work(claim, reached)
        await asyncio.Event().wait()

    task = asyncio.create_task(run(unstuck, function))
    arriving = asyncio.create_task(reached.wait())
    async with asyncio.timeout(20):
        await asyncio.wait({task, arriving}, return_when=asyncio.FIRST_COMPLETED)
    assert reached.is_set(), task.result()
    task.cancel()
    await asyncio.wait({task})


async def held_reason_of(database: Database, job: int) -> str:
    assert (await get_job(database, job)).status is Status.Held
    kept = await recall(database, job)
    assert kept is not None
    return str(kept.held_reason)


async def test_the_end_of_an_inner_effect_leaves_the_outer_one_marked(database: Database) -> None:
    unstuck = await start(database, held=Status.Held)
    job = await queue_job(database)
    marks: list[str | None] = []

    async def work(claim: Claim, reached: asyncio.Event) -> None:
        async with claim.effect("charge card"):
            async with claim.effect("write audit"):
                marks.extend(kept.effect for kept in await read_claims(database))
            marks.extend(kept.effect for kept in await read_claims(database))
            reached.set()
            await asyncio.Event().wait()

    await stop_in(unstuck, work)
    assert marks == ["charge card, write audit", "charge card"]
    reason = await held_reason_of(database, job)
    assert "the side effect 'charge card' had begun and was not seen to end" in reason


async def test_when_the_outer_effect_ends_as_well_nothing_is_marked(database: Database) -> None:
    unstuck = await start(database, held=Status.Held)
    job = await queue_job(database)

    async def work(claim: Claim, reached: asyncio.Event) -> None:
        async with claim.effect("charge card"), claim.effect("write audit"):
            pass
        reached.set()

    await stop_in(unstuck, work)
    assert (await get_job(database, job)).status is Status.Queued


async def test_effects_at_once_leave_each_other_marked(database: Database) -> None:
    unstuck = await start(database, held=Status.Held)
    job = await queue_job(database)

    async def work(claim: Claim, reached: asyncio.Event) -> None:
        mailing, charged = asyncio.Event(), asyncio.Event()

        async def charge() -> None:
            async with claim.effect("charge card"):
                await mailing.wait()
            charged.set()

        async def mail() -> None:
            async with claim.effect("send mail"):
                mailing.set()
                await charged.wait()
                reached.set()
                await asyncio.Event().wait()

        await asyncio.gather(charge(), mail())

    await stop_in(unstuck, work)
    reason = await held_reason_of(database, job)
    assert "the side effect 'send mail' had begun and was not seen to end" in reason


async def test_an_inner_effect_that_raised_is_the_one_that_stays_marked(
    database: Database,
) -> None:
    unstuck = await start(database, held=Status.Held)
    job = await queue_job(database)

    async def work(claim: Claim, reached: asyncio.Event) -> None:
        async with claim.effect("write audit"):
            with pytest.raises(TimeoutError):
                async with claim.effect("charge card"):
                    raise TimeoutError
        reached.set()

    await stop_in(unstuck, work)
    reason = await held_reason_of(database, job)
    assert "the side effect 'charge card' had begun and was not seen to end" in reason


class Dawdler:
    """Takes for ever over the first word that somebody finds out."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def on_breaker_changed(self, workflow: str, state: str) -> None:
        if state == "half_open" and not self.told.is_set():
            self.told.set()
            await asyncio.Event().wait()


async def test_whoever_is_cancelled_while_telling_that_it_finds_out_leaves_it_to_the_next(
    database: Database, tmp_path: Path
) -> None:
    dawdler = Dawdler()
    unstuck, _ = await start_open(database, tmp_path, [dawdler])
    await queue_job(database)
    pass_the_wait(unstuck)
    prober = asyncio.create_task(run(unstuck, nothing))
    await asyncio.wait_for(dawdler.told.wait(), 20)
    prober.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prober
    pass_the_wait(unstuck)
    result = await run(unstuck, nothing)
    assert (result.completed, result.breaker_open) == (1, False)


@pytest.mark.parametrize("found", [0, 1], ids=["nothing to claim", "something to claim"])
async def test_failures_between_which_claims_went_well_do_not_open_the_breaker(
    database: Database, tmp_path: Path, found: int
) -> None:
    witness = Witness()
    unstuck, source = await start_unreliable(
        database, tmp_path, settings=TWO_FAILURES, observers=[witness]
    )
    for _ in range(4):
        source.fail()
        assert (await run(unstuck, nothing)).error is not None
        source.mend()
        await queue_jobs(database, found)
        result = await run(unstuck, nothing)
        assert (result.completed, result.error, result.breaker_open) == (found, None, False)
    assert witness.heard("on_breaker_changed") == []


ODD = [{"seconds": None}, {"seconds": "long"}, {"seconds": [1]}, {"seconds": float("nan")}, {"": 1}]


@pytest.mark.parametrize("drain", ["loop", "sweep"])
@pytest.mark.parametrize("data", ODD, ids=str)
async def test_a_spooled_end_with_odd_data_stops_neither_sweep_nor_loop(
    database: Database, tmp_path: Path, data: dict[str, Any], drain: str
) -> None:
    """Be its claim still there, or lost."""
    unstuck = await start_spooling(database, tmp_path)
    odd, lost, well = [await add_busy(database) for _ in range(3)]
    await spool_end(database, unstuck, odd, outcome="completed", data=data)
    await put_entry(database, unstuck, make_entry(lost, outcome="completed", data=data))
    await spool_end(database, unstuck, well)
    stuck, queued = await add_job(database), await queue_job(database)
    if drain == "loop":
        assert (await run(unstuck, nothing)).completed == 1
        assert (await get_job(database, queued)).status is Status.Completed
    else:
        report = await unstuck.sweep()
        assert (report.errors, report.found) == ([], 1)
        assert (await get_job(database, stuck)).status is Status.Queued
    assert (await get_job(database, well)).status is Status.Failed
    left = {entry.record_id for entry in await read_spool(database, unstuck.settings)}
    assert left <= {str(odd), str(lost)}


async def test_an_end_that_does_not_say_how_long_it_took_is_written_all_the_same(
    database: Database, tmp_path: Path
) -> None:
    witness = Witness()
    unstuck = await start_spooling(database, tmp_path, observers=[witness])
    job = await add_busy(database)
    await spool_end(database, unstuck, job, outcome="completed", data={"seconds": None})
    await run(unstuck, nothing)
    assert (await get_job(database, job)).status is Status.Completed
    assert [ended.seconds for ended in witness.heard("on_attempt_ended")] == [0.0]
    assert await read_spool(database, unstuck.settings) == []
