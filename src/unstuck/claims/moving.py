"""Moves one record, for a human's decision or a custom recovery: locked first, guarded all the
same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Required, TypedDict, Unpack

from sqlalchemy import (
    Column,
    ColumnElement,
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
from unstuck.claims.joining import is_same_record
from unstuck.clock import now
from unstuck.identity import Key, as_list, is_one_of
from unstuck.registry import Workflow
from unstuck.signals import Signal


class Change(TypedDict, total=False):
    """`old` may be one status or several. With `keeps_error` the note gives way to what stands in
    the error column; without a note the column is left as it is."""

    old: Required[Any]
    new: Required[Any]
    note: str | None
    keeps_error: bool
    strikes: int | None
    siblings: Sequence[Workflow]


async def lock_record(
    connection: AsyncConnection, workflow: Workflow, key: Key
) -> Row[*tuple[Any, ...]] | None:
    """The record's status, its claim and what is remembered of it, with its row locked for the
    rest of the transaction."""
    claims, records = tables.claims, tables.records
    joined = workflow.source.outerjoin(claims, is_same_record(claims, workflow)).outerjoin(
        records, is_same_record(records, workflow)
    )
    query = (
        select(
            workflow.status.label("status"),
            workflow.may_requeue.label("reapable"),
            claims.c.worker_id.label("worker_id"),
            claims.c.token.label("token"),
            claims.c.effect.label("effect"),
            claims.c.details.label("details"),
            func.coalesce(records.c.zombie_count, 0).label("zombie_count"),
            _signal(workflow).still_held(records.c.held_at).label("held"),
        )
        .select_from(joined)
        .where(workflow.is_record(key), workflow.scope)
        .with_for_update(of=list(workflow.tables))
    )
    return (await connection.execute(query)).one_or_none()


async def move_record(
    connection: AsyncConnection, workflow: Workflow, key: Key, **change: Unpack[Change]
) -> bool:
    """Changes the status of a record that still has the old one; False if it has not."""
    return await move_records(connection, workflow, [key], **change) == 1


async def move_records(
    connection: AsyncConnection, workflow: Workflow, keys: Sequence[Key], **change: Unpack[Change]
) -> int:
    """How many of them still had the old status, and have the new one now."""
    moved = 0
    values = _values(workflow, **change)
    old = change["old"] if isinstance(change["old"], tuple) else (change["old"],)
    for table in workflow.tables:
        same = is_one_of(workflow.key_in(table), as_list(keys))
        written = {column: value for column, value in values.items() if column.table is table}
        write = update(table).where(same).values(written)
        if table is workflow.status.table:  # the first of them
            result = await connection.execute(write.where(workflow.status.in_(old)))
            moved = result.rowcount
            if moved == 0:
                break
        else:
            await connection.execute(write)
    return moved


def _values(
    workflow: Workflow,
    *,
    old: Any,
    new: Any,
    note: str | None = None,
    keeps_error: bool = False,
    strikes: int | None = None,
    siblings: Sequence[Workflow] = (),
) -> dict[Any, Any]:
    values: dict[Any, Any] = {workflow.status: new}
    if workflow.error is not None and note is not None:
        error = fit(literal(note), workflow.error.type)
        said = func.nullif(workflow.error, "")
        values[workflow.error] = func.coalesce(said, error) if keeps_error else error
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
    return values


async def end_lease(connection: AsyncConnection, workflow: Workflow, key: Key) -> None:
    """A lease that still runs would say that a held record is being worked on."""
    if workflow.lease is not None:
        same = is_one_of(workflow.key_in(workflow.lease.table), as_list([key]))
        over = null() if workflow.lease.nullable else now()
        change = update(workflow.lease.table).where(same).values({workflow.lease: over})
        await connection.execute(change)


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
    connection: AsyncConnection, workflow: Workflow, keys: Sequence[Key], *, lock: bool = False
) -> dict[str, Any]:
    """The statuses of these records now, by record id. With `lock` those that could be locked."""
    query = (
        select(workflow.record_id.label("record_id"), workflow.status.label("status"))
        .select_from(workflow.source)
        .where(is_one_of(workflow.key, as_list(keys)), workflow.scope)
    )
    if lock:
        query = query.with_for_update(of=list(workflow.tables), skip_locked=True)
    rows = await connection.execute(query)
    return {row.record_id: row.status for row in rows}


def _signal(workflow: Workflow) -> Signal:
    return Signal(tables.claims, workflow.updated_at, workflow.lease, threshold=0, grace=0)


def blank(column: Column[Any]) -> ColumnElement[Any]:
    """What an error column says when there is no error."""
    return null() if column.nullable else literal("")


def fit(words: ColumnElement[str], kind: Any) -> ColumnElement[str]:
    """The text cut to the column's length."""
    length = getattr(kind, "length", None)
    return words if length is None else func.substr(words, 1, length)
