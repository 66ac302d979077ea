"""One heart a process beats for all its claims, whatever blocks; and for work outside the loop."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Engine, delete, event
from sqlalchemy.ext.asyncio import AsyncSession

import unstuck as library
from tests.database import Database
from tests.interleaving import until
from tests.jobs import Job, Status, add_job, ago, get_job, start
from tests.looping import age_claims, queue_job, queue_jobs, read_claims, read_ledger, run
from unstuck import Claim, ClaimLost, Unstuck, UnstuckError, configure
from unstuck.tables import claims

BRISK = {"heartbeat_interval_seconds": 0.1}


@contextmanager
def beats() -> Iterator[list[float]]:
    """The moments at which a beat was sent, from whatever engine."""
    seen: list[float] = []

    def on_execute(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "UPDATE zombie_claims SET heartbeat_at" in statement and "started_at" not in statement:
            seen.append(time.monotonic())

    event.listen(Engine, "before_cursor_execute", on_execute)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", on_execute)


async def beaten_since(database: Database, earlier: list[Any]) -> bool:
    now = await read_claims(database)
    before = {claim.token: claim.heartbeat_at or claim.claimed_at for claim in earlier}
    return all(
        claim.heartbeat_at is not None and claim.heartbeat_at > before[claim.token]
        for claim in now
        if claim.token in before
    )


async def lose_claims(database: Database) -> None:
    async with database.engine.begin() as connection:
        await connection.execute(delete(claims))


async def test_one_statement_beats_for_all_claims_of_a_process(database: Database) -> None:
    unstuck = await start(database, settings=BRISK)
    await queue_jobs(database, 20)
    looks: list[list[Any]] = []

    async def work(item_id: int, session: AsyncSession) -> None:
        if looks:
            return
        looks.append(await read_claims(database))
        for _ in range(3):

            async def all_beaten() -> bool:
                return await beaten_since(database, looks[-1])

            await until(all_beaten)
            looks.append(await read_claims(database))

    with beats() as sent:
        await run(unstuck, work, batch_size=20, concurrency=2)
    assert len(looks[0]) == 20
    assert 3 <= len(sent) <= 12  # and not 20 for each beat


async def test_a_beat_is_sent_an_interval_after_the_last(database: Database) -> None:
    unstuck = await start(database, settings={"heartbeat_interval_seconds": 0.3})
    await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        async def enough() -> bool:
            return len(sent) >= 4

        await until(enough)

    with beats() as sent:
        await run(unstuck, work)
    pauses = [later - earlier for earlier, later in pairwise(sent)]
    assert min(pauses) > 0.25


async def test_nothing_beats_when_nothing_is_claimed(database: Database) -> None:
    unstuck = await start(database, settings=BRISK)
    await queue_job(database)
    await run(unstuck, lambda item_id, session: None)

    async def no_thread() -> bool:
        return not any(thread.name == "unstuck-lifeline" for thread in threading.enumerate())

    await until(no_thread)


@pytest.mark.parametrize("how", ["sleeps", "computes"])
async def test_it_beats_while_the_event_loop_is_blocked(database: Database, how: str) -> None:
    unstuck = await start(database, settings=BRISK)
    await queue_job(database)
    before: list[Any] = []

    async def work(item_id: int, session: AsyncSession) -> None:
        before.extend(await read_claims(database))
        enough = time.monotonic() + 10
        while len(sent) < 3 and time.monotonic() < enough:
            if how == "sleeps":
                time.sleep(0.01)  # noqa: ASYNC251 - this is what must not matter
            else:
                sum(range(10_000))
        assert len(sent) >= 3
        assert await beaten_since(database, before)

    with beats() as sent:
        assert (await run(unstuck, work)).completed == 1


async def test_a_worker_whose_claim_was_taken_is_stopped(database: Database) -> None:
    unstuck = await start(database, settings=BRISK)
    lost, well = await queue_jobs(database, 2)
    was_stopped = False

    async def work(item_id: int, session: AsyncSession) -> None:
        nonlocal was_stopped
        if item_id == well:
            return
        earlier = await read_claims(database)

        async def seen() -> bool:
            return await beaten_since(database, earlier)

        await until(seen)
        async with database.engine.begin() as connection:
            mine = claims.c.record_id == str(lost)
            await connection.execute(delete(claims).where(mine))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_stopped = True
            raise

    result = await run(unstuck, work, order_by_column=Job.id)
    assert was_stopped
    assert (result.lost, result.completed) == (1, 1)
    kinds = [kind for record, kind, *_ in await read_ledger(database) if record == str(lost)]
    assert kinds == ["late_beat", "late_finish"]


async def test_a_claim_that_was_lost_before_its_work_began_is_a_late_start(
    database: Database,
) -> None:
    prepared = await start(database, settings=BRISK)
    job = await queue_job(database)
    asked = 0

    async def get_session() -> AsyncSession:
        """The claim's at once; the item's only when the claim was lost, and that is known."""
        nonlocal asked
        asked += 1
        if asked == 2:
            earlier = await read_claims(database)

            async def seen() -> bool:
                return await beaten_since(database, earlier)

            await until(seen)
            await lose_claims(database)
            await asyncio.Event().wait()
        return database.sessions()

    unstuck = Unstuck(get_session, prepared.settings, prepared.registry)
    assert (await run(unstuck, lambda item_id, session: None)).lost == 1
    kinds = [kind for record, kind, *_ in await read_ledger(database) if record == str(job)]
    assert kinds == ["late_beat", "late_start"]


async def test_missed_beats_are_made_up_for(
    postgres: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start(postgres, settings={**BRISK, "lock_timeout_seconds": 0.1})
    await queue_job(postgres)

    async def work(item_id: int, session: AsyncSession) -> None:
        async with postgres.engine.begin() as connection:
            await connection.exec_driver_sql("LOCK TABLE zombie_claims IN ACCESS EXCLUSIVE MODE")

            async def has_failed() -> bool:
                return "The heartbeat of 1 claims failed" in caplog.text

            await until(has_failed)

        async def goes_on() -> bool:
            return "The heartbeat goes on after" in caplog.text

        await until(goes_on)

    assert (await run(unstuck, work)).completed == 1


async def test_a_claim_that_its_own_worker_has_locked_is_not_taken_for_lost(
    postgres: Database,
) -> None:
    unstuck = await start(postgres, settings=BRISK)
    await queue_jobs(postgres, 2)

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        await claim.checkpoint({"n": 1}, session=session)  # and so the claim's row is locked
        count = len(sent)

        async def some_beats() -> bool:
            return len(sent) >= count + 3

        await until(some_beats)

    with beats() as sent:
        assert (await run(unstuck, work)).completed == 2


async def test_a_threshold_too_near_to_the_interval_is_refused(database: Database) -> None:
    unstuck = await start(database, settings={"heartbeat_interval_seconds": 30}, threshold=60)
    with pytest.raises(library.RegistrationError, match="at least 3 x ZOMBIE_HEARTBEAT"):
        await run(unstuck, lambda item_id, session: None)


async def test_outside_the_loop_a_record_counts_as_alive(database: Database) -> None:
    unstuck = await start(database, settings=BRISK)
    job = await add_job(database, updated_at=ago(7200))  # in Processing, silent for two hours
    async with unstuck.heartbeat("jobs", job, step="download", details={"url": "x"}) as claim:
        (kept,) = await read_claims(database)
        assert (kept.step, kept.details, kept.token) == ("download", {"url": "x"}, claim.token)
        assert (await unstuck.sweep()).found == 0
        await claim.checkpoint({"url": "y"}, step="parse")
        (kept,) = await read_claims(database)
        assert (kept.step, kept.details) == ("parse", {"url": "y"})

        async def is_beaten() -> bool:
            return await beaten_since(database, [kept])

        await until(is_beaten)
    assert await read_claims(database) == []
    assert (await unstuck.sweep()).found == 1


async def test_who_dies_inside_is_found_by_the_missing_beat(database: Database) -> None:
    unstuck = await start(database)
    job = await add_job(database, updated_at=ago(0))
    beating = unstuck.heartbeat("jobs", job)
    await beating.__aenter__()  # and never leaves
    await age_claims(database)
    assert (await unstuck.sweep()).found == 1
    assert [cause for _, _, cause, _ in await read_ledger(database)] == ["lost_heartbeat"]
    assert (await get_job(database, job)).status is Status.Queued
    with pytest.raises(ClaimLost):
        await beating.__aexit__(None, None, None)


async def test_a_second_worker_is_refused_while_the_first_lives(database: Database) -> None:
    unstuck = await start(database)
    job = await add_job(database)
    first = unstuck.heartbeat("jobs", job, worker_id="first")
    second = unstuck.heartbeat("jobs", job, worker_id="second")
    await first.__aenter__()
    with pytest.raises(ClaimLost):
        await second.__aenter__()
    assert [claim.worker_id for claim in await read_claims(database)] == ["first"]
    await age_claims(database)
    async with second:
        assert [claim.worker_id for claim in await read_claims(database)] == ["second"]
        with pytest.raises(ClaimLost):
            await first.__aexit__(None, None, None)


async def test_a_beat_that_came_too_late_ends_the_block(database: Database) -> None:
    unstuck = await start(database, settings=BRISK)
    job = await add_job(database)

    async def work() -> None:
        async with unstuck.heartbeat("jobs", job):
            earlier = await read_claims(database)

            async def seen() -> bool:
                return await beaten_since(database, earlier)

            await until(seen)
            await lose_claims(database)
            await asyncio.Event().wait()

    with pytest.raises(ClaimLost):
        await work()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert [kind for _, kind, *_ in await read_ledger(database)] == ["late_beat"]


async def test_a_block_that_ends_too_late_says_so(database: Database) -> None:
    unstuck = await start(database)
    job = await add_job(database)
    with pytest.raises(ClaimLost):
        async with unstuck.heartbeat("jobs", job):
            await lose_claims(database)
    assert [kind for _, kind, *_ in await read_ledger(database)] == ["late_finish"]


async def test_an_error_inside_is_the_blocks_own(database: Database) -> None:
    unstuck = await start(database)
    job = await add_job(database)
    with pytest.raises(ValueError, match="mine"):
        async with unstuck.heartbeat("jobs", job):
            raise ValueError("mine")
    assert await read_claims(database) == []


async def test_a_thread_with_a_loop_of_its_own_beats_as_well(database: Database) -> None:
    """As a Celery task would: sync code, and nothing but `asyncio.run` around it."""
    prepared = await start(database, settings=BRISK)
    job = await add_job(database)
    configure(database.sessions, prepared.settings, prepared.registry)

    def task() -> int:
        async def work() -> int:
            async with library.heartbeat("jobs", job):
                enough = time.monotonic() + 10
                while len(sent) < 3 and time.monotonic() < enough:
                    time.sleep(0.01)  # noqa: ASYNC251 - sync code blocks
                return len(sent)

        return asyncio.run(work())

    with beats() as sent:
        assert await asyncio.to_thread(task) >= 3
    assert await read_claims(database) == []


async def test_an_unknown_workflow_or_record_is_told(database: Database) -> None:
    unstuck = await start(database)
    with pytest.raises(UnstuckError, match="No workflow is named 'job'"):
        unstuck.heartbeat("job", 1)
    with pytest.raises(UnstuckError, match="is not a key of Job"):
        unstuck.heartbeat("jobs", "one")
