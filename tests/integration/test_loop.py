"""The job loop on every database: what is claimed comes to an end."""

from sqlalchemy import asc
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.jobs import Job, Status, ago, get_job, start
from tests.looping import queue_job, read_claims, read_ledger, run


async def nothing(item_id: int, session: AsyncSession) -> None:
    """The least that a processing function can do."""


async def test_a_function_that_sets_nothing_leaves_its_record_completed(database: Database) -> None:
    unstuck = await start(database)
    job = await queue_job(database, error="of the attempt before")
    result = await run(unstuck, nothing)
    assert (result.claimed, result.completed) == (1, 1)
    done = await get_job(database, job)
    assert (done.status, done.error) == (Status.Completed, None)
    assert await read_claims(database) == []
    assert await read_ledger(database) == [(str(job), "attempt", None, "completed")]


async def test_work_that_was_left_open_is_committed_with_the_end(database: Database) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        found = await session.get(Job, item_id)
        assert found is not None
        found.zombie_count = 7

    await run(unstuck, work)
    done = await get_job(database, job)
    assert (done.status, done.zombie_count) == (Status.Completed, 7)


async def test_a_function_that_raises_leaves_its_record_failed_and_its_work_undone(
    database: Database,
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        found = await session.get(Job, item_id)
        assert found is not None
        found.zombie_count = 7
        await session.flush()
        raise ValueError("no such page")

    result = await run(unstuck, work)
    done = await get_job(database, job)
    assert result.failed == 1
    assert (done.status, done.error, done.zombie_count) == (Status.Failed, "no such page", 0)
    assert await read_ledger(database) == [(str(job), "attempt", None, "failed")]


async def test_the_order_that_was_asked_for_is_kept(database: Database) -> None:
    unstuck = await start(database)
    ages = [30, 90, 60]
    jobs = [await queue_job(database, updated_at=ago(age)) for age in ages]
    seen: list[int] = []

    async def work(item_id: int, session: AsyncSession) -> None:
        seen.append(item_id)

    await run(unstuck, work, order_by_column=asc(Job.updated_at))
    assert seen == [jobs[1], jobs[2], jobs[0]]
