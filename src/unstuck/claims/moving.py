"""Moves one record, for a human's decision or a custom recovery: locked first, guarded all the
same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    and_,
    case,
    delete,
    func,
    literal,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from unstuck import tables
from unstuck.clock import now
from unstuck.identity import Key, as_list, comparable, is_one_of
from unstuck.registry import Workflow
from unstuck.signals import Signal


async def lock_record(
    connection: AsyncConnection, workflow: Workflow, key: Key
) -> Row[*tuple[Any, ...]] | None:
    """The record's status, its claim and what is remembered of it, with its row locked for the
    rest of the transaction."""
    claims, records = tables.claims, tables.records
    joined = workflow.source.outerjoin(
        claims,
        and_(claims.c.workflow == workflow.name, claims.c.record_id == workflow.record_id),
    ).outerjoin(
        records,
        and_(records.c.workflow == workflow.name, records.c.record_id == workflow.record_id),
    )
    query = (
        select(
            workflow.status.label("status"),
            claims.c.worker_id.label("worker_id"),
            func.coalesce(records.c.zombie_count, 0).label("zombie_count"),
            _signal(workflow).still_held(records.c.held_at).label("held"),
        )
        .select_from(joined)
        .where(workflow.is_record(key), workflow.scope)
        .with_for_update(of=list(workflow.tables))
    )
    return (await connection.execute(query)).one_or_none()


async def move_record(
    connection: AsyncConnection,
    workflow: Workflow,
    key: Key,
    *,
    old: Any,
    new: Any,
    note: str,
    strikes: int | None = None,
    siblings: Sequence[Workflow] = (),
) -> bool:
    """Changes the status of a record that still has the old one; False if it has not."""
    values: dict[Any, Any] = {workflow.status: new}
    if workflow.error is not None:
        values[workflow.error] = fit(literal(note), workflow.error.type)
    if workflow.updated_at is not None:
        values[workflow.updated_at] = touched(workflow.updated_at, siblings)
    if workflow.lease is not None and workflow.lease.nullable:
        values[workflow.lease] = null()
    if workflow.retry_at is not None:
        values[workflow.retry_at] = null() if workflow.retry_at.nullable else now()
    if workflow.zombie_count is not None and strikes is not None:
        values[workflow.zombie_count] = strikes
    if workflow.version is not None:
        values[workflow.version] = workflow.version + 1
    moved = True
    for table in workflow.tables:
        mine = [
            comparable(column) == part
            for column, part in zip(workflow.key_in(table), key, strict=True)
        ]
        if table is workflow.status.table:
            mine.append(workflow.status == old)
        written = {column: value for column, value in values.items() if column.table is table}
        result = await connection.execute(update(table).where(*mine).values(written))
        moved = moved and result.rowcount == 1
        if not moved:
            return False
    return True


def touched(updated_at: Column[Any], siblings: Sequence[Workflow]) -> ColumnElement[Any]:
    """Now; but a row that is in Processing by another of its status columns as well keeps its age,
    or the first column to be reset would hide the others for another threshold."""
    busy = [
        sibling.status.in_(sibling.processing)
        for sibling in siblings
        if sibling.status.table is updated_at.table
    ]
    return case((or_(*busy), updated_at), else_=now()) if busy else now()


async def revoke_claim(connection: AsyncConnection, workflow: Workflow, record_id: str) -> bool:
    """Takes the claim away: whatever its worker still wants to write is refused from now on."""
    claim = tables.claims.c
    gone = delete(tables.claims).where(
        claim.workflow == workflow.name, claim.record_id == record_id
    )
    return (await connection.execute(gone)).rowcount > 0


async def read_statuses(
    connection: AsyncConnection, workflow: Workflow, keys: list[Key]
) -> dict[str, Any]:
    """The statuses of these records now, by record id."""
    rows = await connection.execute(
        select(workflow.record_id.label("record_id"), workflow.status.label("status"))
        .select_from(workflow.source)
        .where(is_one_of(workflow.key, as_list(keys)), workflow.scope)
    )
    return {row.record_id: row.status for row in rows}


def _signal(workflow: Workflow) -> Signal:
    return Signal(tables.claims, workflow.updated_at, workflow.lease, threshold=0, grace=0)


def fit(words: ColumnElement[str], kind: Any) -> ColumnElement[str]:
    """The text cut to the column's length."""
    length = getattr(kind, "length", None)
    return words if length is None else func.substr(words, 1, length)
