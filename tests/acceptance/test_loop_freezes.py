"""Workers that stand still for so long that they count as dead, and then go on: not a byte of
theirs is written, and what their successor did stands."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from tests.conftest import POSTGRES
from tests.database import Database
from tests.interleaving import until
from tests.jobs import Status, get_job
from tests.lookup import count_claims
from tests.looping import run
from tests.workers.aftermath import age, prepare, read_story
from tests.workers.functions import effect_of, effects
from tests.workers.launching import Worker, launch
from tests.workers.orders import (
    BEAT,
    CHECKPOINT,
    CLAIM,
    EFFECT,
    END,
    GUARD,
    MOVE,
    START,
    WORK,
    Orders,
    Step,
)
from unstuck import Unstuck

everywhere = pytest.mark.parametrize("database", [POSTGRES[-1], "sqlite"], indirect=True)
on_postgres = pytest.mark.parametrize("postgres", POSTGRES[-1:], indirect=True)

# Where its successor is when the frozen worker goes on.
Progress = Literal["at work", "done"]


@asynccontextmanager
async def succeeded(unstuck: Unstuck, progress: Progress) -> AsyncIterator[None]:
    """Inside, another worker has taken up the job; after it, that one has done it."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def work(job_id: int, session: AsyncSession) -> None:
        begun.set()
        await may_end.wait()
        await session.execute(effect_of(job_id))

    loop = asyncio.create_task(run(unstuck, work))
    await begun.wait()
    if progress == "done":
        may_end.set()
        await loop
    try:
        yield
    finally:
        may_end.set()
        result = await loop
    assert result.completed == 1


async def read_effects(database: Database) -> list[tuple[int, int]]:
    """(job, process) of each."""
    async with database.engine.connect() as connection:
        rows = await connection.execute(select(effects.c.job_id, effects.c.process_id))
        return [tuple(row) for row in rows]


async def go_on_too_late(
    worker: Worker, database: Database, unstuck: Unstuck, progress: Progress
) -> dict[str, Any]:
    """A frozen worker is given up, succeeded, and goes on to its end; what its loop says then."""
    await age(database)
    report = await unstuck.sweep()
    assert (report.found, report.total("requeued")) == (1, 1)
    async with succeeded(unstuck, progress):
        worker.thaw()
        result = await worker.result()
        status = (await get_job(database, 1)).status
        assert status is (Status.Completed if progress == "done" else Status.Processing)
    return result


_LATE = ("late_beat", "late_start", "late_finish", "late_failure")
_STOPPED = ["late_beat", "late_finish"]


async def check_that_the_successor_stands(database: Database, *late: str) -> None:
    job = await get_job(database, 1)
    assert (job.status, job.error) == (Status.Completed, None)
    assert await read_effects(database) == [(1, os.getpid())]
    told = Counter(kind for kind, _, _ in await read_story(database, 1))
    assert told - Counter(_LATE) == Counter(["zombie", "attempt", "recovered"])
    # Its heart may come first: then it is stopped, and comes to no other end.
    lateness = sorted((told & Counter(_LATE)).elements())
    assert lateness in (sorted(late), sorted({"late_beat", *late}), _STOPPED)
    assert await count_claims(database) == 0


# Where it is frozen on PostgreSQL: with its work in an open transaction. On SQLite, where nobody
# else could write beside that, it is frozen just before.
BEFORE_THE_GUARD = Step("before statement", GUARD)
BEFORE_THE_END = Step("before statement", MOVE, 2)
BEFORE_THE_WORK = Step("before statement", WORK)


@everywhere
@pytest.mark.parametrize(
    ("function", "step", "late", "progress"),
    [
        ("commit_the_session", BEFORE_THE_GUARD, "late_finish", "at work"),
        ("begin_and_commit", BEFORE_THE_GUARD, "late_finish", "at work"),
        ("commit_the_connection", BEFORE_THE_GUARD, "late_finish", "at work"),
        ("complete_by_itself", BEFORE_THE_WORK, "late_finish", "at work"),
        ("complete_by_itself", BEFORE_THE_WORK, "late_finish", "done"),
        ("leave_the_commit", BEFORE_THE_END, "late_finish", "at work"),
        ("leave_the_commit", BEFORE_THE_END, "late_finish", "done"),
        ("work_and_raise", BEFORE_THE_END, "late_failure", "at work"),
        ("work_and_raise", BEFORE_THE_END, "late_failure", "done"),
    ],
    ids=str,
)
async def test_a_worker_that_was_frozen_writes_nothing_and_its_successor_stands(
    database: Database, tmp_path: Path, function: str, step: Step, late: str, progress: Progress
) -> None:
    unstuck = await prepare(database, 1)
    step = step if database.dialect == "postgresql" else BEFORE_THE_WORK
    async with launch(Orders(database.url, function, step, "freeze"), tmp_path) as worker:
        await worker.until_frozen()
        result = await go_on_too_late(worker, database, unstuck, progress)
    assert (result["lost"], result["completed"], result["failed"]) == (1, 0, 0)
    await check_that_the_successor_stands(database, late)


