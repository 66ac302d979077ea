"""A worker that lost its claim cannot write a byte through the session that it was given."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import delete, text, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from tests.database import Database
from tests.jobs import Job, Status, get_job, start
from tests.looping import queue_job, read_claims, read_ledger, run
from tests.session_sources import SOURCES, Source, checked_out
from unstuck import ClaimLost, Unstuck
from unstuck.tables import claims

Work = Callable[[int, AsyncSession], Awaitable[Any]]


async def write(item_id: int, session: AsyncSession) -> None:
    await session.execute(update(Job).where(Job.id == item_id).values(zombie_count=7))


async def commit(item_id: int, session: AsyncSession) -> None:
    await write(item_id, session)
    await session.commit()


async def commit_twice(item_id: int, session: AsyncSession) -> None:
    await write(item_id, session)
    try:
        await session.commit()
    except ClaimLost:
        await session.rollback()
        await write(item_id, session)
        await session.commit()


async def end_a_block(item_id: int, session: AsyncSession) -> None:
    async with session.begin():
        await write(item_id, session)


async def commit_by_the_connection(item_id: int, session: AsyncSession) -> None:
    await write(item_id, session)
    await (await session.connection()).commit()


async def flush_objects(item_id: int, session: AsyncSession) -> None:
    job = await session.get(Job, item_id)
    assert job is not None
    job.zombie_count = 7
    await session.commit()


async def commit_below_a_savepoint(item_id: int, session: AsyncSession) -> None:
    async with session.begin_nested():
        await write(item_id, session)
    await session.commit()


async def leave_it_to_the_loop(item_id: int, session: AsyncSession) -> None:
    await write(item_id, session)


async def swallow_the_refusal(item_id: int, session: AsyncSession) -> bool:
    await write(item_id, session)
    try:
        await session.commit()
    except Exception:
        return True
    return False


COMMITS: dict[str, Work] = {
    work.__name__: work
    for work in (
        commit,
        commit_twice,
        end_a_block,
        commit_by_the_connection,
        flush_objects,
        commit_below_a_savepoint,
        leave_it_to_the_loop,
        swallow_the_refusal,
    )
}


async def lose_claim(database: Database) -> None:
    """As a sweep or a human takes it away."""
    async with database.engine.begin() as connection:
        assert (await connection.execute(delete(claims))).rowcount == 1


def robbed(database: Database, work: Work) -> Work:
    """The same work, after its claim was lost."""

    async def robbed(item_id: int, session: AsyncSession) -> Any:
        await lose_claim(database)
        return await work(item_id, session)

    return robbed


@pytest.mark.parametrize("work", COMMITS.values(), ids=COMMITS)
async def test_no_commit_goes_through_once_the_claim_is_lost(
    database: Database, work: Work
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    result = await run(unstuck, robbed(database, work))
    assert (result.lost, result.completed) == (1, 0)
    left = await get_job(database, job)
    assert (left.status, left.zombie_count) == (Status.Processing, 0)
    assert await read_ledger(database) == [(str(job), "late_finish", None, None)]


@pytest.mark.parametrize("work", COMMITS.values(), ids=COMMITS)
async def test_the_same_commits_go_through_while_it_is_owned(
    database: Database, work: Work
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    result = await run(unstuck, work)
    done = await get_job(database, job)
    assert done.zombie_count == 7
    failed = work is swallow_the_refusal  # it returns False where nothing was refused
    assert done.status is (Status.Failed if failed else Status.Completed)
    assert (result.failed, result.completed) == (int(failed), int(not failed))


@pytest.mark.parametrize("work", COMMITS.values(), ids=COMMITS)
async def test_a_refused_commit_leaves_nothing_for_the_next_user_of_its_connection(
    database: Database, work: Work
) -> None:
    """The pool has one connection: whoever comes next gets the very one."""
    await start(database)
    engine = create_async_engine(database.url, pool_size=1, max_overflow=0)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    unstuck = await start(database)
    job = await queue_job(database)
    await run(unstuck, robbed(database, work), session_factory=sessions)
    assert checked_out(engine) == 0
    async with sessions.begin() as session:
        await session.execute(update(Job).where(Job.id == job).values(error="the next user's"))
    left = await get_job(database, job)
    assert (left.error, left.zombie_count) == ("the next user's", 0)
    await engine.dispose()


async def test_a_stray_task_cannot_commit_after_the_record_has_ended(database: Database) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    kept: list[AsyncSession] = []

    async def work(item_id: int, session: AsyncSession) -> None:
        kept.append(session)

    await run(unstuck, work)
    await write(job, kept[0])
    with pytest.raises(ClaimLost):
        await kept[0].commit()
    await kept[0].close()
    assert (await get_job(database, job)).zombie_count == 0


@pytest.mark.parametrize("level", ["create_engine", "execution_options"])
async def test_an_engine_in_autocommit_is_fenced_as_well(postgres: Database, level: str) -> None:
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    if level == "create_engine":
        engine = create_async_engine(postgres.url, **options)
    else:
        engine = create_async_engine(postgres.url).execution_options(**options)
    unstuck = await start(postgres)
    job = await queue_job(postgres)

    async def work(item_id: int, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        await session.commit()
        await robbed(postgres, write)(item_id, session)

    result = await run(unstuck, work, session_factory=async_sessionmaker(engine))
    assert result.lost == 1
    assert (await get_job(postgres, job)).zombie_count == 0
    await engine.dispose()


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("is_lost", [False, True], ids=["owned", "lost"])
async def test_every_form_of_sessions_is_fenced(
    database: Database, source: Source, is_lost: bool
) -> None:
    prepared = await start(database)
    unstuck = Unstuck(source(database), prepared.settings, prepared.registry)
    job = await queue_job(database)
    work = robbed(database, write) if is_lost else write
    result = await run(unstuck, work)
    assert (result.lost, result.completed) == (int(is_lost), int(not is_lost))
    done = await get_job(database, job)
    assert done.zombie_count == (0 if is_lost else 7)
    assert len(await read_claims(database)) == 0
    await unstuck.close()


async def test_a_late_failure_is_refused_and_recorded(database: Database) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        await lose_claim(database)
        raise ValueError("too late")

    result = await run(unstuck, work)
    assert result.lost == 1
    left = await get_job(database, job)
    assert (left.status, left.error) == (Status.Processing, None)
    assert await read_ledger(database) == [(str(job), "late_failure", None, None)]


async def test_a_successor_is_not_touched_by_whoever_comes_late(database: Database) -> None:
    """The same record, the same status, another token."""
    unstuck = await start(database)
    job = await queue_job(database)

    async def late(item_id: int, session: AsyncSession) -> None:
        await database.execute("UPDATE jobs SET status = 'Queued'")
        await lose_claim(database)
        assert (await run(unstuck, succeed)).completed == 1
        await commit(item_id, session)

    async def succeed(item_id: int, session: AsyncSession) -> None:
        await session.execute(update(Job).values(error="the successor's"))

    assert (await run(unstuck, late)).lost == 1
    done = await get_job(database, job)
    assert (done.status, done.error, done.zombie_count) == (
        Status.Completed,
        "the successor's",
        0,
    )
