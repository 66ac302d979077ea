"""Workers that are killed, at every step of the job loop: each record ends in its right place."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from tests.conftest import POSTGRES
from tests.database import Database
from tests.jobs import Status, ago, change, get_job
from tests.lookup import count_claims, recall
from tests.looping import run
from tests.workers.aftermath import (
    age,
    prepare,
    read_effects,
    read_statuses,
    read_story,
    read_strikes,
)
from tests.workers.functions import FUNCTIONS
from tests.workers.launching import launch, run_to_step
from tests.workers.orders import CLAIM, END, RELEASE, START, WORK, Orders, Step
from unstuck import Claim

everywhere = pytest.mark.parametrize("database", [POSTGRES[-1], "sqlite"], indirect=True)

Story = list[tuple[str, str | None, str | None]]

# What becomes of a job by the next sweep.
QUEUED: Story = []
SPARED: Story = [("zombie", "never_started", "requeued")]
STRUCK: Story = [("zombie", "lost_heartbeat", "requeued")]
DONE: Story = [("attempt", None, "completed")]
DONE_BY_ITSELF: Story = []

# (function, step, what becomes of each job of a batch of three)
LIVES = [
    ("leave_the_commit", Step("before commit", CLAIM), QUEUED, QUEUED, QUEUED),
    ("leave_the_commit", Step("after commit", CLAIM), SPARED, SPARED, SPARED),
    ("leave_the_commit", Step("before statement", START, 2), DONE, SPARED, SPARED),
    ("leave_the_commit", Step("before commit", START, 2), DONE, SPARED, SPARED),
    ("leave_the_commit", Step("after commit", START, 2), DONE, STRUCK, SPARED),
    ("leave_the_commit", Step("before statement", WORK, 2), DONE, STRUCK, SPARED),
    ("leave_the_commit", Step("before commit", END, 2), DONE, STRUCK, SPARED),
    ("leave_the_commit", Step("after commit", END, 2), DONE, DONE, SPARED),
    ("complete_by_itself", Step("before commit", WORK, 2), DONE, STRUCK, SPARED),
    ("complete_by_itself", Step("after commit", WORK, 2), DONE, DONE_BY_ITSELF, SPARED),
    ("complete_by_itself", Step("before commit", END, 2), DONE, DONE_BY_ITSELF, SPARED),
    ("checkpoint_with_the_work", Step("after commit", WORK, 2), DONE, STRUCK, SPARED),
    ("checkpoint_with_the_work", Step("before commit", END, 2), DONE, STRUCK, SPARED),
]


@everywhere
@pytest.mark.parametrize(
    ("function", "step", "one", "two", "three"),
    LIVES,
    ids=[f"{life[0]}, {life[1]}" for life in LIVES],
)
async def test_wherever_a_worker_is_killed_each_job_is_done_once(
    database: Database,
    tmp_path: Path,
    function: str,
    step: Step,
    one: Story,
    two: Story,
    three: Story,
) -> None:
    unstuck = await prepare(database, 3)
    await run_to_step(Orders(database.url, function, step), tmp_path)
    assert (await unstuck.sweep()).found == 0
    await age(database)
    assert (await unstuck.sweep()).errors == []
    for job, story in enumerate((one, two, three), start=1):
        assert await read_story(database, job) == story
    strikes = [(await read_strikes(database)).get(job, 0) for job in (1, 2, 3)]
    assert strikes == [int(story == STRUCK) for story in (one, two, three)]
    assert await count_claims(database) == 0
    await run(unstuck, FUNCTIONS[function])
    assert set((await read_statuses(database)).values()) == {Status.Completed}
    assert await read_effects(database) == [1, 2, 3]
    assert await read_strikes(database) == {}


@everywhere
async def test_a_worker_that_is_killed_as_it_gives_back_the_rest_loses_none_of_it(
    database: Database, tmp_path: Path
) -> None:
    """Whether the job that it stopped was written down first is a matter of chance."""
    unstuck = await prepare(database, 5)
    release = Step("before commit", RELEASE)
    orders = Orders(database.url, "stay_from_the_second", release, life="task")
    async with launch(orders, tmp_path) as worker:
        assert await worker.hear() == {"at": 2}
        worker.tell_to_end()
        await worker.until_frozen()
        worker.kill()
    await age(database)
    assert (await unstuck.sweep()).errors == []
    for job in (3, 4, 5):
        assert await read_story(database, job) == SPARED
    assert await read_story(database, 2) in (STRUCK, [("attempt", "shutdown", "requeued")])
    await run(unstuck, FUNCTIONS["leave_the_commit"])
    assert set((await read_statuses(database)).values()) == {Status.Completed}
    assert await read_effects(database) == [1, 2, 3, 4, 5]


# (policy, the third job's status, and what the sweep says that it did)
POLICIES: list[tuple[dict[str, Any], Status, str]] = [
    ({}, Status.Queued, "requeued"),
    ({"max_resets": 0}, Status.Failed, "failed"),
    ({"reapable": False, "held": "Held"}, Status.Held, "held"),
    ({"reapable": False}, Status.Processing, "held"),
]


@everywhere
@pytest.mark.parametrize(("policy", "status", "outcome"), POLICIES, ids=str)
async def test_only_what_was_begun_is_judged_when_a_worker_dies_amid_its_batch(
    database: Database, tmp_path: Path, policy: dict[str, Any], status: Status, outcome: str
) -> None:
    unstuck = await prepare(database, 10, **policy)
    step = Step("before statement", WORK, 3)
    await run_to_step(Orders(database.url, "leave_the_commit", step, policy=policy), tmp_path)
    await age(database)
    report = await unstuck.sweep()
    assert (report.found, report.total("requeued")) == (8, 7 + (outcome == "requeued"))
    waiting = dict.fromkeys(range(4, 11), Status.Queued)
    done = {1: Status.Completed, 2: Status.Completed}
    assert await read_statuses(database) == {**done, 3: status, **waiting}
    assert await read_story(database, 3) == [("zombie", "lost_heartbeat", outcome)]
    for job in waiting:
        assert await read_story(database, job) == SPARED
    assert await read_strikes(database) == {3: 1, **dict.fromkeys(waiting, 0)}
    third = await recall(database, 3)
    assert third is not None
    is_marked = third.held_at is not None and "not reapable, a human decides" in third.held_reason
    assert is_marked == (outcome == "held")
    assert (await unstuck.sweep()).found == 0


@everywhere
async def test_a_worker_that_dies_in_a_side_effect_leaves_its_record_held_with_the_evidence(
    database: Database, tmp_path: Path
) -> None:
    unstuck = await prepare(database, 2)
    async with launch(Orders(database.url, "charge_a_card"), tmp_path) as worker:
        assert await worker.hear() == {"at": 1}
        worker.kill()
    await age(database)
    await unstuck.sweep()
    assert await read_statuses(database) == {1: Status.Processing, 2: Status.Queued}
    first = await recall(database, 1)
    assert first is not None
    assert "the side effect 'charge card' had begun and was not seen to end" in first.held_reason


@everywhere
async def test_a_checkpoint_outlives_every_death_until_the_record_is_done(
    database: Database, tmp_path: Path
) -> None:
    """The second worker leaves no checkpoint of its own, the third does not even begin."""
    unstuck = await prepare(database, 1, backoff=0)
    deaths = [
        ("checkpoint_apart", Step("before statement", WORK)),
        ("leave_the_commit", Step("before statement", WORK)),
        ("leave_the_commit", Step("before statement", START)),
    ]
    for function, step in deaths:
        orders = Orders(database.url, function, step, policy={"backoff": 0})
        await run_to_step(orders, tmp_path)
        await age(database)
        await unstuck.sweep()
    found = []

    async def look(job_id: int, session: AsyncSession, claim: Claim) -> None:
        found.append(claim.details)

    await run(unstuck, look)
    assert found == [{"pages": 1}]
    assert (await get_job(database, 1)).status is Status.Completed
    assert await recall(database, 1) is None


async def complete_and_die(database: Database, tmp_path: Path) -> None:
    """A job whose worker is killed after it was completed, and before its claim ended."""
    step = Step("after commit", WORK)
    await run_to_step(Orders(database.url, "complete_by_itself", step), tmp_path)
    assert await read_statuses(database) == {1: Status.Completed}
    assert await count_claims(database) == 1
    await age(database)


@everywhere
async def test_a_claim_that_outlives_its_record_is_removed_and_judges_nobody(
    database: Database, tmp_path: Path
) -> None:
    unstuck = await prepare(database, 1)
    await complete_and_die(database, tmp_path)
    assert (await unstuck.sweep()).found == 0
    assert await count_claims(database) == 0
    assert await read_statuses(database) == {1: Status.Completed}
    assert await read_story(database, 1) == []
    # Somebody has it done again, by a loop of the host's own that knows of no claims.
    await change(database, 1, status=Status.Processing, updated_at=ago(60))
    assert (await unstuck.sweep()).found == 0
    assert await read_statuses(database) == {1: Status.Processing}


@everywhere
@pytest.mark.parametrize("words", [CLAIM, START])
async def test_a_claim_that_outlives_its_record_gives_way_to_the_next_worker(
    database: Database, tmp_path: Path, words: str
) -> None:
    """Without a sweep in between. The next one is not judged by it, before it begins or after."""
    unstuck = await prepare(database, 1)
    await complete_and_die(database, tmp_path)
    await change(database, 1, status=Status.Queued)
    orders = Orders(database.url, "leave_the_commit", Step("after commit", words), "freeze")
    async with launch(orders, tmp_path) as worker:
        await worker.until_frozen()
        assert (await unstuck.sweep()).found == 0
        worker.thaw()
        result = await worker.result()
    assert (result["completed"], result["lost"]) == (1, 0)
    assert await read_statuses(database) == {1: Status.Completed}
    assert await count_claims(database) == 0
    assert await read_story(database, 1) == DONE
