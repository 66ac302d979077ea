"""Claims records for a worker: found, marked and claimed in one short transaction.

The claim and a fresh sign of life in the row are written together, so that no sweep, whatever its
snapshot, can take a record that was claimed a moment ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import (
    ColumnElement,
    Select,
    Update,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from unstuck import tables
from unstuck.claims.finding import key_of
from unstuck.claims.joining import has_status, is_same_record, look_up
from unstuck.claims.moving import blank
from unstuck.claims.owning import lock_left_over
from unstuck.clock import later, not_after, now
from unstuck.identity import Key, as_list, comparable, is_one_of
from unstuck.registry import Workflow


@dataclass(frozen=True, slots=True)
class Claimed:
    """A record that is ours, and by which token."""

    workflow: str
    record_id: str
    token: UUID
    worker_id: str
    key: Key
    identity: Any
    """The primary key as the host's own mapping gives it."""
    details: Any = None
    remembered: bool = False


@dataclass(frozen=True, eq=False)
class Claimer:
    """Takes records of one workflow from the queue."""

    workflow: Workflow
    processing: Any
    threshold: float
    order_by: Sequence[Any] = ()

    async def claim(
        self,
        connection: AsyncConnection,
        worker_id: str,
        limit: int,
        filters: Sequence[ColumnElement[bool]] = (),
    ) -> list[Claimed]:
        found = await connection.execute(self._find(connection.dialect.name, limit, filters))
        rows = await self._leave_locked(connection, list(found))
        if not rows:
            return []
        marked = await self._mark(connection, [key_of(row) for row in rows])
        claimed = [self._claimed(row, worker_id) for row in rows if key_of(row) in marked]
        if claimed:
            await _write_claims(connection, claimed)
        return claimed

    async def _leave_locked(
        self, connection: AsyncConnection, rows: list[Row[Any]]
    ) -> list[Row[Any]]:
        """Where somebody requeued by hand, an old claim is still there; and if its worker is just
        committing, the record is not for us, and must not keep the others waiting."""
        kept = [row.record_id for row in rows if row.has_claim]
        if not kept:
            return rows
        free = await lock_left_over(connection, self.workflow.name, kept)
        return [row for row in rows if not row.has_claim or row.record_id in free]

    def _find(
        self, dialect: str, limit: int, filters: Sequence[ColumnElement[bool]]
    ) -> Select[Any]:
        workflow = self.workflow
        memory = look_up(tables.records, workflow, dialect)
        claim = look_up(tables.claims, workflow, dialect)
        joined = workflow.source.outerjoin(memory, is_same_record(memory, workflow))
        joined = joined.outerjoin(claim, is_same_record(claim, workflow))
        stored = [comparable(c).label(f"key_{n}") for n, c in enumerate(workflow.key)]
        given = [c.label(f"item_{n}") for n, c in enumerate(workflow.key)]
        query = (
            select(
                *stored,
                *given,
                workflow.record_id.label("record_id"),
                memory.c.details.label("details"),
                memory.c.record_id.is_not(None).label("remembered"),
                claim.c.record_id.is_not(None).label("has_claim"),
            )
            .select_from(joined)
            .where(
                has_status(workflow, workflow.queued),
                workflow.scope,
                *filters,
                _is_due(memory.c.retry_at),
                true() if workflow.retry_at is None else _is_due(workflow.retry_at),
                memory.c.held_at.is_(None),
            )
            .order_by(*self.order_by)
            .limit(limit)
        )
        return query.with_for_update(of=list(workflow.tables), skip_locked=True)

    async def _mark(self, connection: AsyncConnection, keys: list[Key]) -> set[Key]:
        """The row count is believed: what a trigger of the host's left alone is not ours."""
        marked: set[Key] = set()
        for table in self.workflow.tables:
            key = self.workflow.key_in(table)
            change = self._mark_in(table).where(is_one_of(key, as_list(keys)))
            if table is self.workflow.status.table:
                change = change.where(self.workflow.status == self.workflow.queued)
                rows = await connection.execute(change.returning(*map(comparable, key)))
                marked = {tuple(row) for row in rows}
            else:
                await connection.execute(change)
        return marked

    def _mark_in(self, table: Any) -> Update:
        workflow = self.workflow
        values: dict[Any, Any] = {workflow.status: self.processing}
        if workflow.error is not None:
            values[workflow.error] = blank(workflow.error)
        if workflow.updated_at is not None:
            values[workflow.updated_at] = now()
        if workflow.lease is not None:
            values[workflow.lease] = later(self.threshold)
        if workflow.version is not None:
            values[workflow.version] = workflow.version + 1
        return update(table).values({c: v for c, v in values.items() if c.table is table})

    def _claimed(self, row: Row[Any], worker_id: str) -> Claimed:
        item = tuple(v for name, v in row._mapping.items() if name.startswith("item_"))
        return Claimed(
            workflow=self.workflow.name,
            record_id=row.record_id,
            token=uuid4(),
            worker_id=worker_id,
            key=key_of(row),
            identity=item[0] if len(item) == 1 else item,
            details=row.details,
            remembered=row.remembered,
        )


async def _write_claims(connection: AsyncConnection, found: list[Claimed]) -> None:
    """A claim that is left over, where somebody requeued by hand, gives way."""
    fresh = {"claimed_at": now(), **dict.fromkeys(_FORGOTTEN, null())}
    new = tables.UPSERT[connection.dialect.name](tables.claims)
    given = {name: new.excluded[name] for name in ("token", "worker_id")}
    await connection.execute(
        new.on_conflict_do_update(
            index_elements=[tables.claims.c.workflow, tables.claims.c.record_id],
            set_={**given, **fresh},
        ),
        [
            {
                "workflow": claim.workflow,
                "record_id": claim.record_id,
                "token": claim.token,
                "worker_id": claim.worker_id,
            }
            for claim in found
        ],
    )


_FORGOTTEN = ("started_at", "heartbeat_at", "step", "details", "effect", "hung_at")


def _is_due(retry_at: ColumnElement[Any]) -> ColumnElement[bool]:
    return or_(retry_at.is_(None), not_after(retry_at, now()))
