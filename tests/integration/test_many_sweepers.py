"""Eight real processes, started together, on one database."""

import asyncio
import multiprocessing
import os
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest

from tests.database import Database
from tests.jobs import HOUR, Base, Job, Status, ago
from unstuck import Registry, Unstuck, ZombieSettings, metadata

SWEEPERS = 8
ZOMBIES = 5000
SETTINGS: dict[str, Any] = {"batch_size": 100, "mass_stall_records": 0}
_PATIENCE = 90.0


def sweep(url: str, start: Barrier, answer: Connection, led: bool) -> None:
    """What each process runs. If it is not led, it asks for a lock that no other asks for."""
    if not led:
        vars(import_module("unstuck.db.transaction"))["_lock_key"] = lambda _: os.getpid()
    answer.send(asyncio.run(_sweep(url, start)))


async def _sweep(url: str, start: Barrier) -> tuple[int, list[str]]:
    registry = Registry()
    registry.register(Job, name="jobs")
    database = Database(url)
    await database.execute("SELECT 1")  # so that all of them are connected before the start
    start.wait(_PATIENCE)
    report = await Unstuck(database.sessions, ZombieSettings(**SETTINGS), registry).sweep()
    await database.dispose()
    return report.left_processing, report.errors


async def sweep_at_once(url: str, *, led: bool) -> list[tuple[int, list[str]]]:
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(SWEEPERS)
    pipes = [spawn.Pipe(duplex=False) for _ in range(SWEEPERS)]
    processes = [spawn.Process(target=sweep, args=(url, start, there, led)) for _, there in pipes]
    for process in processes:
        process.start()
    for _, there in pipes:
        there.close()  # so that a process that dies ends the wait for its answer
    try:
        return [await asyncio.to_thread(here.recv) for here, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for here, _ in pipes:
            here.close()


async def fill(database: Database) -> None:
    await database.create(Base.metadata)
    await database.create(metadata)
    async with database.sessions.begin() as session:
        session.add_all(
            Job(status=Status.Processing, updated_at=ago(2 * HOUR)) for _ in range(ZOMBIES)
        )


async def check_that_each_is_taken_once(database: Database, *, led: bool = True) -> None:
    answers = await sweep_at_once(database.url, led=led)
    assert [errors for _, errors in answers] == [[]] * SWEEPERS
    assert sum(taken for taken, _ in answers) == ZOMBIES
    statuses = await database.execute("SELECT status, count(*) FROM jobs GROUP BY status")
    assert [tuple(row) for row in statuses] == [("Queued", ZOMBIES)]
    for table in ("zombie_records", "zombie_events"):
        counts = "count(*), count(DISTINCT record_id), min(zombie_count), max(zombie_count)"
        rows = await database.execute(f"SELECT {counts} FROM {table}")
        assert tuple(rows[0]) == (ZOMBIES, ZOMBIES, 1, 1)


async def test_eight_processes_take_each_of_5000_zombies_once(database: Database) -> None:
    await fill(database)
    await check_that_each_is_taken_once(database)


@pytest.mark.parametrize("led", [True, False])
async def test_eight_walks_take_each_of_5000_zombies_once_whether_or_not_one_leads(
    postgres: Database, led: bool
) -> None:
    await fill(postgres)
    await postgres.execute("CREATE INDEX walk ON jobs (id) WHERE status = 'Processing'")
    await check_that_each_is_taken_once(postgres, led=led)
