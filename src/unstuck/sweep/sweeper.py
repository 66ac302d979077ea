"""One sweep over all workflows: bounded in time, contained, counted.

A workflow that fails is reported by name and does not stop the others; the timer is outside.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from time import monotonic

from sqlalchemy.exc import SQLAlchemyError

from unstuck.db import Sessions
from unstuck.endings import Endings
from unstuck.errors import UnstuckError, describe
from unstuck.events import Observers, SweepReport, WorkflowReport
from unstuck.registry import Registry, Workflow
from unstuck.settings import ZombieSettings
from unstuck.sweep.settling import Settler
from unstuck.sweep.takers import Takers
from unstuck.sweep.workflow_sweep import WorkflowSweep

logger = logging.getLogger("unstuck.sweep")


class Sweeper:
    """Runs sweeps. Any number may run at once, here and in other processes."""

    def __init__(
        self,
        sessions: Sessions,
        settings: ZombieSettings,
        registry: Registry,
        observers: Observers,
    ) -> None:
        self._sessions = sessions
        self._settings = settings
        self._registry = registry
        self._observers = observers
        self._takers = Takers(registry, settings)
        self._settler = Settler(settings)
        self._endings = Endings(sessions, settings, registry, observers)
        self._turn = 0

    async def sweep(self, *, dry_run: bool = False) -> SweepReport:
        started = monotonic()
        report = SweepReport(started_at=datetime.now(UTC), dry_run=dry_run)
        deadline = asyncio.get_running_loop().time() + self._settings.sweep_timeout
        knows_spool = self._sessions.engine is not None
        if knows_spool and not dry_run:
            await self._drain_spool(deadline)
        for workflow in self._in_turn():
            report.workflows.append(await self._sweep_one(workflow, deadline, dry_run=dry_run))
        if not knows_spool and not dry_run:
            await self._drain_spool(deadline)
        report.seconds = monotonic() - started
        logger.log(logging.WARNING if report.changed else logging.DEBUG, "%s", report)
        await self._observers.tell("on_sweep_finished", report)
        return report

    async def _drain_spool(self, deadline: float) -> None:
        """First, for a record whose true end is known is no zombie; or as soon as a session has
        shown whose spool it is."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._endings.drain()
        except TimeoutError:
            logger.error("The spool could not be drained in the time of a sweep")

    def _in_turn(self) -> list[Workflow]:
        """Another workflow goes first each time, so that a slow one cannot starve the rest."""
        workflows = list(self._registry)
        first = self._turn % len(workflows) if workflows else 0
        self._turn += 1
        return workflows[first:] + workflows[:first]

    async def _sweep_one(
        self, workflow: Workflow, deadline: float, *, dry_run: bool
    ) -> WorkflowReport:
        report = WorkflowReport(workflow.name)
        started = monotonic()
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                await WorkflowSweep(
                    workflow,
                    self._takers,
                    self._settler,
                    self._sessions,
                    self._settings,
                    self._observers,
                    report,
                    dry_run=dry_run,
                ).run()
        except TimeoutError as error:
            own = f"the sweep ran into its limit of {self._settings.sweep_timeout:g} s"
            self._blame(report, own if limit.expired() else describe(error))
        except (UnstuckError, SQLAlchemyError, OSError) as error:
            self._blame(report, describe(error))
        except Exception as error:
            logger.exception("Zombie sweep of %s failed unexpectedly", workflow.name)
            report.errors.append(f"{type(error).__name__}: {describe(error)}")
        report.seconds = monotonic() - started
        return report

    def _blame(self, report: WorkflowReport, reason: str) -> None:
        logger.error("Zombie sweep of %s failed: %s", report.workflow, reason)
        report.errors.append(reason)
