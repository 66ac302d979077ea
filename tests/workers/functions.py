"""Processing functions, as applications write them. Each leaves one effect for its job."""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Column, Integer, MetaData, Table, insert
from sqlalchemy.ext.asyncio import AsyncSession

from tests.jobs import Job, Status
from tests.workers.wire import say
from unstuck import Claim

metadata = MetaData()

effects = Table(
    "effects",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("job_id", Integer, nullable=False),
    Column("process_id", Integer, nullable=False),
)

# What blocks the event loop, blocks it for this long.
BLOCKED_SECONDS = 7.5


def effect_of(job_id: int) -> Any:
    return insert(effects).values(job_id=job_id, process_id=os.getpid())


async def leave_the_commit(job_id: int, session: AsyncSession) -> None:
    await session.execute(effect_of(job_id))


async def commit_the_session(job_id: int, session: AsyncSession) -> None:
    await session.execute(effect_of(job_id))
    await session.commit()


async def begin_and_commit(job_id: int, session: AsyncSession) -> None:
    async with session.begin():
        await session.execute(effect_of(job_id))


async def commit_the_connection(job_id: int, session: AsyncSession) -> None:
    connection = await session.connection()
    await connection.execute(effect_of(job_id))
    await connection.commit()


async def complete_by_itself(job_id: int, session: AsyncSession) -> None:
    job = await session.get_one(Job, job_id)
    await session.execute(effect_of(job_id))
    job.status = Status.Completed
    await session.commit()


async def work_and_raise(job_id: int, session: AsyncSession) -> None:
    await session.execute(effect_of(job_id))
    raise ValueError("no such page")


async def checkpoint_with_the_work(job_id: int, session: AsyncSession, claim: Claim) -> None:
    """Commits its work before its end, and with it that it is done."""
    if "worked" not in claim.details:
        await session.execute(effect_of(job_id))
        await claim.checkpoint({"worked": True}, session=session)
        await session.commit()


async def checkpoint_apart(job_id: int, session: AsyncSession, claim: Claim) -> None:
    pages = claim.details.get("pages", 0) + 1
    await claim.checkpoint({"pages": pages})
    await session.execute(effect_of(job_id))


async def stay(job_id: int, session: AsyncSession) -> None:
    """Comes to no end by itself."""
    say(at=job_id)
    await asyncio.Event().wait()


async def stay_from_the_second(job_id: int, session: AsyncSession) -> None:
    if job_id > 1:
        await stay(job_id, session)
    await session.execute(effect_of(job_id))


async def stay_in_a_transaction(job_id: int, session: AsyncSession) -> None:
    """With a connection of the pool, and on PostgreSQL with work in it that is not committed."""
    if (await session.connection()).dialect.name == "postgresql":
        await session.execute(effect_of(job_id))
    await stay(job_id, session)


async def charge_a_card(job_id: int, session: AsyncSession, claim: Claim) -> None:
    async with claim.effect("charge card"):
        await stay(job_id, session)


async def sleep_on_the_loop(job_id: int, session: AsyncSession) -> None:
    say(at=job_id)
    time.sleep(BLOCKED_SECONDS)  # noqa: ASYNC251 - that is what it is for
    await session.execute(effect_of(job_id))


async def compute_on_the_loop(job_id: int, session: AsyncSession) -> None:
    say(at=job_id)
    end = time.monotonic() + BLOCKED_SECONDS
    while time.monotonic() < end:
        sum(range(1000))
    await session.execute(effect_of(job_id))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        leave_the_commit,
        commit_the_session,
        begin_and_commit,
        commit_the_connection,
        complete_by_itself,
        work_and_raise,
        checkpoint_with_the_work,
        checkpoint_apart,
        stay,
        stay_from_the_second,
        stay_in_a_transaction,
        charge_a_card,
        sleep_on_the_loop,
        compute_on_the_loop,
    )
}
