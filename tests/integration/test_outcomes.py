"""What becomes of a zombie, strike by strike. Waiting for its next attempt: test_backoff.py."""

import uuid

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
from tests.lookup import Witness, recall, rewrite
from unstuck import Unstuck
from unstuck.registry import Parameters
from unstuck.tables import records

NO_WAIT = {"backoff_base_seconds": 0}


async def strike(unstuck: Unstuck, database: Database, record_id: int, times: int) -> None:
    for _ in range(times):
        await get_stuck_again(database, record_id)
        assert (await unstuck.sweep()).found == 1


async def test_strikes_count_up_and_say_so(database: Database) -> None:
    unstuck = await start(database, settings=NO_WAIT)
    job = await add_job(database)
    for count in (1, 2, 3):
        await strike(unstuck, database, job, 1)
        row = await get_job(database, job)
        assert row.status is Status.Queued
        assert row.error is not None
        assert f"strike {count} of 3" in row.error
        memory = await recall(database, job)
        assert memory is not None
        assert memory.zombie_count == count
    assert [entry.zombie_count for entry in await unstuck.history("jobs", job)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("statuses", "ends"),
    [
        (Parameters(), Status.Failed),
        (Parameters(crashed=Status.Crashed), Status.Crashed),
        (Parameters(failed=None, crashed=Status.Crashed), Status.Crashed),
        (Parameters(failed=None, held=Status.Held), Status.Held),
        (Parameters(failed=None), Status.Processing),
    ],
)
async def test_a_job_with_its_strikes_used_up_is_given_up(
    database: Database, statuses: Parameters, ends: Status
) -> None:
    parameters: Parameters = {"max_resets": 1, **statuses}
    unstuck = await start(database, settings=NO_WAIT, **parameters)
    job = await add_job(database)
    await strike(unstuck, database, job, 2)
    assert (await get_job(database, job)).status is ends
    given_up = "failed" if ends in (Status.Failed, Status.Crashed) else "held"
    story = [(entry.outcome, entry.zombie_count) for entry in await unstuck.history("jobs", job)]
    assert story == [("requeued", 1), (given_up, 2)]
    assert (await unstuck.sweep()).found == 0


async def test_the_error_of_a_given_up_job_tells_its_history(database: Database) -> None:
    unstuck = await start(database, settings=NO_WAIT, max_resets=2)
    job = await add_job(database)
    await strike(unstuck, database, job, 2)
    await get_stuck_again(database, job)
    await add_claim(database, job, token=uuid.uuid4(), started_at=ago(2 * HOUR))
    await unstuck.sweep()
    error = (await get_job(database, job)).error
    assert error is not None
    assert error.startswith("Given up from stuck Processing state: stuck 3 times, 2 allowed")
    assert "cause lost_heartbeat; earlier: " in error
    earlier = error.partition("; earlier: ")[2].split(", ")
    assert [strike.split()[-1] for strike in earlier] == ["aged", "aged"]
    at = [entry.at for entry in await unstuck.history("jobs", job)]
    assert f"{at[0]:%Y-%m-%d %H:%M:%S} aged" in earlier


async def test_with_no_resets_allowed_the_first_strike_is_the_last(database: Database) -> None:
    unstuck = await start(database, max_resets=0)
    job = await add_job(database)
    await unstuck.sweep()
    row = await get_job(database, job)
    assert row.status is Status.Failed
    assert row.error is not None
    assert "stuck 1 times, 0 allowed" in row.error
    assert row.error.endswith("earlier: none")


@pytest.mark.parametrize(
    ("statuses", "ends"),
    [(Parameters(), Status.Processing), (Parameters(held=Status.Held), Status.Held)],
)
async def test_what_is_not_reapable_is_held_once(
    database: Database, statuses: Parameters, ends: Status
) -> None:
    witness = Witness()
    parameters: Parameters = {"reapable": False, **statuses}
    unstuck = await start(database, observers=[witness], **parameters)
    job = await add_job(database)
    report = await unstuck.sweep()
    assert (report.workflows[0].held, report.left_processing) == (1, ends is Status.Held)
    assert (await get_job(database, job)).status is ends
    memory = await recall(database, job)
    assert memory is not None
    assert memory.held_at is not None
    assert memory.held_reason.startswith("Held from stuck Processing state: strike 1 of 3")
    assert memory.held_reason.endswith("not reapable, a human decides")

    assert (await unstuck.sweep()).found == 0
    assert len(await unstuck.history("jobs", job)) == 1
    assert [zombie.record_id for zombie in witness.heard("on_held")] == [str(job)]


