import uuid
from datetime import timedelta

import pytest

from tests.database import Database
from tests.jobs import HOUR, Status, add_claim, add_job, ago, change, get_job, start
from tests.lookup import count_claims, recall

OTHERS = [status for status in Status if status is not Status.Processing]


async def test_a_job_stuck_for_two_hours_comes_back_with_a_reason(database: Database) -> None:
    unstuck = await start(database)
    stuck = await add_job(database)
    before = ago(0)
    await unstuck.sweep()
    job = await get_job(database, stuck)
    assert job.status is Status.Queued
    assert job.error is not None
    assert job.error.startswith("Auto-reset from stuck Processing state: strike 1 of 3")
    assert "no sign of life for 72" in job.error  # 7200 s, or a few more
    assert job.error.endswith("cause aged")
    assert job.updated_at is not None
    updated_at = job.updated_at.replace(tzinfo=before.tzinfo)
    assert abs(updated_at - before) < timedelta(minutes=1)
    (entry,) = await unstuck.history("jobs", stuck)
    assert (entry.kind, entry.cause, entry.outcome) == ("zombie", "aged", "requeued")
    assert entry.zombie_count == 1
    assert entry.stale_seconds == pytest.approx(2 * HOUR, abs=60)


async def test_a_job_updated_five_minutes_ago_is_not_touched(database: Database) -> None:
    unstuck = await start(database)
    alive = await add_job(database, updated_at=ago(300), error="so far so good")
    assert (await unstuck.sweep()).found == 0
    job = await get_job(database, alive)
    assert (job.status, job.error) == (Status.Processing, "so far so good")
    assert await unstuck.history("jobs", alive) == []


@pytest.mark.parametrize("status", OTHERS)
async def test_a_job_in_any_other_status_is_never_touched(
    database: Database, status: Status
) -> None:
    unstuck = await start(database, held=Status.Held, crashed=Status.Crashed)
    other = await add_job(database, status=status, error="its own")
    before = await get_job(database, other)
    assert (await unstuck.sweep()).found == 0
    job = await get_job(database, other)
    assert (job.status, job.error, job.updated_at) == (status, "its own", before.updated_at)
    assert await unstuck.history("jobs", other) == []


async def test_several_processing_statuses_are_all_looked_after(database: Database) -> None:
    unstuck = await start(database, processing=[Status.Processing, Status.Waiting])
    stuck = [await add_job(database, status=s) for s in (Status.Processing, Status.Waiting)]
    assert (await unstuck.sweep()).left_processing == 2
    assert [(await get_job(database, id_)).status for id_ in stuck] == [Status.Queued] * 2


async def test_a_workflows_own_threshold_wins_over_the_setting(database: Database) -> None:
    unstuck = await start(database, threshold=120, settings={"stuck_threshold_minutes": 600})
    stuck = await add_job(database, updated_at=ago(180))
    alive = await add_job(database, updated_at=ago(60))
    await unstuck.sweep()
    assert (await get_job(database, stuck)).status is Status.Queued
    assert (await get_job(database, alive)).status is Status.Processing


async def test_an_expired_lease_is_a_sign_of_death_and_is_cleared(database: Database) -> None:
    unstuck = await start(database, lease="leased_until")
    # Another workflow's write to the same row: it proves nothing where there is a lease.
    stuck = await add_job(database, leased_until=ago(120), updated_at=ago(1))
    await unstuck.sweep()
    job = await get_job(database, stuck)
    assert (job.status, job.leased_until) == (Status.Queued, None)
    (entry,) = await unstuck.history("jobs", stuck)
    assert entry.cause == "lease_expired"


async def test_a_lease_within_its_grace_protects_however_old_the_row(database: Database) -> None:
    unstuck = await start(database, lease="leased_until", grace=300)
    alive = await add_job(database, leased_until=ago(120))
    assert (await unstuck.sweep()).found == 0
    assert (await get_job(database, alive)).status is Status.Processing


async def test_without_a_lease_the_age_decides(database: Database) -> None:
    unstuck = await start(database, lease="leased_until")
    stuck = await add_job(database, leased_until=None)
    alive = await add_job(database, leased_until=None, updated_at=ago(300))
    await unstuck.sweep()
    assert (await get_job(database, stuck)).status is Status.Queued
    assert (await get_job(database, alive)).status is Status.Processing
    (entry,) = await unstuck.history("jobs", stuck)
    assert entry.cause == "aged"


async def test_a_live_beat_protects_an_old_row(database: Database) -> None:
    unstuck = await start(database)
    alive = await add_job(database)
    await add_claim(database, alive, token=uuid.uuid4(), started_at=ago(HOUR), heartbeat_at=ago(10))
    assert (await unstuck.sweep()).found == 0
    assert (await get_job(database, alive)).status is Status.Processing
    assert await count_claims(database) == 1


