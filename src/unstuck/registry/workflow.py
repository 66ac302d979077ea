"""A workflow: one status column of one model, and the policy for its zombies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    FromClause,
    Integer,
    Table,
    and_,
    false,
    func,
    literal,
    true,
)
from sqlalchemy.orm import Mapper

from unstuck import identity
from unstuck.decisions import Policy
from unstuck.errors import RegistrationError, UnknownRecord
from unstuck.recovery import Step
from unstuck.settings import ZombieSettings

Reapable = bool | Column[Any] | Callable[[Any], ColumnElement[bool]]


@dataclass(frozen=True, eq=False)
class Workflow:
    """Columns are those of the host's tables; statuses are as the host's mapping takes them."""

    name: str
    model: type[Any]
    mapper: Mapper[Any]
    status: Column[Any]
    queued: Any
    processing: tuple[Any, ...]
    completed: Any = None
    failed: Any = None
    held: Any = None
    crashed: Any = None
    error: Column[Any] | None = None
    updated_at: Column[Any] | None = None
    lease: Column[Any] | None = None
    zombie_count: Column[Any] | None = None
    retry_at: Column[Any] | None = None
    threshold: float | None = None
    grace: float | None = None
    max_resets: int | None = None
    backoff: tuple[float, float | None] | None = None
    reapable: Reapable = True
    recover: Step | None = None
    time_zone: str = "UTC"

    def __str__(self) -> str:
        return self.name

    @property
    def exhausted(self) -> Any:
        """Where a record goes whose strikes are used up; None if the host has no such status."""
        return self.failed if self.crashed is None else self.crashed

    @cached_property
    def key(self) -> tuple[Column[Any], ...]:
        return tuple(column for column in self.mapper.primary_key if isinstance(column, Column))

    @cached_property
    def record_id(self) -> ColumnElement[str]:
        return identity.record_id(self.key)

    @property
    def source(self) -> FromClause:
        """The host's rows: a table, or the join that makes up an inherited model."""
        return self.mapper.persist_selectable

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables that may have to be locked and written, the one with the status first."""
        kept = (self.status, self.error, self.updated_at, self.lease, self.zombie_count)
        columns = (*kept, self.retry_at, self.version)
        return tuple(dict.fromkeys(column.table for column in columns if column is not None))

    @cached_property
    def version(self) -> Column[Any] | None:
        """The mapper's version counter: counting it up fences every stale object of the ORM."""
        column = self.mapper.version_id_col
        return column if isinstance(column, Column) and isinstance(column.type, Integer) else None

    def key_in(self, table: Table) -> tuple[Column[Any], ...]:
        """The key's columns in one of the tables of an inherited model."""
        if table is self.key[0].table:
            return self.key
        return tuple(table.primary_key.columns)

    @property
    def scope(self) -> ColumnElement[bool]:
        """Rows of this class alone, where a table is shared with other classes."""
        kind = self.mapper.polymorphic_on
        if not self.mapper.single or kind is None:
            return true()
        classes = [mapper.polymorphic_identity for mapper in self.mapper.self_and_descendants]
        return kind.in_(classes)

    @cached_property
    def may_requeue(self) -> ColumnElement[bool]:
        """Whether a record may run a second time; what is not known to be true is not."""
        if isinstance(self.reapable, bool):
            return true() if self.reapable else false()
        answer = self.reapable if isinstance(self.reapable, Column) else self.reapable(self.model)
        return func.coalesce(answer, literal(False))

    def policy(self, settings: ZombieSettings) -> Policy:
        """This workflow's rules, with the settings where it has none of its own."""
        threshold = settings.threshold if self.threshold is None else self.threshold
        beat = settings.heartbeat_interval_seconds
        if beat is not None and threshold < 3 * beat:
            raise RegistrationError(
                f"{self.model.__name__}: threshold={threshold:g} seconds of {self.name} must "
                f"be at least 3 x ZOMBIE_HEARTBEAT_INTERVAL_SECONDS={beat:g}, or a beat that is "
                "merely late counts as death."
            )
        base, most = self.backoff or (settings.backoff_base_seconds, None)
        return Policy(
            threshold=threshold,
            grace=settings.lease_grace_seconds if self.grace is None else self.grace,
            max_resets=settings.max_resets if self.max_resets is None else self.max_resets,
            backoff_base=base,
            backoff_max=max(base, settings.backoff_max_seconds) if most is None else most,
            stall_spread=settings.mass_stall_spread_seconds,
            can_fail=self.exhausted is not None,
            custom_recovery=self.recover is not None,
            host_waits=self.retry_at is not None,
        )

    def read_key(self, record: object) -> identity.Key:
        try:
            return identity.read_key(self.key, record)
        except ValueError:
            columns = ", ".join(f"{column.name} {column.type}" for column in self.key)
            raise UnknownRecord(
                f"{record!r} is not a key of {self.model.__name__}, whose key is ({columns})."
            ) from None

    def write_key(self, record: object) -> str:
        self.read_key(record)
        return identity.write_key(self.key, record)

    def is_record(self, key: identity.Key) -> ColumnElement[bool]:
        return and_(*identity.key_matches(self.key, key))
