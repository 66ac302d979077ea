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

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from unstuck.errors import SettingsError
from unstuck.events import SweepReport
from unstuck.settings import ZombieSettings

logger = logging.getLogger("unstuck.schedule")

JOB_ID = "cleanup_zombie_records"
JOB_NAME = "Zombie Record Cleanup"
# A store and an executor of our own: the job is a bound method, which no persistent store could
# keep, and a coroutine, which a host's default thread pool would never await.
_OURS = "unstuck"
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
            self._leave(scheduler)
        for task in tuple(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=_PATIENCE)
        await self._close()

    def start(self, scheduler: AsyncIOScheduler | None) -> None:
        """Puts the job on the host's scheduler, or on one of its own."""
        self._owns_scheduler = scheduler is None
        self.scheduler = _own_scheduler() if scheduler is None else _checked(scheduler)
        _make_room(self.scheduler)
        settings = self.settings
        first = timedelta(seconds=settings.first_sweep_seconds)
        self.scheduler.add_job(
            self._run,
            IntervalTrigger(seconds=settings.interval, jitter=settings.jitter or None),
            id=JOB_ID,
            name=JOB_NAME,
            jobstore=_OURS,
            executor=_OURS,
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
        limit = self.settings.sweep_timeout + _PATIENCE
        try:
            done, _ = await asyncio.wait({task}, timeout=limit)
            if not done:
                task.cancel()
                done, _ = await asyncio.wait({task}, timeout=_PATIENCE)
                end = "ended" if done else "left behind, for it does not end"
                logger.error("A zombie sweep ran for more than %g s and is %s", limit, end)
        except asyncio.CancelledError:  # the host has shut its scheduler down
            task.cancel()
            raise
        if done and not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Zombie sweep failed", exc_info=error)

    def _leave(self, scheduler: AsyncIOScheduler) -> None:
        job = scheduler.get_job(JOB_ID, _OURS)
        if job is not None and job.func == self._run:  # and not that of a later set-up
            job.remove()
        if self._owns_scheduler and scheduler.running:
            scheduler.shutdown(wait=False)


def _own_scheduler() -> AsyncIOScheduler:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise SettingsError(
            "setup_zombie_cleanup_scheduler() without a scheduler needs a running event loop: call "
            "it inside the lifespan of the application."
        ) from None
    return AsyncIOScheduler(event_loop=loop)


def _make_room(scheduler: AsyncIOScheduler) -> None:
    """What an earlier set-up on this scheduler left is kept; only its job goes."""
    with suppress(ValueError):
        scheduler.add_jobstore(MemoryJobStore(), alias=_OURS)
    with suppress(ValueError):
        scheduler.add_executor(AsyncIOExecutor(), alias=_OURS)
    # A scheduler that was not started yet would keep both jobs until it is.
    if (earlier := scheduler.get_job(JOB_ID, _OURS)) is not None:
        earlier.remove()


def _checked(scheduler: object) -> AsyncIOScheduler:
    if isinstance(scheduler, AsyncIOScheduler):
        return scheduler
    raise SettingsError(
        f"scheduler={type(scheduler).__name__} cannot await a sweep: pass an AsyncIOScheduler, or "
        "none at all and unstuck starts its own."
    )
