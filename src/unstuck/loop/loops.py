"""The loops that run in this process, so that they can be ended together."""

from __future__ import annotations

import asyncio
import logging

from unstuck.events import is_being_cancelled
from unstuck.loop.job_loop import JobLoop
from unstuck.loop.result import LoopResult

logger = logging.getLogger("unstuck.loop")

# Beyond what a loop itself may take: the statements that are under way.
_PATIENCE = 5.0


class Loops:
    """Runs loops until it is told to stop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[LoopResult]] = set()
        self._is_open = True

    def reopen(self) -> None:
        self._is_open = True

    async def run(self, loop: JobLoop) -> LoopResult:
        """A loop that is stopped from here gives its result, as if there had been no more to do."""
        if not self._is_open:
            return loop.refuse("unstuck was shut down")
        task = asyncio.create_task(loop.run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            return loop.result

    async def stop(self, seconds: float) -> None:
        """Waits until every record that was claimed is somewhere else than in Processing."""
        self._is_open = False
        running = set(self._running)
        mine = {task for task in running if task.get_loop() is asyncio.get_running_loop()}
        for task in mine:
            task.cancel()
        if mine:
            _, left = await asyncio.wait(mine, timeout=2 * seconds + _PATIENCE)
            for task in left:
                logger.error("A job loop does not end: %s", task)
