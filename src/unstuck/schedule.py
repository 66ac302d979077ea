"""The adapter to APScheduler 3: one job, and a handle to it.

A sweep that hangs would, with one instance at most, be the last sweep ever: so a run is ended when
its time is up, and left behind if it will not end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta

from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from unstuck.errors import SettingsError
from unstuck.events import SweepReport
from unstuck.settings import ZombieSettings

logger = logging.getLogger("unstuck.schedule")

JOB_ID = "cleanup_zombie_records"
JOB_NAME = "Zombie Record Cleanup"
# A store of our own, in memory: the job is a bound method, which no persistent store could keep.
_JOB_STORE = "unstuck"
_PATIENCE = 10.0


class Handle:
    """What `setup` gives back: run a sweep now, or stop sweeping."""

    def __init__(
        self,
        sweep: Callable[[], Awaitable[SweepReport]],
        close: Callable[[], Awaitable[None]],
        settings: ZombieSettings,
    ) -> None:
        self.settings = settings
        self.scheduler: AsyncIOScheduler | None = None
        self._sweep = sweep
        self._close = close
        self._owns_scheduler = False
        self._running: set[asyncio.Task[SweepReport]] = set()

    async def run_now(self) -> SweepReport:
        """Sweeps at once, beside the timetable."""
        return await self._sweep()

    async def shutdown(self) -> None:
        """Takes the job off the timetable, ends a sweep under way, closes what was opened."""
        scheduler, self.scheduler = self.scheduler, None
        if scheduler is not None:
            with suppress(JobLookupError):
                scheduler.remove_job(JOB_ID)
            if self._owns_scheduler and scheduler.running:
                scheduler.shutdown(wait=False)
        for task in tuple(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=_PATIENCE)
        await self._close()

    def start(self, scheduler: AsyncIOScheduler | None) -> None:
        """Puts the job on the host's scheduler, or on one of its own."""
        self._owns_scheduler = scheduler is None
        self.scheduler = _own_scheduler() if scheduler is None else _checked(scheduler)
        with suppress(ValueError):  # there already, from an earlier set-up on this scheduler
            self.scheduler.add_jobstore("memory", alias=_JOB_STORE)
        settings = self.settings
        first = timedelta(seconds=settings.first_sweep_seconds)
        self.scheduler.add_job(
            self._run,
            IntervalTrigger(seconds=settings.interval, jitter=settings.jitter or None),
            id=JOB_ID,
            name=JOB_NAME,
            jobstore=_JOB_STORE,
            replace_existing=True,
            max_instances=1,
            coalesce=True,
            misfire_grace_time=None,
            next_run_time=datetime.now(self.scheduler.timezone) + first,
        )
        if self._owns_scheduler:
            self.scheduler.start()

    async def _run(self) -> None:
        """One run on the timetable: never longer than its limit, never the host's trouble."""
        task = asyncio.ensure_future(self._sweep())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        done, _ = await asyncio.wait({task}, timeout=self.settings.sweep_timeout + _PATIENCE)
        if not done:
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=_PATIENCE)
        if not done:
            logger.error(
                "A zombie sweep does not end and is left behind; the next one is due anyway"
            )
        elif not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Zombie sweep failed", exc_info=error)


def _own_scheduler() -> AsyncIOScheduler:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise SettingsError(
            "setup_zombie_cleanup_scheduler() without a scheduler needs a running event loop: call "
            "it inside the lifespan of the application."
        ) from None
    return AsyncIOScheduler(event_loop=loop)


def _checked(scheduler: object) -> AsyncIOScheduler:
    if isinstance(scheduler, AsyncIOScheduler):
        return scheduler
    raise SettingsError(
        f"scheduler={type(scheduler).__name__} cannot await a sweep: pass an AsyncIOScheduler, or "
        "none at all and unstuck starts its own."
    )
