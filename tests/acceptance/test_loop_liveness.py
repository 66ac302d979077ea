"""What lives is left alone: workers that block their event loop, and many loops on one table."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from tests.conftest import POSTGRES
from tests.database import Database
from tests.jobs import Status, add_claim, ago, change
from tests.lookup import count_claims
from tests.looping import run
from tests.workers.aftermath import age, prepare, read_effects, read_statuses, read_story
from tests.workers.functions import BLOCKED_SECONDS, FUNCTIONS
from tests.workers.launching import launch
from tests.workers.orders import PREPARE, WORK, Orders, Step

everywhere = pytest.mark.parametrize("database", [POSTGRES[-1], "sqlite"], indirect=True)

THRESHOLD = BLOCKED_SECONDS / 3
JOBS = 300


@everywhere
async def test_a_function_that_blocks_its_event_loop_is_not_taken_for_dead(
    database: Database, tmp_path: Path
) -> None:
    """Though a sweep runs beside it all the time, and takes a job whose worker is dead indeed."""
    policy = {"threshold": THRESHOLD}
    unstuck = await prepare(database, 3, **policy)
    await change(database, 3, status=Status.Processing)
    functions = ("sleep_on_the_loop", "compute_on_the_loop")
    async with AsyncExitStack() as stack:
        workers = []
        for job, function in enumerate(functions, start=1):
            orders = Orders(database.url, function, policy=policy, call={"batch_size": 1})
            worker = await stack.enter_async_context(launch(orders, tmp_path))
            assert await worker.hear() == {"at": job}
            workers.append(worker)
        await add_claim(database, 3, token=uuid4(), claimed_at=ago(0), started_at=ago(0))
        results = asyncio.gather(*(worker.result() for worker in workers))
        while not results.done():
            assert (await unstuck.sweep()).errors == []
            await asyncio.wait([results], timeout=0.05)
    for result in results.result():
        assert (result["completed"], result["lost"]) == (1, 0)
        assert result["seconds"] > 3 * THRESHOLD
    assert await read_statuses(database) == {
        1: Status.Completed,
        2: Status.Completed,
        3: Status.Queued,
    }
    assert await read_story(database, 1) == [("attempt", None, "completed")]
    assert await read_story(database, 2) == [("attempt", None, "completed")]
    assert await read_story(database, 3) == [("zombie", "lost_heartbeat", "requeued")]
    assert sorted(await read_effects(database)) == [1, 2]


@everywhere
async def test_many_loops_at_once_do_each_job_once_though_one_of_them_is_killed(
    database: Database, tmp_path: Path
) -> None:
    unstuck = await prepare(database, JOBS)
    patient = {"connect_args": {"timeout": 60}}  # SQLite has one writer at a time
    call = {"concurrency": 3, "drain": True}
    amid = Step("before statement", WORK, 25)
    before_it_claims = Step("before statement", PREPARE[database.dialect])
    async with AsyncExitStack() as stack:
        workers = []
        for step in (amid, *[before_it_claims] * 3):
            orders = Orders(
                database.url, "leave_the_commit", step, "freeze", engine=patient, call=call
            )
            workers.append(await stack.enter_async_context(launch(orders, tmp_path)))
        for worker in workers:
            await worker.until_frozen()
        killed, *others = workers
        for worker in others:
            worker.thaw()
        killed.kill()
        results = await asyncio.gather(*(worker.result() for worker in others))
    assert [result["claimed"] > 0 for result in results] == [True] * 3
    done = sum(result["completed"] for result in results)
    assert done == sum(result["claimed"] for result in results)
    assert await count_claims(database) > 0
    await age(database)
    assert (await unstuck.sweep()).errors == []
    await run(unstuck, FUNCTIONS["leave_the_commit"], drain=True)
    statuses = await read_statuses(database)
    assert statuses == dict.fromkeys(range(1, JOBS + 1), Status.Completed)
    assert await read_effects(database) == sorted(statuses)
