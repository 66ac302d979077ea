"""Two transactions in every order that matters, each forced."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib import import_module
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.database import Database
from tests.interleaving import before_statement, closed_gate, gated
from tests.jobs import HOUR, Job, Status, add_claim, add_job, ago, change, get_job, start
from unstuck import Registry, Unstuck, ZombieSettings

TAKE = "WITH found"
TRANSACTION = import_module("unstuck.db.transaction")
ALONE = ZombieSettings(mass_stall_records=0)


async def ledger(database: Database) -> list[tuple[Any, ...]]:
    rows = await database.execute("SELECT record_id, kind FROM zombie_events ORDER BY id")
    return [tuple(row) for row in rows]


async def add_claimed_job(database: Database, token: UUID) -> int:
    stuck = await add_job(database, idempotent=True)
    await add_claim(database, stuck, token=token, started_at=ago(2 * HOUR))
    return stuck


async def sweep_through_gate(
    database: Database, unstuck: Unstuck, meanwhile: Callable[[], Awaitable[object]]
) -> Any:
    """A sweep whose find has its snapshot from before `meanwhile`, and its locks from after it."""
    async with closed_gate(database) as sweep_waits:
        sweep = asyncio.create_task(unstuck.sweep())
        await sweep_waits()
        await meanwhile()
    report = await sweep
    assert report.errors == []
    return report


async def test_a_record_that_finishes_between_survey_and_take_is_not_reset(
    postgres: Database,
) -> None:
    unstuck = await start(postgres)
    stuck = await add_job(postgres)
    with before_statement(postgres, TAKE, lambda: change(postgres, stuck, status=Status.Completed)):
        report = await unstuck.sweep()
    assert (await get_job(postgres, stuck)).status is Status.Completed
    assert await ledger(postgres) == []
    assert (report.found, report.total("locked"), report.errors) == (0, 0, [])


@pytest.mark.parametrize("life", ["finished", "touched"])
async def test_a_record_that_shows_life_after_the_snapshot_is_not_taken(
    postgres: Database, life: str
) -> None:
    unstuck = await start(postgres, reapable=gated)
    stuck = await add_job(postgres, idempotent=True)
    signs: dict[str, dict[str, Any]] = {
        "finished": {"status": Status.Completed},
        "touched": {"updated_at": ago(0)},
    }
    report = await sweep_through_gate(
        postgres, unstuck, lambda: change(postgres, stuck, error="mine", **signs[life])
    )
    assert (await get_job(postgres, stuck)).error == "mine"
    assert await ledger(postgres) == []
    assert (report.found, report.total("locked")) == (0, 0)


@pytest.mark.parametrize("claimed", [True, False])
async def test_a_write_that_is_no_sign_of_life_does_not_save_a_zombie(
    postgres: Database, claimed: bool
) -> None:
    unstuck = await start(postgres, reapable=gated)
    stuck = await (add_claimed_job(postgres, uuid4()) if claimed else add_job(postgres))
    await change(postgres, stuck, idempotent=True)
    await sweep_through_gate(postgres, unstuck, lambda: change(postgres, stuck, zombie_count=7))
    job = await get_job(postgres, stuck)
    assert (job.status, job.zombie_count) == (Status.Queued, 7)
    assert await ledger(postgres) == [(str(stuck), "zombie")]


async def test_a_beat_after_the_snapshot_saves_the_claim(postgres: Database) -> None:
    unstuck = await start(postgres, reapable=gated)
    token = uuid4()
    stuck = await add_claimed_job(postgres, token)
    report = await sweep_through_gate(
        postgres,
        unstuck,
        lambda: postgres.execute("UPDATE zombie_claims SET heartbeat_at = now()"),
    )
    assert (await get_job(postgres, stuck)).status is Status.Processing
    assert [row.token for row in await postgres.execute("SELECT token FROM zombie_claims")] == [
        token
    ]
    assert await ledger(postgres) == []
    assert (report.found, report.total("locked")) == (0, 0)


async def test_a_beat_under_way_saves_the_claim_and_holds_up_nobody(postgres: Database) -> None:
    unstuck = await start(postgres)
    beating = await add_claimed_job(postgres, uuid4())
    dead = await add_claimed_job(postgres, uuid4())
    async with postgres.engine.begin() as worker:
        await worker.exec_driver_sql(
            f"UPDATE zombie_claims SET heartbeat_at = now() WHERE record_id = '{beating}'"
        )
        report = await unstuck.sweep()
    assert report.errors == []
    assert (report.left_processing, report.total("locked")) == (1, 1)
    assert (await get_job(postgres, beating)).status is Status.Processing
    assert (await get_job(postgres, dead)).status is Status.Queued
    assert (await unstuck.sweep()).found == 0


@pytest.mark.parametrize("way", ["replaced", "changed"])
async def test_a_successor_is_never_stripped_of_its_claim(postgres: Database, way: str) -> None:
    """Even one whose times look as old as its predecessor's: the token alone tells them apart."""
    unstuck = await start(postgres, reapable=gated)
    stuck = await add_claimed_job(postgres, uuid4())
    successor = uuid4()

    async def claim_anew() -> None:
        if way == "replaced":
            await postgres.execute("DELETE FROM zombie_claims")
            await add_claim(postgres, stuck, token=successor, started_at=ago(2 * HOUR))
        else:
            await postgres.execute("UPDATE zombie_claims SET token = :token", token=successor)

    await sweep_through_gate(postgres, unstuck, claim_anew)
    assert (await get_job(postgres, stuck)).status is Status.Processing
    rows = await postgres.execute("SELECT token FROM zombie_claims")
    assert [row.token for row in rows] == [successor]
    assert await ledger(postgres) == []


