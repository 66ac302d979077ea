"""What a human decides, with who and why."""

import logging
import uuid
from collections.abc import Awaitable, Callable

import pytest

from tests.database import Database
from tests.jobs import (
    HOUR,
    Status,
    add_claim,
    add_job,
    ago,
    change,
    get_job,
    get_stuck_again,
    start,
)
from tests.lookup import Witness, count_claims, read_everything, recall, remember
from unstuck import Unstuck
from unstuck.errors import UnknownRecord, UnknownWorkflow, WrongState

Decision = Callable[[Unstuck, int], Awaitable[None]]


async def release(unstuck: Unstuck, job: int) -> None:
    await unstuck.release("jobs", job, by="ada", why="checked by hand")


async def fail(unstuck: Unstuck, job: int) -> None:
    await unstuck.fail("jobs", job, by="ada", why="checked by hand")


async def retry(unstuck: Unstuck, job: int) -> None:
    await unstuck.retry("jobs", job, by="ada", why="checked by hand")


async def cancel(unstuck: Unstuck, job: int) -> None:
    await unstuck.cancel("jobs", job, by="ada", why="checked by hand")


CASES = [
    (release, "released", Status.Held, Status.Queued),
    (fail, "failed", Status.Held, Status.Failed),
    (retry, "retried", Status.Failed, Status.Queued),
    (retry, "retried", Status.Crashed, Status.Queued),
    (cancel, "cancelled", Status.Processing, Status.Failed),
]
WANTED = {"release": "held", "fail": "held", "retry": "failed", "cancel": "processing"}
ALLOWED = {(decide, old) for decide, _, old, _ in CASES}
REFUSED = [
    (decide, status)
    for decide in (release, fail, retry, cancel)
    for status in Status
    if (decide, status) not in ALLOWED
]


@pytest.mark.parametrize(("decide", "kind", "old", "new"), CASES)
async def test_a_decision_is_carried_out_and_written_down(
    database: Database, decide: Decision, kind: str, old: Status, new: Status
) -> None:
    witness = Witness()
    unstuck = await start(database, held=Status.Held, crashed=Status.Crashed, observers=[witness])
    job = await add_job(database, status=old, updated_at=ago(HOUR))
    await remember(database, job, zombie_count=2, held_at=ago(60))
    await decide(unstuck, job)

    row = await get_job(database, job)
    assert (row.status, row.error) == (new, f"{kind.capitalize()} by ada: checked by hand")
    assert row.updated_at is not None
    assert row.updated_at.replace(tzinfo=ago(0).tzinfo) > ago(60)
    (entry,) = await unstuck.history("jobs", job)
    assert (entry.kind, entry.zombie_count) == (kind, 2)
    assert entry.data == {
        "by": "ada",
        "why": "checked by hand",
        "old": old.name,
        "new": new.name,
    }
    assert witness.calls == [("on_status_changed", ("jobs", str(job), old, new))]


@pytest.mark.parametrize(("decide", "status"), REFUSED)
async def test_a_decision_for_another_status_is_refused_and_changes_nothing(
    database: Database, decide: Decision, status: Status
) -> None:
    witness = Witness()
    unstuck = await start(database, held=Status.Held, crashed=Status.Crashed, observers=[witness])
    job = await add_job(database, status=status)
    await add_claim(database, job, token=uuid.uuid4())
    before = await read_everything(database)
    wanted = WANTED[decide.__name__]
    sentence = f"^Job {job} is {status.name}, not {wanted}; nothing was changed.$"
    with pytest.raises(WrongState, match=sentence):
        await decide(unstuck, job)
    assert await read_everything(database) == before
    assert witness.calls == []


@pytest.mark.parametrize(("decide", "new"), [(release, Status.Queued), (fail, Status.Failed)])
async def test_a_record_held_by_a_mark_alone_is_held(
    database: Database, decide: Decision, new: Status
) -> None:
    unstuck = await start(database, reapable=False)
    job = await add_job(database)
    await unstuck.sweep()
    await decide(unstuck, job)
    assert (await get_job(database, job)).status is new
    assert (await unstuck.sweep()).found == 0


@pytest.mark.parametrize("decide", [release, fail])
async def test_a_mark_on_a_record_that_was_claimed_again_holds_no_more(
    database: Database, decide: Decision
) -> None:
    unstuck = await start(database, reapable=False)
    job = await add_job(database)
    await unstuck.sweep()
    await add_claim(database, job, token=uuid.uuid4(), claimed_at=ago(-60))  # since it was held
    before = await read_everything(database)
    with pytest.raises(WrongState, match="is Processing, not held"):
        await decide(unstuck, job)
    assert await read_everything(database) == before


