"""Two loops never claim one record; and a claim is safe from the sweep from its first moment."""

import asyncio
import threading
from collections import Counter
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import event, select
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.interleaving import before_statement, closed_gate, gated
from tests.jobs import HOUR, Job, Status, add_claim, add_job, ago, change, get_job, start
from tests.lookup import rewrite
from tests.looping import age_claims, queue_job, queue_jobs, read_claims, read_ledger, run
from unstuck import Claim
from unstuck.tables import claims

OLD_TOKEN = UUID(int=7)


async def test_many_loops_at_once_claim_each_record_once(postgres: Database) -> None:
    unstuck = await start(postgres)
    jobs = await queue_jobs(postgres, 60)
    ran: Counter[int] = Counter()

    async def work(item_id: int, session: AsyncSession) -> None:
        ran[item_id] += 1

    loops = [run(unstuck, work, batch_size=3, drain=True) for _ in range(4)]
    results = await asyncio.gather(*loops)
    assert ran == Counter(jobs)
    assert sum(result.completed for result in results) == 60


async def test_a_record_that_somebody_has_locked_is_passed_over(postgres: Database) -> None:
    unstuck = await start(postgres)
    locked, free = await queue_jobs(postgres, 2)
    async with postgres.engine.begin() as connection:
        await connection.execute(select(Job.id).where(Job.id == locked).with_for_update())
        result = await run(unstuck, lambda item_id, session: None)
        assert (result.claimed, result.completed) == (1, 1)
    assert (await get_job(postgres, free)).status is Status.Completed
    assert (await get_job(postgres, locked)).status is Status.Queued


async def test_no_more_than_a_batch_is_claimed(database: Database) -> None:
    unstuck = await start(database)
    await queue_jobs(database, 5)

    async def work(item_id: int, session: AsyncSession) -> None:
        assert len(await read_claims(database)) <= 2

    result = await run(unstuck, work, batch_size=2)
    assert (result.claimed, result.completed) == (2, 2)


async def test_each_claim_has_a_token_of_its_own(database: Database) -> None:
    unstuck = await start(database)
    await queue_jobs(database, 3)
    tokens: list[Any] = []

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        tokens.append(claim.token)
        (kept,) = [c for c in await read_claims(database) if c.record_id == str(item_id)]
        assert kept.token == claim.token
        assert kept.started_at is not None

    await run(unstuck, work)
    assert len(set(tokens)) == 3


async def test_a_claim_that_was_left_over_gives_way(database: Database) -> None:
    """Somebody requeued by hand, and did not know of claims."""
    unstuck = await start(database)
    job = await queue_job(database)
    await add_claim(database, job, token=OLD_TOKEN, started_at=ago(2 * HOUR), effect="charge")

    async def work(item_id: int, session: AsyncSession) -> None:
        (kept,) = await read_claims(database)
        assert kept.token != OLD_TOKEN
        assert kept.effect is None
        assert (await unstuck.sweep()).found == 0

    assert (await run(unstuck, work)).completed == 1


async def test_the_columns_that_show_life_are_written_with_the_claim(database: Database) -> None:
    unstuck = await start(database, lease="leased_until")
    job = await queue_job(database, leased_until=ago(HOUR))

    async def work(item_id: int, session: AsyncSession) -> None:
        claimed = await get_job(database, job)
        assert claimed.status is Status.Processing
        assert claimed.updated_at is not None
        assert claimed.leased_until is not None
        await database.execute("DELETE FROM zombie_claims")  # now the row speaks for itself
        assert (await unstuck.sweep()).found == 0

    assert (await run(unstuck, work)).lost == 1


async def test_a_sweep_with_an_old_snapshot_does_not_take_what_was_claimed_since(
    postgres: Database,
) -> None:
    """Its find saw a zombie. Then another sweep queued that, and a loop claimed it."""
    unstuck = await start(postgres, reapable=gated)
    job = await add_job(postgres, idempotent=True)
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def work(item_id: int, session: AsyncSession) -> None:
        inside.set()
        await go_on.wait()

    async with closed_gate(postgres) as sweep_waits:
        sweep = asyncio.create_task(unstuck.sweep())
        await sweep_waits()
        await change(postgres, job, status=Status.Queued)
        loop = asyncio.create_task(run(unstuck, work))
        await inside.wait()
    report = await sweep
    assert (report.found, report.errors) == (0, [])
    go_on.set()
    assert (await loop).completed == 1