async def test_a_lost_heartbeat_is_death_however_fresh_the_row(database: Database) -> None:
    unstuck = await start(database)
    stuck = await add_job(database, updated_at=ago(1))
    lost = ago(2 * HOUR)
    await add_claim(
        database, stuck, token=uuid.uuid4(), started_at=ago(3 * HOUR), heartbeat_at=lost
    )
    await unstuck.sweep()
    assert (await get_job(database, stuck)).status is Status.Queued
    (entry,) = await unstuck.history("jobs", stuck)
    assert (entry.cause, entry.worker_id) == ("lost_heartbeat", "worker-1")
    assert entry.stale_seconds == pytest.approx(2 * HOUR, abs=60)
    assert await count_claims(database) == 0


@pytest.mark.parametrize(
    ("claimed", "started", "dead"), [(5, 2, True), (5, 0.1, False), (0.1, 0.1, False)]
)
async def test_a_beat_that_never_came_is_as_old_as_the_start(
    database: Database, claimed: float, started: float, dead: bool
) -> None:
    unstuck = await start(database)
    job = await add_job(database)
    await add_claim(
        database,
        job,
        token=uuid.uuid4(),
        claimed_at=ago(claimed * HOUR),
        started_at=ago(started * HOUR),
        heartbeat_at=None,
    )
    assert (await unstuck.sweep()).found == dead


async def test_a_claim_that_never_started_is_no_strike_even_if_not_reapable(
    database: Database,
) -> None:
    unstuck = await start(database, reapable=False)
    unstarted = await add_job(database)
    await add_claim(database, unstarted, token=uuid.uuid4())
    await unstuck.sweep()
    job = await get_job(database, unstarted)
    assert job.status is Status.Queued
    assert job.error is not None
    assert "no strike" in job.error
    (entry,) = await unstuck.history("jobs", unstarted)
    assert (entry.cause, entry.outcome, entry.zombie_count) == ("never_started", "requeued", 0)
    assert await count_claims(database) == 0


async def test_a_claim_that_has_not_started_yet_is_given_its_time(database: Database) -> None:
    unstuck = await start(database)
    waiting = await add_job(database)
    await add_claim(database, waiting, token=uuid.uuid4(), claimed_at=ago(60))
    assert (await unstuck.sweep()).found == 0


async def test_a_claim_of_another_workflow_on_the_same_record_says_nothing(
    database: Database,
) -> None:
    unstuck = await start(database, name="others")
    stuck = await add_job(database)
    await add_claim(database, stuck, token=uuid.uuid4(), heartbeat_at=ago(1))
    await unstuck.sweep()
    assert (await get_job(database, stuck)).status is Status.Queued
    assert await count_claims(database) == 1


async def test_a_job_without_any_time_is_judged_from_now_on(database: Database) -> None:
    unstuck = await start(database)
    mute = await add_job(database, updated_at=None)
    report = await unstuck.sweep()
    assert (report.found, report.workflows[0].skipped) == (0, 1)
    job = await get_job(database, mute)
    assert job.status is Status.Processing
    assert job.updated_at is not None
    assert await recall(database, mute) is None
    (entry,) = await unstuck.history("jobs", mute)
    assert (entry.kind, entry.cause) == ("clock_started", None)

    assert (await unstuck.sweep()).workflows[0].skipped == 0
    await change(database, mute, updated_at=ago(2 * HOUR))
    assert (await unstuck.sweep()).left_processing == 1


async def test_without_updated_at_the_missing_lease_is_started(database: Database) -> None:
    unstuck = await start(database, updated_at=None, lease="leased_until")
    mute = await add_job(database)
    assert (await unstuck.sweep()).found == 0
    lease = (await get_job(database, mute)).leased_until
    assert lease is not None
    assert lease.replace(tzinfo=ago(0).tzinfo) - ago(0) > timedelta(minutes=59)


async def test_a_workflow_with_claims_only_leaves_unclaimed_records_alone(
    database: Database,
) -> None:
    unstuck = await start(database, updated_at=None)
    await add_job(database)
    lost = await add_job(database)
    await add_claim(database, lost, token=uuid.uuid4(), started_at=ago(2 * HOUR))
    assert (await unstuck.sweep()).found == 1
    assert (await get_job(database, lost)).status is Status.Queued


@pytest.mark.parametrize("year", ["0001", "1677", "1970"])
async def test_an_ancient_time_stops_no_sweep(database: Database, year: str) -> None:
    unstuck = await start(database)
    ancient, plain = await add_job(database), await add_job(database)
    time = f"'{year}-01-01 00:00:00'"
    await database.execute(f"UPDATE jobs SET updated_at = {time} WHERE id = :id", id=ancient)
    report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], 2)
    assert (await get_job(database, plain)).status is Status.Queued


@pytest.mark.parametrize("time", ["-infinity", "4713-01-01 00:00:00 BC"])
async def test_a_time_that_python_cannot_hold_stops_no_sweep(postgres: Database, time: str) -> None:
    unstuck = await start(postgres)
    await add_job(postgres)
    ancient = await add_job(postgres)
    await postgres.execute(f"UPDATE jobs SET updated_at = '{time}' WHERE id = :id", id=ancient)
    report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], 2)
    assert (await get_job(postgres, ancient)).status is Status.Queued
