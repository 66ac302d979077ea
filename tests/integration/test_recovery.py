"""A workflow's own recovery, one record at a time, each in a savepoint."""

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.jobs import HOUR, Job, Status, add_claim, add_job, ago, get_job, get_stuck_again, start
from tests.lookup import Witness, count_claims, recall
from unstuck.decisions import Outcome
from unstuck.events import Zombie
from unstuck.recovery import Recovered


class Answer:
    """A recovery that gives this answer, and remembers for which zombies it was asked."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.asked: list[Zombie] = []

    async def __call__(self, zombie: Zombie, session: AsyncSession) -> Any:
        self.asked.append(zombie)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def write(session: AsyncSession, zombie: Zombie, **values: Any) -> None:
    job = await session.get_one(Job, zombie.identity)
    for name, value in values.items():
        setattr(job, name, value)
    await session.flush()


async def test_a_recovery_is_handed_the_zombie_and_the_strikes_decide(database: Database) -> None:
    witness, recover = Witness(), Answer(None)
    unstuck = await start(
        database, recover=recover, observers=[witness], zombie_count="zombie_count"
    )
    job = await add_job(database)
    token = uuid.uuid4()
    await add_claim(database, job, token=token, started_at=ago(2 * HOUR))
    report = await unstuck.sweep()
    assert (report.workflows[0].recovered, report.left_processing) == (1, 1)
    (zombie,) = recover.asked
    assert (zombie.workflow, zombie.record_id, zombie.identity) == ("jobs", str(job), job)
    assert (zombie.cause, zombie.worker_id, zombie.zombie_count) == (
        "lost_heartbeat",
        "worker-1",
        1,
    )
    row = await get_job(database, job)
    assert (row.status, row.zombie_count) == (Status.Queued, 1)
    assert row.error == "Recovered from stuck Processing state: by its own recovery"
    assert await count_claims(database) == 0
    (entry,) = await unstuck.history("jobs", job)
    assert (entry.kind, entry.outcome, entry.zombie_count) == ("zombie", "recovered", 1)
    assert [name for name, _ in witness.calls] == [
        "on_zombie_detected",
        "on_status_changed",
        "on_recovered",
        "on_sweep_finished",
    ]


@pytest.mark.parametrize(
    ("answer", "ends", "outcome"),
    [
        (None, Status.Queued, "recovered"),
        (Outcome.requeued, Status.Queued, "requeued"),
        ("requeued", Status.Queued, "requeued"),
        (Outcome.failed, Status.Failed, "failed"),
        (Outcome.held, Status.Held, "held"),
        (Recovered(), Status.Queued, "recovered"),
        (Recovered(Outcome.failed), Status.Failed, "failed"),
        (42, Status.Held, "held"),
        ("nonsense", Status.Held, "held"),
        (Outcome.deferred, Status.Held, "held"),
        (Recovered(Outcome.deferred), Status.Held, "held"),
        (RuntimeError("no"), Status.Held, "held"),
    ],
)
async def test_the_answer_is_the_outcome(
    database: Database, answer: object, ends: Status, outcome: str
) -> None:
    unstuck = await start(database, recover=Answer(answer), held=Status.Held)
    job = await add_job(database)
    report = await unstuck.sweep()
    assert report.errors == []
    assert report.total(outcome) == 1
    assert (await get_job(database, job)).status is ends
    (entry,) = await unstuck.history("jobs", job)
    assert entry.outcome == outcome


async def test_reason_and_data_go_into_the_ledger(database: Database) -> None:
    answer = Recovered(Outcome.requeued, "the upload was there", {"bytes": 17})
    unstuck = await start(database, recover=Answer(answer))
    job = await add_job(database)
    await unstuck.sweep()
    assert (await get_job(database, job)).error == (
        "Requeued from stuck Processing state: the upload was there"
    )
    (entry,) = await unstuck.history("jobs", job)
    assert entry.data == {"reason": "the upload was there", "bytes": 17}


async def test_nonsense_is_held_with_what_was_expected(database: Database) -> None:
    unstuck = await start(database, recover=Answer(42))
    job = await add_job(database)
    await unstuck.sweep()
    assert (await get_job(database, job)).status is Status.Processing
    memory = await recall(database, job)
    assert memory is not None
    assert "recovery stopped: Answer failed: returned 42; expected None" in memory.held_reason
    assert (await unstuck.sweep()).found == 0


async def test_what_a_failing_recovery_wrote_is_undone(database: Database) -> None:
    async def recover(zombie: Zombie, session: AsyncSession) -> None:
        await write(session, zombie, status=Status.Completed, zombie_count=77)
        raise LookupError("half way through")

    unstuck = await start(database, recover=recover, held=Status.Held)
    job = await add_job(database)
    await unstuck.sweep()
    row = await get_job(database, job)
    assert (row.status, row.zombie_count) == (Status.Held, 0)
    assert row.error is not None
    assert row.error.endswith("recovery stopped: recover failed: half way through")


async def test_a_database_error_in_a_recovery_is_undone_like_any_other(database: Database) -> None:
    async def recover(zombie: Zombie, session: AsyncSession) -> None:
        session.add(Job(id=zombie.identity))  # there is one already

    unstuck = await start(database, recover=recover, held=Status.Held)
    jobs = [await add_job(database) for _ in range(2)]
    assert (await unstuck.sweep()).total("held") == 2
    assert {(await get_job(database, job)).status for job in jobs} == {Status.Held}


async def test_a_recovery_may_complete_the_record_itself(database: Database) -> None:
    async def recover(zombie: Zombie, session: AsyncSession) -> None:
        job = await session.get_one(Job, zombie.identity)
        job.status = Status.Completed  # flushed by the end of its savepoint

    witness = Witness()
    unstuck = await start(database, recover=recover, max_resets=0, observers=[witness])
    job = await add_job(database)
    assert (await unstuck.sweep()).left_processing == 1
    row = await get_job(database, job)
    assert (row.status, row.error) == (Status.Completed, None)
    assert (await unstuck.history("jobs", job))[0].outcome == "recovered"
    assert witness.heard("on_status_changed") == [
        ("jobs", str(job), Status.Processing, Status.Completed)
    ]


async def test_a_recovery_may_delete_the_record(database: Database) -> None:
    async def recover(zombie: Zombie, session: AsyncSession) -> None:
        await session.delete(await session.get_one(Job, zombie.identity))

    unstuck = await start(database, recover=recover)
    job = await add_job(database)
    report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], 1)
    assert await database.execute("SELECT id FROM jobs") == []
    (entry,) = await unstuck.history("jobs", job)
    assert entry.outcome == "recovered"


async def test_recovery_does_not_outlast_the_strikes(database: Database) -> None:
    recover = Answer(None)
    unstuck = await start(database, recover=recover, max_resets=1)
    job = await add_job(database)
    await unstuck.sweep()
    await get_stuck_again(database, job)
    await unstuck.sweep()
    assert len(recover.asked) == 2
    assert (await get_job(database, job)).status is Status.Failed
    story = [(entry.outcome, entry.zombie_count) for entry in await unstuck.history("jobs", job)]
    assert story == [("recovered", 1), ("failed", 2)]


async def test_a_recovery_may_leave_a_record_alone(database: Database) -> None:
    witness, recover = Witness(), Answer(Outcome.skipped)
    unstuck = await start(database, recover=recover, observers=[witness])
    job = await add_job(database)
    await add_claim(database, job, token=uuid.uuid4(), started_at=ago(2 * HOUR))
    report = (await unstuck.sweep()).workflows[0]
    assert (report.found, report.skipped, report.locked, report.left_processing) == (1, 1, 0, 0)
    assert (await get_job(database, job)).status is Status.Processing
    assert await count_claims(database) == 1
    assert await unstuck.history("jobs", job) == []
    assert await recall(database, job) is None
    assert [name for name, _ in witness.calls] == ["on_sweep_finished"]
    await unstuck.sweep()
    assert len(recover.asked) == 2  # it is asked again


async def test_what_never_started_has_nothing_to_recover_from(database: Database) -> None:
    recover = Answer(RuntimeError("must not be asked"))
    unstuck = await start(database, recover=recover)
    job = await add_job(database)
    await add_claim(database, job, token=uuid.uuid4())
    await unstuck.sweep()
    assert recover.asked == []
    assert (await get_job(database, job)).status is Status.Queued


async def test_a_recovery_decides_for_what_is_not_reapable(database: Database) -> None:
    unstuck = await start(database, recover=Answer(None), reapable=False, held=Status.Held)
    job = await add_job(database)
    await unstuck.sweep()
    assert (await get_job(database, job)).status is Status.Queued


@pytest.mark.parametrize("batch_size", [2, 1000])
async def test_a_recovery_that_breaks_its_transaction_does_not_starve_the_others(
    database: Database, batch_size: int
) -> None:
    async def recover(zombie: Zombie, session: AsyncSession) -> Recovered | None:
        if zombie.identity == first:
            return Recovered(data={"at": datetime.now(UTC)})  # is not JSON
        if zombie.identity == second:
            await session.commit()  # is not allowed
        return None

    unstuck = await start(database, recover=recover, settings={"batch_size": batch_size})
    first, second, *others = [await add_job(database) for _ in range(5)]
    report = await unstuck.sweep()
    assert {(await get_job(database, job)).status for job in others} == {Status.Queued}
    assert {(await get_job(database, j)).status for j in (first, second)} == {Status.Processing}
    errors = sorted(report.errors)
    assert len(errors) == 2
    assert errors[0].startswith(f"jobs: the recovery of {first} failed: ")
    assert errors[1].startswith(f"jobs: the recovery of {second} failed: ")
    assert report.total("recovered") == 3
