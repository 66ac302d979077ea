from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.jobs import HOUR, Job, Status, add_job, ago, get_job, start
from tests.lookup import Witness, recall, rewrite
from unstuck import Compensate
from unstuck.events import Zombie
from unstuck.tables import records

Step = Callable[[Zombie, AsyncSession], Awaitable[Any]]


class Saga:
    """Three steps to undo; each writes its column, and the one that is to fail fails after that."""

    def __init__(self, failing: str | None = None) -> None:
        self.order: list[str] = []
        steps: dict[str, dict[str, Any]] = {
            "refund": {"zombie_count": 11},
            "unpublish": {"idempotent": True},
            "delete_file": {"error": "file gone"},
        }
        self.steps = [
            self._step(name, values, fails=name == failing) for name, values in steps.items()
        ]

    def _step(self, name: str, values: dict[str, Any], *, fails: bool) -> Step:
        async def step(zombie: Zombie, session: AsyncSession) -> None:
            self.order.append(name)
            same = Job.id == zombie.identity
            await session.execute(update(Job).where(same).values(**values))
            if fails:
                raise ConnectionError("the other side is down")

        step.__name__ = name
        return step


async def test_compensations_run_last_first_and_the_record_goes_on(database: Database) -> None:
    saga = Saga()
    unstuck = await start(database, recover=Compensate(saga.steps))
    job = await add_job(database)
    await unstuck.sweep()
    assert saga.order == ["delete_file", "unpublish", "refund"]
    row = await get_job(database, job)
    assert (row.status, row.zombie_count, row.idempotent) == (Status.Queued, 11, True)
    (entry,) = await unstuck.history("jobs", job)
    assert entry.outcome == "recovered"
    assert entry.data["undone"] == ["delete_file", "unpublish", "refund"]
    assert entry.data["not_undone"] == []


@pytest.mark.parametrize("held", [Status.Held, None])
async def test_a_failing_compensation_leaves_the_record_held_with_what_was_undone(
    database: Database, held: Status | None
) -> None:
    saga, witness = Saga(failing="unpublish"), Witness()
    unstuck = await start(
        database, recover=Compensate(saga.steps), held=held, error=None, observers=[witness]
    )
    job = await add_job(database)
    await unstuck.sweep()
    assert saga.order == ["delete_file", "unpublish"]
    row = await get_job(database, job)
    assert row.status is (held or Status.Processing)
    assert row.error == "file gone"  # undone before, and stays undone
    assert row.idempotent is None  # what the failing one wrote is taken back
    assert row.zombie_count == 0

    (entry,) = await unstuck.history("jobs", job)
    reason = "unpublish failed: the other side is down"
    assert entry.outcome == "held"
    assert entry.data == {
        "reason": f"compensation stopped: {reason}",
        "undone": ["delete_file"],
        "not_undone": ["unpublish", "refund"],
        "error": reason,
    }
    memory = await recall(database, job)
    assert memory is not None
    assert reason in memory.held_reason
    assert [zombie.identity for zombie in witness.heard("on_held")] == [job]
    assert (await unstuck.sweep()).found == 0


@pytest.mark.parametrize(
    ("failing", "undone", "not_undone"),
    [
        ("delete_file", [], ["delete_file", "unpublish", "refund"]),
        ("refund", ["delete_file", "unpublish"], ["refund"]),
    ],
)
async def test_the_first_or_the_last_may_fail_as_well(
    database: Database, failing: str, undone: list[str], not_undone: list[str]
) -> None:
    unstuck = await start(database, recover=Compensate(Saga(failing).steps), held=Status.Held)
    job = await add_job(database)
    await unstuck.sweep()
    (entry,) = await unstuck.history("jobs", job)
    assert (entry.data["undone"], entry.data["not_undone"]) == (undone, not_undone)


async def test_a_compensated_record_whose_strikes_are_used_up_is_failed(
    database: Database,
) -> None:
    saga = Saga()
    unstuck = await start(database, recover=Compensate(saga.steps), max_resets=0)
    job = await add_job(database)
    await unstuck.sweep()
    assert len(saga.order) == 3
    assert (await get_job(database, job)).status is Status.Failed
    (entry,) = await unstuck.history("jobs", job)
    assert (entry.outcome, len(entry.data["undone"])) == ("failed", 3)


async def test_a_record_that_a_step_wrote_to_is_held_all_the_same(database: Database) -> None:
    """The host's own `onupdate` may well say a later time than ours."""
    calls = []

    async def touch(zombie: Zombie, session: AsyncSession) -> None:
        calls.append(zombie.record_id)
        same = Job.id == zombie.identity
        await session.execute(update(Job).where(same).values(updated_at=ago(HOUR)))

    async def fails(zombie: Zombie, session: AsyncSession) -> None:
        raise ConnectionError("the other side is down")

    unstuck = await start(database, recover=Compensate([fails, touch]), threshold=1)
    job = await add_job(database)
    await unstuck.sweep()
    await rewrite(database, records, held_at=ago(2 * HOUR))
    await unstuck.sweep()
    assert len(calls) == 1
    await unstuck.release("jobs", job, by="ada", why="undone by hand")
