"""The circuit breaker of the job loop: where sessions cannot be had, nothing more is claimed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.jobs import Job, Status, get_job
from tests.lookup import Witness, recall
from tests.looping import queue_job, queue_jobs, read_claims, read_ledger, run
from tests.outages import (
    Begin,
    Unreliable,
    alert,
    alerts,
    failing_after_the_claim,
    impatient,
    nothing,
    outage,
    read_spool,
    said_at,
    start_unreliable,
)
from unstuck import Unstuck
from unstuck.db import Breaker

# An hour: within a test, only a clock that is moved makes it pass.
TWO_FAILURES = {"breaker_failures": 2, "breaker_reset_seconds": 3600}


def breaker_of(unstuck: Unstuck) -> Breaker:
    (workshop,) = unstuck._workshops.values()
    return workshop.breaker


def pass_the_wait(unstuck: Unstuck) -> None:
    """From now on it is two hours later."""
    breaker = breaker_of(unstuck)
    now = breaker._clock
    breaker._clock = lambda: now() + 7200


async def start_open(
    database: Database, spool: Path, observers: list[Any] | None = None
) -> tuple[Unstuck, Unreliable]:
    """Two claims in vain, and the breaker is open; the sessions are there again."""
    unstuck, source = await start_unreliable(
        database, spool, settings=TWO_FAILURES, observers=observers or []
    )
    source.fail()
    for _ in range(2):
        await run(unstuck, nothing)
    source.mend()
    assert not breaker_of(unstuck).is_closed
    return unstuck, source


async def test_failures_in_a_row_stop_a_batch_and_the_rest_goes_back_without_a_strike(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Witness()
    unstuck, source = await start_unreliable(
        database, tmp_path, settings=TWO_FAILURES, observers=[witness]
    )
    jobs = await queue_jobs(database, 5)

    async def work(item_id: int, session: AsyncSession) -> None:
        source.fail()

    result = await run(unstuck, work, order_by_column=Job.id)
    assert (result.claimed, result.completed, result.spooled, result.requeued) == (5, 1, 2, 2)
    assert result.breaker_open
    assert "the circuit breaker is open" in str(result)
    for job in jobs[3:]:
        assert (await get_job(database, job)).status is Status.Queued
        assert await recall(database, job) is None
        assert (str(job), "returned", "no_session", "requeued") in await read_ledger(database)
    assert {claim.record_id for claim in await read_claims(database)} == set(map(str, jobs[1:3]))
    assert witness.heard("on_breaker_changed") == [("jobs", "open")]
    assert [e.record_id for e in witness.heard("on_attempt_ended") if e.outcome == "requeued"] == [
        *map(str, jobs[3:])
    ]
    (said,) = [s for s in said_at(caplog, logging.ERROR) if "claiming stops" in s]
    assert said.startswith("2 sessions in a row could not be had (No database session: ")


async def test_with_several_at_once_none_is_begun_after_it_opens(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_unreliable(database, tmp_path, settings=TWO_FAILURES)
    jobs = await queue_jobs(database, 8)
    with failing_after_the_claim(database, source):
        result = await run(unstuck, nothing, concurrency=2)
    assert result.spooled + result.requeued == 8
    assert 2 <= result.spooled <= 4  # two more may have begun when it opens
    queued = [job for job in jobs if (await get_job(database, job)).status is Status.Queued]
    assert len(queued) == result.requeued


async def test_while_it_is_open_nothing_is_claimed_and_nobody_asks_for_a_session(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_open(database, tmp_path)
    job = await queue_job(database)
    asked = source.calls
    result = await run(unstuck, nothing)
    assert (result.claimed, result.error, result.breaker_open) == (0, None, True)
    assert source.calls == asked
    assert (await get_job(database, job)).status is Status.Queued


async def test_after_the_wait_a_session_that_is_had_closes_it_and_claiming_goes_on(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Witness()
    unstuck, _ = await start_open(database, tmp_path, [witness])
    await queue_job(database)
    pass_the_wait(unstuck)
    result = await run(unstuck, nothing)
    assert (result.completed, result.breaker_open) == (1, False)
    heard = [state for _, state in witness.heard("on_breaker_changed")]
    assert heard == ["open", "half_open", "closed"]
    assert "Sessions can be had again: claiming goes on" in said_at(caplog, logging.WARNING)


async def test_after_the_wait_a_session_that_is_not_had_keeps_it_open_for_another(
    database: Database, tmp_path: Path
) -> None:
    witness = Witness()
    unstuck, source = await start_open(database, tmp_path, [witness])
    await queue_job(database)
    source.fail()
    pass_the_wait(unstuck)
    asked = source.calls
    assert [(await run(unstuck, nothing)).breaker_open for _ in range(3)] == [True] * 3
    assert source.calls == asked + 1
    heard = [state for _, state in witness.heard("on_breaker_changed")]
    assert heard == ["open", "half_open", "open"]
    source.mend()
    pass_the_wait(unstuck)
    assert (await run(unstuck, nothing)).completed == 1


class Door:
    """A source of sessions behind a door, and word of who waits before it."""

    def __init__(self) -> None:
        self.knocked, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.knocked.set()
        await self.opened.wait()


async def test_one_at_a_time_finds_out_whether_sessions_are_there_again(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_open(database, tmp_path)
    jobs = await queue_jobs(database, 2)
    door = Door()

    async def wait_for_the_door() -> AsyncSession:
        await door()
        return database.sessions()

    source.fail(times=1, trouble=wait_for_the_door)
    pass_the_wait(unstuck)
    first = asyncio.create_task(run(unstuck, nothing))
    await door.knocked.wait()
    asked = source.calls
    others = await asyncio.gather(*[run(unstuck, nothing) for _ in range(5)])
    assert [(other.claimed, other.breaker_open) for other in others] == [(0, True)] * 5
    assert source.calls == asked
    door.opened.set()
    assert (await first).completed == 2
    assert [(await get_job(database, job)).status for job in jobs] == [Status.Completed] * 2


async def test_whoever_is_cancelled_while_finding_out_leaves_it_to_the_next(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_open(database, tmp_path)
    await queue_job(database)
    door = Door()
    source.fail(times=1, trouble=door)
    pass_the_wait(unstuck)
    prober = asyncio.create_task(run(unstuck, nothing))
    await door.knocked.wait()
    prober.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prober
    pass_the_wait(unstuck)
    assert (await run(unstuck, nothing)).completed == 1


async def test_a_session_that_cannot_be_closed_after_finding_out_ends_no_loop(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_open(database, tmp_path)
    await queue_job(database)

    class Unclosable(AsyncSession):
        async def close(self) -> None:
            await super().close()
            raise ConnectionResetError("connection reset by peer")

    source.fail(times=1, trouble=lambda: Unclosable(database.engine))
    pass_the_wait(unstuck)
    assert (await run(unstuck, nothing)).completed == 1


async def test_what_was_spooled_is_written_once_it_is_closed_again(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_unreliable(database, tmp_path, settings=TWO_FAILURES)
    jobs = await queue_jobs(database, 4)
    with failing_after_the_claim(database, source):
        await run(unstuck, nothing, order_by_column=Job.id)
    source.mend()
    assert (await run(unstuck, nothing)).breaker_open
    assert len(await read_spool(database, unstuck.settings)) == 2
    pass_the_wait(unstuck)
    assert (await run(unstuck, nothing)).completed == 2
    statuses = [(await get_job(database, job)).status for job in jobs]
    assert statuses == [Status.Failed] * 2 + [Status.Completed] * 2
    assert await read_spool(database, unstuck.settings) == []


async def test_with_0_it_never_opens_and_every_record_has_its_own_try(
    database: Database, tmp_path: Path
) -> None:
    witness = Witness()
    unstuck, source = await start_unreliable(
        database, tmp_path, settings={"breaker_failures": 0}, observers=[witness]
    )
    await queue_jobs(database, 8)
    with failing_after_the_claim(database, source):
        result = await run(unstuck, nothing)
    assert (result.spooled, result.requeued, result.breaker_open) == (8, 0, False)
    source.fail()
    assert (await run(unstuck, nothing)).error is not None
    source.mend()
    assert (await run(unstuck, nothing)).error is None
    assert witness.heard("on_breaker_changed") == []


async def test_a_session_that_is_had_in_between_starts_the_count_anew(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_unreliable(database, tmp_path, settings=TWO_FAILURES)
    await queue_jobs(database, 4)
    failures = iter([1, 0, 1, 0])

    async def work(item_id: int, session: AsyncSession) -> None:
        source.fail(times=next(failures))

    with failing_after_the_claim(database, source, times=1):
        result = await run(unstuck, work)
    assert (result.failed, result.completed, result.breaker_open) == (2, 2, False)


async def test_it_is_shared_by_the_loops_on_one_source_and_by_no_other(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_open(database, tmp_path)
    await queue_job(database)
    assert (await run(unstuck, nothing, session_factory=source)).breaker_open
    elsewhere = await run(unstuck, nothing, session_factory=database.sessions)
    assert (elsewhere.completed, elsewhere.breaker_open) == (1, False)


async def test_drain_ends_where_it_opens(database: Database, tmp_path: Path) -> None:
    unstuck, source = await start_unreliable(database, tmp_path, settings=TWO_FAILURES)
    await queue_jobs(database, 5)
    with failing_after_the_claim(database, source):
        result = await run(unstuck, nothing, drain=True)
    assert (result.claimed, result.spooled, result.requeued) == (5, 2, 3)


@pytest.mark.parametrize("drain", ["loop", "sweep"])
async def test_what_cannot_even_be_given_back_is_spooled_and_given_back_later(
    database: Database, tmp_path: Path, drain: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"breaker_failures": 1, "breaker_reset_seconds": 0}
    unstuck, _ = await start_unreliable(impatient(database), tmp_path, settings=settings)
    jobs = await queue_jobs(database, 4)
    async with outage(database) as begin:

        async def work(item_id: int, session: AsyncSession) -> None:
            await begin()

        result = await run(unstuck, work, order_by_column=Job.id)
    assert (result.claimed, result.spooled, result.breaker_open) == (4, 4, True)
    assert sorted(alerts(caplog)) == [alert(job) for job in jobs]
    spooled = [(e.outcome, e.cause) for e in await read_spool(database, unstuck.settings)]
    assert spooled[:2] == [("completed", None), ("failed", "no_session")]
    assert spooled[2:] == [("returned", "no_session")] * 2
    await (unstuck.sweep() if drain == "sweep" else run(unstuck, nothing))
    for job in jobs[2:]:
        assert (await get_job(database, job)).status is Status.Queued
        assert await recall(database, job) is None
        assert (str(job), "returned", "no_session", "requeued") in await read_ledger(database)
    assert await read_claims(database) == []


@asynccontextmanager
async def failover(database: Database) -> AsyncIterator[Begin]:
    """Gives what makes the database read-only, as a replica is; it ends with the block."""
    apart = Database(database.url)
    name = database.engine.url.database

    async def begin() -> None:
        await apart.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        kill = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        mine = "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        await apart.execute(kill + mine)

    try:
        yield begin
    finally:
        await apart.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await apart.dispose()


async def test_sessions_that_can_be_had_but_not_written_in_open_it_as_well(
    postgres: Database, tmp_path: Path
) -> None:
    witness = Witness()
    unstuck, _ = await start_unreliable(
        postgres, tmp_path, settings=TWO_FAILURES, observers=[witness]
    )
    await queue_jobs(postgres, 6)
    async with failover(postgres) as begin:

        async def work(item_id: int, session: AsyncSession) -> None:
            await begin()

        result = await run(unstuck, work, order_by_column=Job.id)
    assert result.spooled == 6
    assert len(witness.heard("on_session_failed")) == 2
    spooled = [entry.outcome for entry in await read_spool(postgres, unstuck.settings)]
    assert spooled == ["completed", *["failed"] * 2, *["returned"] * 3]
