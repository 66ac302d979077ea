"""Sweeps on a timetable, waited for by their reports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from tests.database import Database
from tests.jobs import start
from unstuck import Observer, Unstuck, ZombieSettings
from unstuck.events import SweepReport

AT_ONCE: dict[str, Any] = {"first_sweep_seconds": 0, "cleanup_jitter_seconds": 0}
OFTEN: dict[str, Any] = {**AT_ONCE, "cleanup_interval_minutes": 0.01}


class Reports(Observer):
    """The reports of sweeps, as they come."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[SweepReport] = asyncio.Queue()

    def on_sweep_finished(self, report: SweepReport) -> None:
        self._queue.put_nowait(report)

    async def next(self) -> SweepReport:
        async with asyncio.timeout(30):
            return await self._queue.get()

    async def next_that_took(self) -> SweepReport:
        """Past those that found nothing, or that a busy machine kept from their short limit."""
        async with asyncio.timeout(30):
            while not (report := await self._queue.get()).left_processing:
                pass
        return report


async def start_reporting(
    database: Database, source: Any = None, **settings: Any
) -> tuple[Unstuck, Reports]:
    """`start` of tests.jobs, on any session source, with the reports of its sweeps."""
    prepared, reports = await start(database), Reports()
    given = database.sessions if source is None else source
    unstuck = Unstuck(given, ZombieSettings(**settings), prepared.registry, [reports])
    return unstuck, reports


@asynccontextmanager
async def running(scheduler: AsyncIOScheduler) -> AsyncIterator[AsyncIOScheduler]:
    """The host's scheduler, as its lifespan starts and stops it."""
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.shutdown(wait=False)
        await asyncio.sleep(0)  # it stops at the loop's next turn