@on_postgres
@pytest.mark.parametrize(
    ("function", "step"),
    [
        ("complete_by_itself", Step("before statement", GUARD)),  # has written its record
        ("commit_the_session", Step("before commit", WORK)),  # has passed its fence
        ("leave_the_commit", Step("before commit", END)),  # has ended its claim
    ],
    ids=str,
)
async def test_a_frozen_worker_that_is_past_its_fence_keeps_its_record_and_ends_it(
    postgres: Database, tmp_path: Path, function: str, step: Step
) -> None:
    """Its locks speak for it, however long it stands still."""
    policy = {"threshold": 1}
    unstuck = await prepare(postgres, 1, **policy)
    async with launch(
        Orders(postgres.url, function, step, "freeze", policy=policy), tmp_path
    ) as worker:
        await worker.until_frozen()

        async def is_stale() -> bool:
            report = await unstuck.sweep()
            assert (report.errors, report.left_processing) == ([], 0)
            return report.total("locked") == 1

        await until(is_stale)
        worker.thaw()
        result = await worker.result()
        assert await read_effects(postgres) == [(1, worker.pid)]
    assert (result["completed"], result["lost"]) == (1, 0)
    assert (await get_job(postgres, 1)).status is Status.Completed
    assert await read_story(postgres, 1) == [("attempt", None, "completed")]


@everywhere
async def test_a_job_whose_claim_was_lost_before_it_began_is_not_begun(
    database: Database, tmp_path: Path
) -> None:
    unstuck = await prepare(database, 1)
    orders = Orders(database.url, "leave_the_commit", Step("after commit", CLAIM), "freeze")
    async with launch(orders, tmp_path) as worker:
        await worker.until_frozen()
        result = await go_on_too_late(worker, database, unstuck, "at work")
    assert (result["claimed"], result["lost"]) == (1, 1)
    await check_that_the_successor_stands(database, "late_start")


@on_postgres
@pytest.mark.parametrize(
    ("function", "words"), [("checkpoint_apart", CHECKPOINT), ("charge_a_card", EFFECT)]
)
async def test_a_worker_that_was_frozen_neither_checkpoints_nor_begins_a_side_effect(
    postgres: Database, tmp_path: Path, function: str, words: str
) -> None:
    """Its function is told by a `ClaimLost`: the one with the side effect would else not end."""
    unstuck = await prepare(postgres, 1)
    orders = Orders(postgres.url, function, Step("before statement", words), "freeze")
    async with launch(orders, tmp_path) as worker:
        await worker.until_frozen()
        result = await go_on_too_late(worker, postgres, unstuck, "at work")
    assert result["lost"] == 1
    await check_that_the_successor_stands(postgres, "late_finish")


@everywhere
@pytest.mark.parametrize("words", [START, BEAT])
async def test_a_worker_that_really_sleeps_past_its_threshold_is_stopped_by_its_heart(
    database: Database, tmp_path: Path, words: str
) -> None:
    """Its function would never come to an end by itself."""
    policy = {"threshold": 1.5}
    unstuck = await prepare(database, 1, **policy)
    orders = Orders(database.url, "stay", Step("after commit", words), "freeze", policy=policy)
    async with launch(orders, tmp_path) as worker:
        await worker.until_frozen()

        async def is_given_up() -> bool:
            return (await unstuck.sweep()).left_processing == 1

        await until(is_given_up)
        async with succeeded(unstuck, "at work"):
            worker.thaw()
            result = await worker.result()
    assert (result["lost"], result["completed"]) == (1, 0)
    await check_that_the_successor_stands(database, "late_beat", "late_finish")
