"""`Unstuck`, the one object behind the functions: the only place that wires the rooms together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from unstuck import ledger
from unstuck.db import Sessions, SessionSource, create_tables, is_deadlock, transaction
from unstuck.errors import SettingsError, UnstuckError, describe
from unstuck.events import Observers, SweepReport
from unstuck.interventions import (
    CANCEL,
    FAIL,
    RELEASE,
    RETRY,
    Change,
    Intervention,
    intervene,
)
from unstuck.loop import (
    Beating,
    Filters,
    Hearts,
    JobLoop,
    LoopResult,
    Loops,
    Workshop,
    find_workflow,
)
from unstuck.registry import Registry, Workflow
from unstuck.registry import registry as default_registry
from unstuck.schedule import Handle
from unstuck.settings import ZombieSettings, unknown_variables
from unstuck.sweep import Sweeper

logger = logging.getLogger("unstuck")

WorkflowName = str | type[Any] | Workflow


_MOST_WORKSHOPS = 100


class Unstuck:
    """Recovers the records of the workflows in its registry, on one database."""

    def __init__(
        self,
        session_factory: SessionSource = None,
        settings: ZombieSettings | None = None,
        registry: Registry | None = None,
        observers: Iterable[object] = (),
    ) -> None:
        self._source = session_factory
        self.settings = ZombieSettings() if settings is None else settings
        self.registry = default_registry if registry is None else registry
        self._observers = Observers(observers)
        self._tables_wanted = False
        self._hearts: Hearts = {}
        self._workshops: dict[object, Workshop] = {}
        self._loops = Loops()

    async def create_tables(self) -> None:
        """Creates unstuck's own tables where they are missing."""
        await create_tables(self._sessions)

    async def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Brings back what is stuck; with dry_run, only says what it would bring back."""
        if self._tables_wanted and not dry_run:
            await self._create_wanted_tables()
        return await self._sweeper.sweep(dry_run=dry_run)

    def setup(
        self, scheduler: AsyncIOScheduler | None = None, *, create_tables: bool = False
    ) -> Handle:
        """Sweeps from now on, on this scheduler or on one of its own."""
        for sentence in unknown_variables():
            logger.warning(sentence)
        for workflow in self.registry:
            workflow.policy(self.settings)
        self._tables_wanted = create_tables
        self._loops.reopen()
        handle = Handle(self.sweep, self._shut_down, self.settings)
        if not self.settings.cleanup_enabled:
            logger.info("Zombie cleanup is disabled by ZOMBIE_CLEANUP_ENABLED=false")
            return handle
        self._sessions  # noqa: B018 - a wrong URL is better told now than at night
        handle.start(scheduler)
        return handle

    async def run_job_loop(
        self,
        model: type[Any],
        status_enum: Any,
        queued_status: Any,
        processing_status: Any,
        completed_status: Any,
        failed_status: Any,
        processing_function: Callable[..., Any],
        batch_size: int,
        order_by_column: Any = None,
        status_field_name: str = "status",
        error_field_name: str = "error",
        *,
        session_factory: SessionSource = None,
        additional_filters: Filters = None,
        concurrency: int = 1,
        timeout: float | timedelta | None = None,  # noqa: ASYNC109 - of each record
        name: str | None = None,
        drain: bool = False,
    ) -> LoopResult:
        """Claims a batch of queued records and calls `processing_function(item_id, session)` for
        each, or `(item_id, session, claim)`. However a call ends, its record does not stay in
        Processing. With `drain` it goes on until the queue is empty."""
        statuses = (queued_status, processing_status, completed_status, failed_status)
        fields = (status_field_name, error_field_name)
        found = find_workflow(self.registry, model, status_enum, statuses, fields, name)
        loop = JobLoop.of(
            self._workshop(session_factory, concurrency),
            *found,
            processing_function,
            timeout=timeout,
            order=order_by_column,
            name=name,
            batch_size=batch_size,
            concurrency=concurrency,
            filters=additional_filters,
            drain=drain,
        )
        if self._tables_wanted:
            await self._create_wanted_tables()
        return await self._loops.run(loop)

    def heartbeat(
        self,
        workflow: WorkflowName,
        record_id: object,
        *,
        step: str | None = None,
        details: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> Beating:
        """`async with` it around work outside of the job loop, on a record that is in Processing:
        inside, the record counts as alive, whatever blocks, for as long as this process does."""
        return Beating(
            self._workshop(None, 1),
            self.registry.get(workflow),
            record_id,
            step=step,
            details=details,
            worker_id=worker_id,
        )

    async def release(
        self, workflow: WorkflowName, record_id: object, *, by: str, why: str
    ) -> None:
        """Sends a held record back to its queue, with a clean slate."""
        await self._intervene(RELEASE, workflow, record_id, by, why)

    async def fail(self, workflow: WorkflowName, record_id: object, *, by: str, why: str) -> None:
        """Gives up a held record."""
        await self._intervene(FAIL, workflow, record_id, by, why)

    async def retry(self, workflow: WorkflowName, record_id: object, *, by: str, why: str) -> None:
        """Sends a failed record back to its queue, with a clean slate."""
        await self._intervene(RETRY, workflow, record_id, by, why)

    async def cancel(self, workflow: WorkflowName, record_id: object, *, by: str, why: str) -> None:
        """Fails a record that is being processed; whatever its worker still brings is refused."""
        await self._intervene(CANCEL, workflow, record_id, by, why)

    async def history(self, workflow: WorkflowName, record_id: object) -> list[ledger.Entry]:
        """A record's whole story, oldest first."""
        registered = self.registry.get(workflow)
        async with transaction(self._sessions, self.settings) as tx:
            return await ledger.read_history(
                tx.connection, registered.name, registered.write_key(record_id)
            )

    async def count_zombies(self, since: datetime, until: datetime) -> list[ledger.ZombieCount]:
        """How many zombies there were in a span of time, by workflow, cause and outcome."""
        async with transaction(self._sessions, self.settings) as tx:
            return await ledger.count_zombies(tx.connection, since, until)

    async def repeat_offenders(
        self, more_than: int, since: datetime | None = None
    ) -> list[ledger.RepeatOffender]:
        """The records that have been zombies more than that many times, worst first."""
        async with transaction(self._sessions, self.settings) as tx:
            return await ledger.list_repeat_offenders(tx.connection, more_than, since)

    async def has_recovered(self, workflow: WorkflowName, record_id: object) -> bool:
        """Whether a record completed cleanly after it was last a zombie."""
        registered = self.registry.get(workflow)
        async with transaction(self._sessions, self.settings) as tx:
            return await ledger.has_recovered(
                tx.connection, registered.name, registered.write_key(record_id)
            )

    async def close(self) -> None:
        """Closes the engine, if it is one that unstuck opened itself."""
        if "_sessions" in self.__dict__:
            await self._sessions.close()
        for workshop in self._workshops.values():
            await workshop.sessions.close()

    async def _shut_down(self) -> None:
        """The loops first, for as long as that may take: an application that has ended its lifespan
        is soon killed."""
        await self._loops.stop(self.settings.shutdown_timeout_seconds)
        await self.close()

    async def _create_wanted_tables(self) -> None:
        """At the first sweep that can; until then each sweep says why it cannot."""
        try:
            await self.create_tables()
        except (UnstuckError, SQLAlchemyError, OSError) as error:
            logger.error("The tables of unstuck cannot be created: %s", describe(error))
        else:
            self._tables_wanted = False

    async def _intervene(
        self, intervention: Intervention, name: WorkflowName, record: object, by: str, why: str
    ) -> None:
        workflow = self.registry.get(name)
        try:
            change = await self._carry_out(intervention, workflow, record, by, why)
        except DBAPIError as error:
            if not is_deadlock(error):
                raise
            # With the record's own worker, which locked its claim first; it is through by now.
            change = await self._carry_out(intervention, workflow, record, by, why)
        logger.warning(
            "%s %s was %s by %s: %s", change.workflow, change.record_id, intervention.kind, by, why
        )
        await self._observers.tell(
            "on_status_changed", change.workflow, change.record_id, change.old, change.new
        )

    async def _carry_out(
        self, intervention: Intervention, workflow: Workflow, record: object, by: str, why: str
    ) -> Change:
        siblings = self.registry.siblings(workflow)
        async with transaction(self._sessions, self.settings, time_zone=workflow.time_zone) as tx:
            return await intervene(
                tx, intervention, workflow, record, by=by, why=why, siblings=siblings
            )

    @cached_property
    def _sessions(self) -> Sessions:
        return Sessions(self._find_source())

    def _find_source(self) -> SessionSource:
        if self._source is not None:
            return self._source
        if self.settings.database_url is None:
            raise SettingsError(
                "There is no database to clean: pass session_factory=, or set ZOMBIE_DATABASE_URL "
                "or DATABASE_URL."
            )
        return self.settings.database_url.get_secret_value()

    def _workshop(self, source: SessionSource, concurrency: int) -> Workshop:
        """What the loops on one source share. From a URL it is a pool of unstuck's own, as large
        as the loop needs it."""
        source = self._find_source() if source is None else source
        key = (source, concurrency) if isinstance(source, str | URL) else source
        if key not in self._workshops:
            if len(self._workshops) >= _MOST_WORKSHOPS:  # a source that is made anew for each call
                self._workshops.pop(next(iter(self._workshops)))
            sessions = Sessions(source, size=concurrency)
            self._workshops[key] = Workshop(
                sessions, self.settings, self.registry, self._observers, self._hearts
            )
        return self._workshops[key]

    @cached_property
    def _sweeper(self) -> Sweeper:
        return Sweeper(self._sessions, self.settings, self.registry, self._observers)