async def test_a_write_to_a_held_record_does_not_take_the_decision_away(database: Database) -> None:
    """Whoever works on another status column of the row touches the same `updated_at`."""
    unstuck = await start(database, reapable=False)
    job = await add_job(database)
    await unstuck.sweep()
    await change(database, job, updated_at=ago(-60))
    await release(unstuck, job)
    assert (await get_job(database, job)).status is Status.Queued


async def test_a_cancelled_record_loses_its_claim_and_names_its_worker(
    database: Database,
) -> None:
    unstuck = await start(database)
    job, other = await add_job(database, updated_at=ago(1)), await add_job(database)
    await add_claim(database, job, token=uuid.uuid4(), heartbeat_at=ago(1))
    await add_claim(database, other, token=uuid.uuid4(), heartbeat_at=ago(1))
    await cancel(unstuck, job)
    assert await count_claims(database) == 1
    (entry,) = await unstuck.history("jobs", job)
    assert entry.worker_id == "worker-1"


async def test_leases_and_retry_times_do_not_outlive_a_decision(database: Database) -> None:
    unstuck = await start(database, lease="leased_until", retry_at="retry_at")
    job = await add_job(database, status=Status.Failed, leased_until=ago(1), retry_at=ago(-HOUR))
    await retry(unstuck, job)
    row = await get_job(database, job)
    assert (row.leased_until, row.retry_at) == (None, None)


@pytest.mark.parametrize("exhausted_again", [1, 2])
async def test_a_retried_record_starts_with_a_clean_slate(
    database: Database, exhausted_again: int
) -> None:
    unstuck = await start(database, max_resets=1, backoff=0, zombie_count="zombie_count")
    job = await add_job(database)
    await unstuck.sweep()
    await get_stuck_again(database, job)
    await unstuck.sweep()
    assert (await get_job(database, job)).status is Status.Failed
    await retry(unstuck, job)
    assert (await get_job(database, job)).zombie_count == 0

    for _ in range(exhausted_again):
        await get_stuck_again(database, job)
        await unstuck.sweep()
    row = await get_job(database, job)
    assert row.zombie_count == exhausted_again
    assert row.status is (Status.Queued if exhausted_again == 1 else Status.Failed)


async def test_a_failed_or_cancelled_record_is_forgotten(database: Database) -> None:
    unstuck = await start(database, held=Status.Held)
    held = await add_job(database, status=Status.Held)
    stuck = await add_job(database)
    for job in (held, stuck):
        await remember(database, job, zombie_count=2)
    await fail(unstuck, held)
    await cancel(unstuck, stuck)
    assert await recall(database, held) is None
    assert await recall(database, stuck) is None


async def test_a_host_without_a_failed_status_cannot_fail_or_cancel(database: Database) -> None:
    unstuck = await start(database, failed=None, held=Status.Held)
    held, running = await add_job(database, status=Status.Held), await add_job(database)
    before = await read_everything(database)
    for decide, job in ((fail, held), (cancel, running)):
        with pytest.raises(WrongState, match=f"jobs has no failed status for Job {job} to go to"):
            await decide(unstuck, job)
    assert await read_everything(database) == before


async def test_an_unknown_record_is_said_to_be_unknown(database: Database) -> None:
    unstuck = await start(database)
    with pytest.raises(UnknownRecord, match="There is no Job 404"):
        await release(unstuck, 404)
    with pytest.raises(UnknownRecord):
        await release(unstuck, 2**40)  # more than an INTEGER holds
    for nonsense in ("seven", (1, 2), ""):
        with pytest.raises(UnknownRecord, match="is not a key of Job, whose key is \\(id INTEGER"):
            await unstuck.release("jobs", nonsense, by="ada", why="checked")


async def test_an_unknown_workflow_is_told_the_nearest(database: Database) -> None:
    unstuck = await start(database)
    job = await add_job(database)
    with pytest.raises(UnknownWorkflow, match="No workflow is named 'jbos': did you mean 'jobs'"):
        await unstuck.cancel("jbos", job, by="ada", why="checked")


@pytest.mark.parametrize(("by", "why"), [("", "checked"), ("ada", ""), ("  ", "x"), ("ada", "\n")])
async def test_nobody_decides_without_a_name_and_a_reason(
    database: Database, by: str, why: str
) -> None:
    unstuck = await start(database)
    job = await add_job(database)
    with pytest.raises(ValueError, match="Say who decides and why"):
        await unstuck.cancel("jobs", job, by=by, why=why)
    assert (await get_job(database, job)).status is Status.Processing


async def test_a_record_may_be_named_by_its_text_and_the_workflow_by_its_model(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start(database)
    job = await add_job(database)
    with caplog.at_level(logging.WARNING, "unstuck"):
        await unstuck.cancel("Job", str(job), by="ada", why="asked to")
    assert (await get_job(database, job)).status is Status.Failed
    assert caplog.messages == [f"jobs {job} was cancelled by ada: asked to"]
