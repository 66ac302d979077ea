"""Counts what a sweep did and tells the observers, after the commit."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy.engine import Row

from unstuck.claims import key_of
from unstuck.decisions import Outcome
from unstuck.events import Hung, MassStall, Observers, WorkflowReport, Zombie
from unstuck.registry import Workflow

logger = logging.getLogger("unstuck.sweep")


class Teller:
    """Tells of one workflow's zombies."""

    def __init__(
        self, workflow: Workflow, observers: Observers, report: WorkflowReport, *, dry_run: bool
    ) -> None:
        self._workflow = workflow
        self._observers = observers
        self._names_records = dry_run or observers.care_for_records
        self._report = report
        self._dry_run = dry_run
        self._statuses = {
            Outcome.requeued: workflow.queued,
            Outcome.failed: workflow.exhausted,
            Outcome.held: workflow.held,
        }

    def zombie(self, row: Row[Any]) -> Zombie:
        key = key_of(row)
        return Zombie(
            workflow=self._workflow.name,
            record_id=row.record_id,
            identity=key[0] if len(key) == 1 else key,
            cause=row.cause,
            outcome=Outcome(row.outcome),
            zombie_count=row.zombie_count,
            stale_seconds=row.stale_seconds,
            worker_id=row.worker_id,
            details=row.details,
        )

    async def tell(self, row: Row[Any]) -> None:
        if not self._names_records:
            self._report.count(row.outcome, row.stale_seconds, mute=row.mute, left=row.moves)
            return
        zombie = self.zombie(row)
        await self.tell_settled(row, zombie, row.moves, self._statuses.get(zombie.outcome))

    async def tell_settled(self, row: Row[Any], zombie: Zombie, left: bool, new: Any) -> None:
        """`left`: whether the record left Processing, for the status `new`."""
        tell = self._observers.tell
        self._report.count(zombie.outcome, zombie.stale_seconds, mute=row.mute, left=left)
        if self._dry_run:
            self._report.zombies.append(zombie)
            return
        if zombie.outcome is Outcome.skipped:
            return
        if not row.due:
            await tell("on_zombie_detected", zombie)
        if left:
            await tell("on_status_changed", zombie.workflow, zombie.record_id, row.status, new)
        await tell(f"on_{zombie.outcome}", zombie)

    async def tell_hung(self, rows: list[Any]) -> None:
        for row in rows:
            hung = Hung(self._workflow.name, row.record_id, row.worker_id, row.seconds)
            logger.error(
                "%s %s has been in work for %.0f s by %s, which still beats: is it hung?",
                hung.workflow,
                hung.record_id,
                hung.seconds,
                hung.worker_id,
            )
            self._report.hung += 1
            await self._observers.tell("on_hung", hung)

    async def tell_stall(self, stall: MassStall | None) -> None:
        if stall is None:
            return
        logger.error(
            "Mass stall: at least %d zombies of %s at once; they are requeued without a strike",
            stall.zombies,
            stall.workflow,
        )
        await self._observers.tell("on_mass_stall", stall)
