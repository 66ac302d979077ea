"""What an attempt says of its progress is there for the next; a side effect begun is evidence."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import delete, update
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.jobs import Job, Status, get_job, start
from tests.lookup import recall
from tests.looping import age_claims, queue_job, read_claims, read_ledger, run
from unstuck import Claim, ClaimLost, Unstuck, UnstuckError
from unstuck.tables import claims

Work = Callable[[int, AsyncSession, Claim], Awaitable[None]]


async def die_in(database: Database, unstuck: Unstuck, work: Work) -> None:
    """The worker does that, and is never heard of again; a sweep finds its record."""
    reached, never = asyncio.Event(), asyncio.Event()

    async def die(item_id: int, session: AsyncSession, claim: Claim) -> None:
        async def dying() -> None:
            reached.set()
            await never.wait()

        claim.die = dying  # type: ignore[attr-defined]
        await work(item_id, session, claim)

    task = asyncio.create_task(run(unstuck, die))
    await reached.wait()
    await age_claims(database)
    report = await unstuck.sweep()
    assert report.found == 1
    assert report.errors == []
    never.set()
    assert (await task).lost == 1


async def next_details(unstuck: Unstuck) -> dict[str, Any]:
    """What the next attempt finds."""
    found: list[dict[str, Any]] = []

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        found.append(claim.details)

    assert (await run(unstuck, work)).completed == 1
    return found[0]


async def test_the_first_attempt_finds_nothing(database: Database) -> None:
    unstuck = await start(database)
    await queue_job(database)
    assert await next_details(unstuck) == {}


async def test_after_a_crash_the_next_attempt_finds_the_checkpoint(database: Database) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession, claim: Any) -> None:
        await claim.checkpoint({"page": 1})
        await claim.checkpoint({"page": 2}, step="download")
        assert claim.details == {"page": 2}
        (kept,) = await read_claims(database)
        assert (kept.details, kept.step) == ({"page": 2}, "download")
        await claim.die()

    await die_in(database, unstuck, work)
    assert await next_details(unstuck) == {"page": 2}
    assert await recall(database, job) is None  # done, and forgotten


async def test_a_crash_before_the_next_checkpoint_keeps_the_last(database: Database) -> None:
    unstuck = await start(database, settings={"backoff_base_seconds": 0})
    await queue_job(database)

    async def work(item_id: int, session: AsyncSession, claim: Any) -> None:
        await claim.checkpoint({"page": 2})
        await claim.die()

    async def die_at_once(item_id: int, session: AsyncSession, claim: Any) -> None:
        assert claim.details == {"page": 2}
        await claim.die()

    await die_in(database, unstuck, work)
    await die_in(database, unstuck, die_at_once)
    assert await next_details(unstuck) == {"page": 2}


async def test_a_checkpoint_in_the_session_is_committed_with_its_work_or_not_at_all(
    database: Database,
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession, claim: Any) -> None:
        await session.execute(update(Job).values(zombie_count=1))
        await claim.checkpoint({"rows": 1}, session=session)
        await session.commit()
        await session.execute(update(Job).values(zombie_count=2))
        await claim.checkpoint({"rows": 2}, session=session)
        await session.rollback()
        await claim.die()

    await die_in(database, unstuck, work)
    assert await next_details(unstuck) == {"rows": 1}
    assert (await get_job(database, job)).zombie_count == 1


async def test_a_deploy_keeps_the_checkpoint_too(database: Database) -> None:
    unstuck = await start(database)
    await queue_job(database)
    inside = asyncio.Event()

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        await claim.checkpoint({"page": 2})
        inside.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run(unstuck, work))
    await inside.wait()
    task.cancel()
    await asyncio.wait({task})
    assert await next_details(unstuck) == {"page": 2}


async def test_a_custom_recovery_is_told_the_checkpoint(database: Database) -> None:
    told: list[Any] = []

    async def recover(zombie: Any, session: AsyncSession) -> None:
        told.append(zombie.details)

    unstuck = await start(database, recover=recover)
    await queue_job(database)

    async def work(item_id: int, session: AsyncSession, claim: Any) -> None:
        await claim.checkpoint({"charged": True})
        await claim.die()

    await die_in(database, unstuck, work)
    assert told == [{"charged": True}]
    assert await next_details(unstuck) == {"charged": True}


@pytest.mark.parametrize("has_status", [True, False], ids=["held status", "held mark"])
async def test_a_record_that_died_inside_a_side_effect_is_held_with_that_evidence(
    database: Database, has_status: bool
) -> None:
    unstuck = await start(database, held=Status.Held if has_status else None)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession, claim: Any) -> None:
        await claim.checkpoint({"order": 17})
        async with claim.effect("charge card"):
            await claim.die()

    await die_in(database, unstuck, work)
    left = await get_job(database, job)
    assert left.status is (Status.Held if has_status else Status.Processing)
    kept = await recall(database, job)
    assert kept is not None
    evidence = "the side effect 'charge card' had begun and was not seen to end"
    assert evidence in kept.held_reason
    await unstuck.release("jobs", job, by="ada", why="it was not charged")
    assert await next_details(unstuck) == {"order": 17}


async def test_a_side_effect_that_ended_holds_nothing(database: Database) -> None:
    unstuck = await start(database, held=Status.Held)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession, claim: Any) -> None:
        async with claim.effect("charge card"):
            (kept,) = await read_claims(database)
            assert kept.effect == "charge card"
        await claim.die()

    await die_in(database, unstuck, work)
    assert (await get_job(database, job)).status is Status.Queued


async def test_a_side_effect_that_raised_may_have_happened(database: Database) -> None:
    unstuck = await start(database, held=Status.Held)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession, claim: Any) -> None:
        with pytest.raises(TimeoutError):
            async with claim.effect("charge card"):
                raise TimeoutError
        await claim.die()

    await die_in(database, unstuck, work)
    assert (await get_job(database, job)).status is Status.Held


async def test_whoever_lost_the_claim_can_neither_checkpoint_nor_begin_an_effect(
    database: Database,
) -> None:
    unstuck = await start(database)
    await queue_job(database)

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        async with database.engine.begin() as connection:
            await connection.execute(delete(claims))
        with pytest.raises(ClaimLost):
            await claim.checkpoint({"page": 1})
        with pytest.raises(ClaimLost):
            async with claim.effect("charge card"):
                raise AssertionError("unreachable")
        with pytest.raises(ClaimLost):
            await claim.checkpoint({"page": 1}, session=session)

    assert (await run(unstuck, work)).lost == 1
    assert [kind for _, kind, *_ in await read_ledger(database)] == ["late_finish"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_on_sqlite_a_session_that_writes_is_told_to_commit_first(
    database: Database,
) -> None:
    unstuck = await start(database)
    await queue_job(database)

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        await session.execute(update(Job).values(zombie_count=1))
        with pytest.raises(UnstuckError, match="SQLite has one writer at a time"):
            await claim.checkpoint({"page": 1})
        await claim.checkpoint({"page": 1}, session=session)

    assert (await run(unstuck, work)).completed == 1
