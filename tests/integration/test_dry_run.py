import uuid
from dataclasses import replace
from typing import Any

import pytest

from tests.database import Database
from tests.jobs import HOUR, Status, add_claim, add_job, ago, start
from tests.lookup import Witness, read_everything, remember
from unstuck import Unstuck
from unstuck.events import SweepReport, Zombie


class Listener(Witness):
    """Keeps the last zombie it was told of for each record, with its outcome."""

    def zombies(self) -> list[Zombie]:
        told = [call[1][0] for call in self.calls if call[0] in _OUTCOMES]
        return sorted(told, key=lambda zombie: int(zombie.record_id))


_OUTCOMES = ("on_requeued", "on_deferred", "on_failed", "on_held", "on_recovered")


async def start_with_every_kind(database: Database, batch_size: int) -> tuple[Unstuck, Listener]:
    """Jobs of every outcome, in no tidy order, and some that no sweep may take."""
    listener = Listener()
    unstuck = await start(
        database,
        settings={"batch_size": batch_size},
        reapable="idempotent",
        lease="leased_until",
        max_resets=2,
        observers=[listener],
    )
    memories: list[dict[str, Any]] = [
        {"zombie_count": 1},  # is deferred
        {"zombie_count": 2},  # is given up
        {"zombie_count": 2, "deferred_at": ago(HOUR), "retry_at": ago(1)},  # is due
        {"zombie_count": 2, "deferred_at": ago(HOUR), "retry_at": ago(-HOUR)},  # waits
        {"zombie_count": 1, "held_at": ago(HOUR)},  # is held already
        {"zombie_count": 1, "held_at": ago(3 * HOUR)},  # was held, and lived since
    ]
    for _ in range(3):
        for memory in memories:
            await remember(database, await add_job(database, idempotent=True), **memory)
        await add_job(database, idempotent=True)
        await add_job(database, idempotent=False)
        await add_job(database, idempotent=True, leased_until=ago(HOUR), updated_at=ago(1))
        await add_claim(database, await add_job(database), token=uuid.uuid4())
        lost = await add_job(database, idempotent=True)
        await add_claim(database, lost, token=uuid.uuid4(), started_at=ago(2 * HOUR))
        await add_job(database, updated_at=None)
        await add_job(database, updated_at=ago(60))
        await add_job(database, status=Status.Completed)
    return unstuck, listener


def named(zombies: list[Zombie]) -> list[Zombie]:
    """By name, without the time that passed between two sweeps."""
    ordered = sorted(zombies, key=lambda zombie: int(zombie.record_id))
    return [replace(zombie, stale_seconds=0) for zombie in ordered]


def counted(report: SweepReport) -> dict[str, object]:
    counts = ("found", "requeued", "deferred", "failed", "held", "recovered", "skipped", "locked")
    return {name: report.total(name) for name in (*counts, "left_processing")}


@pytest.mark.parametrize("batch_size", [4, 1000])
@pytest.mark.parametrize("indexed", [False, True])
async def test_a_dry_run_names_what_the_real_run_takes(
    database: Database, batch_size: int, indexed: bool
) -> None:
    unstuck, listener = await start_with_every_kind(database, batch_size)
    if indexed:
        await database.execute("CREATE INDEX stuck ON jobs (id) WHERE status = 'Processing'")
    dry = await unstuck.sweep(dry_run=True)
    real = await unstuck.sweep()
    assert dry.errors == real.errors == []
    taken = [zombie for zombie in dry.zombies if zombie.outcome != "skipped"]
    assert named(taken) == named(listener.zombies())
    assert counted(dry) == counted(real)
    outcomes = {zombie.outcome.value for zombie in dry.zombies}
    assert outcomes == {"requeued", "deferred", "failed", "held", "skipped"}
    assert len({zombie.record_id for zombie in dry.zombies}) == len(dry.zombies)
    assert real.zombies == []


@pytest.mark.parametrize("batch_size", [4, 1000])
async def test_a_dry_run_writes_nothing_and_tells_nobody_of_records(
    database: Database, batch_size: int
) -> None:
    unstuck, listener = await start_with_every_kind(database, batch_size)
    before = await read_everything(database)
    report = await unstuck.sweep(dry_run=True)
    assert report.found > 4
    assert await read_everything(database) == before
    assert [name for name, _ in listener.calls] == ["on_sweep_finished"]
    assert "would take" in str(report)


@pytest.mark.parametrize("batch_size", [2, 1000])
async def test_a_dry_run_calls_no_custom_recovery(database: Database, batch_size: int) -> None:
    called = []

    async def recover(zombie: Zombie, session: object) -> None:
        called.append(zombie.record_id)

    unstuck = await start(database, recover=recover, settings={"batch_size": batch_size})
    jobs = [await add_job(database) for _ in range(5)]
    before = await read_everything(database)
    report = await unstuck.sweep(dry_run=True)
    assert called == []
    assert await read_everything(database) == before
    assert sorted(zombie.identity for zombie in report.zombies) == jobs
    assert {zombie.outcome.value for zombie in report.zombies} == {"recovered"}

    await unstuck.sweep()
    assert sorted(called) == sorted(zombie.record_id for zombie in report.zombies)


async def test_a_dry_run_stops_at_the_cap_as_the_real_run_does(database: Database) -> None:
    unstuck = await start(database, settings={"batch_size": 2, "max_per_sweep": 5})
    for number in (5, 8, 1, 7, 2, 6, 3, 4):  # a walk by key has to sort them
        await add_job(database, id=number)
    await database.execute("CREATE INDEX stuck ON jobs (id) WHERE status = 'Processing'")
    dry = (await unstuck.sweep(dry_run=True)).workflows[0]
    real = (await unstuck.sweep()).workflows[0]
    assert (dry.found, dry.capped) == (real.found, real.capped) == (5, True)
    taken = await database.execute("SELECT id FROM jobs WHERE status = 'Queued' ORDER BY id")
    assert (
        [zombie.identity for zombie in dry.zombies] == [row.id for row in taken] == [*range(1, 6)]
    )
