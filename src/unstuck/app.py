"""`Unstuck`, the one object behind the functions: the only place that wires the rooms together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy.exc import SQLAlchemyError

from unstuck import ledger
from unstuck.db import Sessions, SessionSource, create_tables, transaction
from unstuck.errors import SettingsError, UnstuckError, describe
from unstuck.events import Observers, SweepReport
from unstuck.interventions import CANCEL, FAIL, RELEASE, RETRY, Intervention, intervene
from unstuck.registry import Registry, Workflow
from unstuck.registry import registry as default_registry
from unstuck.schedule import Handle
from unstuck.settings import ZombieSettings, unknown_variables
from unstuck.sweep import Sweeper

logger = logging.getLogger("unstuck")

WorkflowName = str | type[Any] | Workflow


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
        handle = Handle(self.sweep, self.close, self.settings)
        if not self.settings.cleanup_enabled:
            logger.info("Zombie cleanup is disabled by ZOMBIE_CLEANUP_ENABLED=false")
            return handle
        self._sessions  # noqa: B018 - a wrong URL is better told now than at night
        handle.start(scheduler)
        return handle

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
        async with transaction(self._sessions, self.settings, time_zone=workflow.time_zone) as tx:
            change = await intervene(
                tx,
                intervention,
                workflow,
                record,
                by=by,
                why=why,
                siblings=self.registry.siblings(workflow),
            )
        logger.warning(
            "%s %s was %s by %s: %s", change.workflow, change.record_id, intervention.kind, by, why
        )
        await self._observers.tell(
            "on_status_changed", change.workflow, change.record_id, change.old, change.new
        )

    @cached_property
    def _sessions(self) -> Sessions:
        if self._source is not None:
            return Sessions(self._source)
        if self.settings.database_url is None:
            raise SettingsError(
                "There is no database to clean: pass session_factory=, or set ZOMBIE_DATABASE_URL "
                "or DATABASE_URL."
            )
        return Sessions(self.settings.database_url.get_secret_value())

    @cached_property
    def _sweeper(self) -> Sweeper:
        return Sweeper(self._sessions, self.settings, self.registry, self._observers)


class _Default:
    """The instance behind the module-level functions, and what it was made with."""

    instance: Unstuck | None = None
    parameters: Mapping[str, Any] = MappingProxyType({})


def configure(
    session_factory: SessionSource = None,
    settings: ZombieSettings | None = None,
    registry: Registry | None = None,
    observers: Iterable[object] = (),
) -> Unstuck:
    """Sets what the module-level functions work with."""
    return _configure(
        session_factory=session_factory, settings=settings, registry=registry, observers=observers
    )


def _configure(**parameters: Any) -> Unstuck:
    _Default.instance, _Default.parameters = Unstuck(**parameters), parameters
    return _Default.instance


def default() -> Unstuck:
    return configure() if _Default.instance is None else _Default.instance


def setup_zombie_cleanup_scheduler(
    scheduler: AsyncIOScheduler | None = None,
    session_factory: SessionSource = None,
    *,
    settings: ZombieSettings | None = None,
    registry: Registry | None = None,
    create_tables: bool = False,
) -> Handle:
    """Sweeps from now on. Call it in the lifespan of the application.

    Without a scheduler it starts its own; without a session factory it opens a tiny pool of its own
    from ZOMBIE_DATABASE_URL or DATABASE_URL. What `configure` was told holds, unless told anew.
    """
    given = {"session_factory": session_factory, "settings": settings, "registry": registry}
    said = {name: value for name, value in given.items() if value is not None}
    unstuck = _configure(**{**_Default.parameters, **said}) if said else default()
    return unstuck.setup(scheduler, create_tables=create_tables)


async def cleanup_zombie_records() -> int:
    """Runs one sweep; the number of records that it took out of Processing."""
    return (await default().sweep()).left_processing