@pytest.mark.parametrize("reapable", [True, False])
async def test_two_sweeps_at_once_give_what_one_gives_even_if_both_lead(
    postgres: Database, monkeypatch: pytest.MonkeyPatch, reapable: bool
) -> None:
    """One finds, then the other finds and takes, then the first goes on. A requeued record has
    moved by then; a held one looks as it did before."""
    keys = count()
    monkeypatch.setattr(TRANSACTION, "_lock_key", lambda name: next(keys))
    slow = await start(postgres, reapable=gated)
    others = Registry()
    others.register(Job, name="jobs", reapable=reapable)
    quick = Unstuck(postgres.sessions, ALONE, others)
    stuck = await add_job(postgres, idempotent=reapable)
    first: list[Any] = []

    async def sweep_quickly() -> None:
        first.append(await quick.sweep())

    second = await sweep_through_gate(postgres, slow, sweep_quickly)
    assert (first[0].found, second.found) == (1, 0)
    assert await ledger(postgres) == [(str(stuck), "zombie")]
    assert list(await postgres.execute("SELECT zombie_count FROM zombie_records")) == [(1,)]


async def test_what_is_swept_elsewhere_is_left_to_that_sweep(postgres: Database) -> None:
    unstuck = await start(postgres)
    stuck = await add_job(postgres)
    async with postgres.engine.begin() as leader:
        await leader.exec_driver_sql(
            f"SELECT pg_advisory_xact_lock({TRANSACTION._lock_key('sweep jobs')})"
        )
        report = await unstuck.sweep()
    assert report.workflows[0].swept_elsewhere
    assert (report.found, report.errors) == (0, [])
    assert (await get_job(postgres, stuck)).status is Status.Processing
    assert (await unstuck.sweep()).left_processing == 1


async def test_a_sweep_that_only_settles_does_not_lead(postgres: Database) -> None:
    """Else the sweep that still has work to do would leave it to one that is done."""
    unstuck = await start(postgres)
    stuck = await add_job(postgres)
    await unstuck.sweep()
    await change(postgres, stuck, status=Status.Completed)
    found: list[int] = []

    async def sweep_another() -> None:
        await add_job(postgres)
        found.append((await unstuck.sweep()).found)

    with before_statement(postgres, "DELETE FROM zombie_records", sweep_another):
        await unstuck.sweep()
    assert found == [1]


async def test_a_beat_keeps_a_custom_recovery_away(postgres: Database) -> None:
    recovered: list[str] = []

    async def recover(zombie: Any, session: Any) -> None:
        recovered.append(zombie.record_id)

    unstuck = await start(postgres, recover=recover)
    stuck = await add_claimed_job(postgres, uuid4())
    async with postgres.engine.begin() as worker:
        await worker.exec_driver_sql("UPDATE zombie_claims SET heartbeat_at = now()")
        assert (await unstuck.sweep()).left_processing == 0
    assert recovered == []
    assert (await get_job(postgres, stuck)).status is Status.Processing