async def test_a_claim_and_its_mark_are_one(postgres: Database) -> None:
    """Between marking a row and claiming it no sweep gets in, however old the row looks."""
    unstuck = await start(postgres)
    job = await queue_job(postgres, updated_at=ago(2 * HOUR))
    found: list[int] = []

    async def sweep() -> None:
        found.append((await unstuck.sweep()).found)

    with before_statement(postgres, "INTO zombie_claims", sweep):
        assert (await run(unstuck, lambda item_id, session: None)).completed == 1
    assert found == [0]
    assert (await get_job(postgres, job)).status is Status.Completed


@pytest.mark.parametrize("reapable", [True, False])
async def test_a_batch_whose_worker_dies_gives_back_what_it_did_not_begin_without_a_strike(
    database: Database, reapable: bool
) -> None:
    unstuck = await start(database, reapable=reapable, held=Status.Held)
    jobs = await queue_jobs(database, 5)
    seen: list[int] = []

    async def work(item_id: int, session: AsyncSession) -> None:
        seen.append(item_id)
        if len(seen) < 3:
            return
        await age_claims(database)
        await unstuck.sweep()  # as far as it can tell, we are dead

    result = await run(unstuck, work, batch_size=5, order_by_column=Job.id)
    assert (result.completed, result.lost) == (2, 3)
    third = await get_job(database, jobs[2])
    assert third.status is (Status.Queued if reapable else Status.Held)
    strikes = await database.execute(
        "SELECT record_id, cause, outcome, zombie_count FROM zombie_events WHERE kind = 'zombie' "
        "ORDER BY record_id"
    )
    outcome = "requeued" if reapable else "held"
    assert [tuple(row) for row in strikes] == [
        (str(jobs[2]), "lost_heartbeat", outcome, 1),
        (str(jobs[3]), "never_started", "requeued", 0),
        (str(jobs[4]), "never_started", "requeued", 0),
    ]
    late = [kind for _, kind, *_ in await read_ledger(database) if kind.startswith("late")]
    assert late == ["late_finish", "late_start", "late_start"]


async def test_a_hung_worker_that_still_beats_is_told_of_once(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start(database, settings={"hung_after_minutes": 60})
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        await rewrite(database, claims, started_at=ago(2 * HOUR), heartbeat_at=ago(1))
        reports = [await unstuck.sweep() for _ in range(2)]
        assert [report.total("hung") for report in reports] == [1, 0]
        assert [report.found for report in reports] == [0, 0]

    assert (await run(unstuck, work)).completed == 1
    assert "which still beats: is it hung?" in caplog.text
    assert (str(job), "hung", "hung", None) in await read_ledger(database)


async def test_a_hung_worker_may_be_left_alone(database: Database) -> None:
    unstuck = await start(database, settings={"hung_after_minutes": None})
    await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        await rewrite(database, claims, started_at=ago(1000 * HOUR), heartbeat_at=ago(1))
        assert (await unstuck.sweep()).total("hung") == 0

    assert (await run(unstuck, work)).completed == 1


@pytest.mark.parametrize("status", [Status.Completed, Status.Queued, None])
async def test_a_claim_that_outlived_its_record_is_dropped(
    database: Database, status: Status | None
) -> None:
    """Else it would speak for whoever takes the record up next."""
    unstuck = await start(database)
    job = await add_job(database, status=status or Status.Completed)
    await add_claim(database, job, token=OLD_TOKEN, started_at=ago(2 * HOUR))
    if status is None:
        await database.execute("DELETE FROM jobs")
    await unstuck.sweep()
    assert await read_claims(database) == []


async def test_a_young_claim_of_a_record_that_has_ended_is_left_to_its_worker(
    database: Database,
) -> None:
    unstuck = await start(database)
    job = await add_job(database, status=Status.Completed)
    await add_claim(database, job, token=OLD_TOKEN, claimed_at=ago(1))
    await unstuck.sweep()
    assert len(await read_claims(database)) == 1


@pytest.mark.parametrize("items", [1, 20])
async def test_a_batch_costs_few_statements(database: Database, items: int) -> None:
    """Four for the claim; for each item the start, and four for its end."""
    unstuck = await start(database)
    await queue_jobs(database, items)
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # and not the heart
            sent.append(statement)

    event.listen(database.engine.sync_engine, "before_cursor_execute", note)
    await run(unstuck, lambda item_id, session: None, batch_size=items)
    event.remove(database.engine.sync_engine, "before_cursor_execute", note)
    assert len(sent) <= 4 + 5 * items
