"""What the settings accept, the database can do: no accepted value stops a sweep."""

from typing import Any

import annotated_types
import pytest

from tests.database import Database
from tests.jobs import Status, add_job, get_job, get_stuck_again, start
from unstuck import ZombieSettings


def greatest(field: str) -> Any:
    limits = ZombieSettings.model_fields[field].metadata
    return next(limit.le for limit in limits if isinstance(limit, annotated_types.Le))


BOUNDED = [
    name
    for name, field in ZombieSettings.model_fields.items()
    if any(isinstance(limit, annotated_types.Le) for limit in field.metadata)
]


def test_the_fields_with_a_limit_are_found() -> None:
    assert {"stuck_threshold_minutes", "lock_timeout_seconds", "max_resets"} <= set(BOUNDED)


async def test_the_greatest_of_everything(database: Database) -> None:
    settings = {name: greatest(name) for name in BOUNDED}
    unstuck = await start(database, settings=settings)
    alive = await add_job(database)
    report = await unstuck.sweep()
    assert (report.errors, report.found) == ([], 0)
    assert (await get_job(database, alive)).status is Status.Processing


@pytest.mark.parametrize("field", ["backoff_base_seconds", "mass_stall_spread_seconds"])
async def test_the_greatest_wait(database: Database, field: str) -> None:
    most = greatest(field)
    settings = {field: most, "backoff_max_seconds": most, "mass_stall_records": 2}
    if field == "backoff_base_seconds":
        settings["mass_stall_records"] = 0
    unstuck = await start(database, settings=settings, retry_at="retry_at")
    jobs = [await add_job(database) for _ in range(2)]
    await unstuck.sweep()
    for job in jobs:
        await get_stuck_again(database, job)
    report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], 2)
    assert None not in [(await get_job(database, job)).retry_at for job in jobs]


async def test_the_least_of_everything(database: Database) -> None:
    least = 1e-9
    settings = {
        "stuck_threshold_minutes": least,
        "lock_timeout_seconds": least,
        "mass_stall_window_minutes": least,
        "batch_size": 1,
        "max_per_sweep": 1,
    }
    unstuck = await start(database, settings=settings)
    job = await add_job(database)
    report = await unstuck.sweep()
    assert (report.errors, report.left_processing) == ([], 1)
    assert (await get_job(database, job)).status is Status.Queued