async def test_a_held_job_that_left_and_got_stuck_anew_is_held_anew(database: Database) -> None:
    unstuck = await start(database, reapable=False)
    job = await add_job(database)
    await unstuck.sweep()
    await change(database, job, status=Status.Queued)  # by hand, with SQL, as of old
    await unstuck.sweep()
    await get_stuck_again(database, job)
    assert (await unstuck.sweep()).total("held") == 1
    story = [(entry.kind, entry.outcome) for entry in await unstuck.history("jobs", job)]
    assert story == [("zombie", "held"), ("hold_ended", None), ("zombie", "held")]


async def test_a_write_to_a_held_job_does_not_end_the_hold(database: Database) -> None:
    unstuck = await start(database, reapable=False)
    await add_job(database)
    await unstuck.sweep()
    # Held three hours ago, written two hours ago: by another workflow on the same row, say.
    await rewrite(database, records, held_at=ago(3 * HOUR))
    assert (await unstuck.sweep()).found == 0


async def test_a_held_job_whose_lease_was_renewed_and_ran_out_again_is_held_anew(
    database: Database,
) -> None:
    unstuck = await start(database, reapable=False, lease="leased_until")
    await add_job(database, leased_until=ago(2 * HOUR))
    await unstuck.sweep()
    await rewrite(database, records, held_at=ago(3 * HOUR))
    assert (await unstuck.sweep()).total("held") == 1


@pytest.mark.parametrize(("flag", "ends"), [(True, "requeued"), (False, "held"), (None, "held")])
async def test_each_record_may_say_whether_it_is_reapable(
    database: Database, flag: bool | None, ends: str
) -> None:
    unstuck = await start(database, reapable="idempotent", held=Status.Held)
    job = await add_job(database, idempotent=flag)
    await unstuck.sweep()
    (entry,) = await unstuck.history("jobs", job)
    assert entry.outcome == ends


async def test_reapable_may_be_an_expression(database: Database) -> None:
    unstuck = await start(database, reapable=lambda job: job.zombie_count < 5, held=Status.Held)
    may = await add_job(database, zombie_count=0)
    may_not = await add_job(database, zombie_count=9)
    await unstuck.sweep()
    assert (await get_job(database, may)).status is Status.Queued
    assert (await get_job(database, may_not)).status is Status.Held


async def test_the_hosts_own_counter_is_kept_as_well(database: Database) -> None:
    unstuck = await start(database, settings=NO_WAIT, zombie_count="zombie_count", max_resets=1)
    job = await add_job(database)
    for count in (1, 2):
        await strike(unstuck, database, job, 1)
        assert (await get_job(database, job)).zombie_count == count


async def test_a_counter_at_its_limit_saturates(database: Database) -> None:
    unstuck = await start(
        database, settings={**NO_WAIT, "max_resets": 10**6}, zombie_count="zombie_count"
    )
    job = await add_job(database)
    await strike(unstuck, database, job, 1)
    await rewrite(database, records, zombie_count=2**31 - 1)
    counts = []
    for _ in range(2):
        await strike(unstuck, database, job, 1)
        counts.append((await get_job(database, job)).zombie_count)
    assert counts == [1_000_000, 1_000_000]


async def test_a_backoff_at_the_counters_limit_is_the_longest(database: Database) -> None:
    unstuck = await start(database, max_resets=10**6, retry_at="retry_at")
    job = await add_job(database)
    await strike(unstuck, database, job, 1)
    await rewrite(database, records, zombie_count=2**31 - 1)
    await strike(unstuck, database, job, 1)
    assert (await get_job(database, job)).status is Status.Queued


async def test_strikes_are_cleared_by_a_clean_completion(database: Database) -> None:
    unstuck = await start(database, settings=NO_WAIT, max_resets=1)
    job = await add_job(database)
    await unstuck.sweep()
    await change(database, job, status=Status.Completed)
    await unstuck.sweep()
    assert await recall(database, job) is None
    assert (await unstuck.history("jobs", job))[-1].kind == "recovered"

    await strike(unstuck, database, job, 1)
    assert (await get_job(database, job)).status is Status.Queued


async def test_strikes_stay_while_the_job_has_not_completed(database: Database) -> None:
    unstuck = await start(database, settings=NO_WAIT)
    job = await add_job(database)
    for status in (Status.Queued, Status.Failed, Status.Waiting):
        await unstuck.sweep()
        await change(database, job, status=status)
    memory = await recall(database, job)
    assert memory is not None
    assert memory.zombie_count == 1


async def test_the_error_is_cut_to_its_column(database: Database) -> None:
    unstuck = await start(database, settings={"reset_message": "x" * 600})
    job = await add_job(database)
    await unstuck.sweep()
    assert (await get_job(database, job)).error == "x" * 500
