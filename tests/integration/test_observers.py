"""Observers are told after the commit, of everything, and stop nothing."""

from typing import Any

from tests.database import Database
from tests.jobs import Status, add_job, get_job, get_stuck_again, start
from tests.lookup import Witness
from unstuck import Observer
from unstuck.events import MassStall, SweepReport, Zombie


class Reader(Observer):
    """Reads the record on another connection when it is told of it: is it true yet?"""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.seen: list[tuple[str, Status]] = []

    async def _read(self, method: str, record_id: str) -> None:
        self.seen.append((method, (await get_job(self.database, int(record_id))).status))

    async def on_zombie_detected(self, zombie: Zombie) -> None:
        await self._read("on_zombie_detected", zombie.record_id)

    async def on_status_changed(self, workflow: str, record_id: str, old: Any, new: Any) -> None:
        await self._read("on_status_changed", record_id)

    async def on_requeued(self, zombie: Zombie) -> None:
        await self._read("on_requeued", zombie.record_id)

    async def on_failed(self, zombie: Zombie) -> None:
        await self._read("on_failed", zombie.record_id)

    async def on_held(self, zombie: Zombie) -> None:
        await self._read("on_held", zombie.record_id)

    async def on_recovered(self, zombie: Zombie) -> None:
        await self._read("on_recovered", zombie.record_id)

    async def on_mass_stall(self, stall: MassStall) -> None:
        rows = await self.database.execute("SELECT 1 FROM zombie_events WHERE kind = 'mass_stall'")
        self.seen += [("on_mass_stall", Status.Waiting)] * len(rows)


async def test_observers_are_told_after_the_commit(database: Database) -> None:
    reader = Reader(database)
    unstuck = await start(
        database, observers=[reader], max_resets=1, reapable="idempotent", held=Status.Held
    )
    job = await add_job(database, idempotent=True)
    told = ["on_zombie_detected", "on_status_changed"]
    await unstuck.sweep()
    assert reader.seen == [(m, Status.Queued) for m in (*told, "on_requeued")]

    reader.seen.clear()
    await get_stuck_again(database, job)
    await unstuck.sweep()
    assert reader.seen == [(m, Status.Failed) for m in (*told, "on_failed")]

    reader.seen.clear()
    await add_job(database, idempotent=False)
    await unstuck.sweep()
    assert reader.seen == [(m, Status.Held) for m in (*told, "on_held")]


async def test_a_recovery_is_told_of_after_its_commit(database: Database) -> None:
    async def recover(zombie: Zombie, session: object) -> None: ...

    reader = Reader(database)
    unstuck = await start(database, observers=[reader], recover=recover)
    await add_job(database)
    await unstuck.sweep()
    assert reader.seen[-1] == ("on_recovered", Status.Queued)


async def test_a_mass_stall_and_a_decision_are_told_of_after_their_commit(
    database: Database,
) -> None:
    reader = Reader(database)
    unstuck = await start(database, observers=[reader], settings={"mass_stall_records": 1})
    job = await add_job(database)
    await unstuck.sweep()
    assert reader.seen[0] == ("on_mass_stall", Status.Waiting)
    reader.seen.clear()
    await get_stuck_again(database, job)
    await unstuck.cancel("jobs", job, by="ada", why="asked to")
    assert reader.seen == [("on_status_changed", Status.Failed)]


async def test_what_observers_are_told(database: Database) -> None:
    witness = Witness()
    unstuck = await start(database, observers=[witness])
    job = await add_job(database)
    report = await unstuck.sweep()
    (zombie,) = witness.heard("on_zombie_detected")
    assert witness.heard("on_requeued") == [zombie]
    assert (zombie.workflow, zombie.record_id, zombie.identity) == ("jobs", str(job), job)
    assert (zombie.cause, zombie.outcome, zombie.zombie_count) == ("aged", "requeued", 1)
    assert witness.heard("on_status_changed") == [
        ("jobs", str(job), Status.Processing, Status.Queued)
    ]
    assert witness.heard("on_sweep_finished") == [report]


async def test_a_deferred_or_marked_record_has_not_changed_its_status(database: Database) -> None:
    witness = Witness()
    unstuck = await start(database, observers=[witness], reapable="idempotent")
    job = await add_job(database, idempotent=True)
    await unstuck.sweep()
    await get_stuck_again(database, job)
    await add_job(database, idempotent=False)
    witness.calls.clear()
    await unstuck.sweep()
    assert len(witness.heard("on_deferred")) == len(witness.heard("on_held")) == 1
    assert witness.heard("on_status_changed") == []


async def test_an_observer_that_raises_costs_no_record_its_sweep(database: Database) -> None:
    class Broken(Observer):
        def on_requeued(self, zombie: Zombie) -> None:
            raise RuntimeError("the pager is down")

        async def on_sweep_finished(self, report: SweepReport) -> None:
            raise RuntimeError("the pager is still down")

    witness = Witness()
    unstuck = await start(database, observers=[Broken(), witness], settings={"batch_size": 2})
    for _ in range(5):
        await add_job(database)
    report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], 5)
    assert len(witness.heard("on_requeued")) == 5
    assert len(witness.heard("on_sweep_finished")) == 1
