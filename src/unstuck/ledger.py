"""What unstuck did and what it remembers: the statements on zombie_events and zombie_records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, exists, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from unstuck.tables import UPSERT, events, records

# Records that one question may name.
MOST_ASKED = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the ledger."""

    id: int
    at: datetime
    workflow: str
    record_id: str | None
    kind: str
    cause: str | None
    outcome: str | None
    worker_id: str | None
    zombie_count: int | None
    stale_seconds: float | None
    data: Any


@dataclass(frozen=True, slots=True)
class ZombieCount:
    """How many zombies there were of one kind."""

    workflow: str
    cause: str
    outcome: str
    zombies: int


@dataclass(frozen=True, slots=True)
class RepeatOffender:
    """A record that was a zombie again and again."""

    workflow: str
    record_id: str
    times: int


async def append(
    connection: AsyncConnection, workflow: str, record_id: str | None, kind: str, **values: Any
) -> None:
    await connection.execute(
        insert(events).values(workflow=workflow, record_id=record_id, kind=kind, **values)
    )


async def append_all(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
    await connection.execute(insert(events), rows)


async def remember(
    connection: AsyncConnection, workflow: str, record_id: str, **values: Any
) -> None:
    """Replaces what is remembered of a record by `values`; what is not given is forgotten."""
    blank: dict[str, Any] = dict.fromkeys(("retry_at", "deferred_at", "held_at", "held_reason"))
    state = {**blank, **values}
    upsert = UPSERT[connection.dialect.name](records).values(
        workflow=workflow, record_id=record_id, **state
    )
    same = [records.c.workflow, records.c.record_id]
    await connection.execute(upsert.on_conflict_do_update(index_elements=same, set_=state))


async def forget(connection: AsyncConnection, workflow: str, record_id: str) -> None:
    await connection.execute(
        delete(records).where(records.c.workflow == workflow, records.c.record_id == record_id)
    )


async def list_remembered(
    connection: AsyncConnection, workflow: str, *, after: str | None, limit: int
) -> list[tuple[str, bool]]:
    """The records that something is remembered of, by id, and whether each is marked as held."""
    query = select(records.c.record_id, records.c.held_at.is_not(None))
    query = query.where(records.c.workflow == workflow)
    if after is not None:
        query = query.where(records.c.record_id > after)
    query = query.order_by(records.c.record_id).limit(limit)
    return [(record_id, held) for record_id, held in await connection.execute(query)]


async def end_holds(connection: AsyncConnection, workflow: str, record_ids: Sequence[str]) -> None:
    """Takes the marks off records that have left Processing without anybody deciding."""
    ended = await connection.execute(
        update(records)
        .where(records.c.workflow == workflow, records.c.record_id.in_(record_ids))
        .values(held_at=None, held_reason=None)
        .returning(records.c.record_id, records.c.zombie_count)
    )
    await _append_all(connection, workflow, "hold_ended", ended)


async def settle(connection: AsyncConnection, workflow: str, record_ids: Sequence[str]) -> None:
    """Clears the strikes of records that completed cleanly: strikes are consecutive."""
    gone = await connection.execute(
        delete(records)
        .where(records.c.workflow == workflow, records.c.record_id.in_(record_ids))
        .returning(records.c.record_id, records.c.zombie_count)
    )
    await _append_all(connection, workflow, "recovered", gone)


async def log_hung(connection: AsyncConnection, workflow: str, hung: Iterable[Any]) -> None:
    """`hung`: record_id, worker_id, and the seconds that it has been in work."""
    rows = [
        {
            "workflow": workflow,
            "record_id": one.record_id,
            "kind": "hung",
            "cause": "hung",
            "worker_id": one.worker_id,
            "data": {"seconds": one.seconds},
        }
        for one in hung
    ]
    if rows:
        await append_all(connection, rows)


async def read_history(connection: AsyncConnection, workflow: str, record_id: str) -> list[Entry]:
    """A record's whole story, oldest first."""
    same = (events.c.workflow == workflow, events.c.record_id == record_id)
    rows = await connection.execute(select(events).where(*same).order_by(events.c.id))
    return [Entry(**row._mapping) for row in rows]


async def tells_of(
    connection: AsyncConnection, workers: Collection[str], records: Collection[tuple[str, str]]
) -> bool:
    """Whether anything is written of these workers and any of these (workflow, record_id)."""
    story = exists().where(
        events.c.workflow.in_({workflow for workflow, _ in records}),
        events.c.record_id.in_([record_id for _, record_id in records][:MOST_ASKED]),
        events.c.worker_id.in_(workers),
    )
    return bool(await connection.scalar(select(story)))


async def count_zombies(
    connection: AsyncConnection, since: datetime, until: datetime
) -> list[ZombieCount]:
    """How many zombies there were in a span of time, by workflow, cause and outcome."""
    by = (events.c.workflow, events.c.cause, events.c.outcome)
    rows = await connection.execute(
        select(*by, func.count())
        .where(events.c.kind == "zombie", events.c.at >= since, events.c.at < until)
        .group_by(*by)
        .order_by(*by)
    )
    return [ZombieCount(*row) for row in rows]


async def list_repeat_offenders(
    connection: AsyncConnection, more_than: int, since: datetime | None = None
) -> list[RepeatOffender]:
    """The records that have been zombies more than that many times, worst first."""
    by = (events.c.workflow, events.c.record_id)
    query = (
        select(*by, func.count().label("times"))
        .where(events.c.kind == "zombie")
        .group_by(*by)
        .having(func.count() > more_than)
        .order_by(func.count().desc(), *by)
    )
    if since is not None:
        query = query.where(events.c.at >= since)
    return [RepeatOffender(*row) for row in await connection.execute(query)]


async def has_recovered(connection: AsyncConnection, workflow: str, record_id: str) -> bool:
    """Whether the record completed cleanly after it was last a zombie."""
    later = events.alias("later")
    zombie = (
        select(func.max(events.c.id))
        .where(
            events.c.workflow == workflow,
            events.c.record_id == record_id,
            events.c.kind == "zombie",
        )
        .scalar_subquery()
    )
    recovered = exists().where(
        later.c.workflow == workflow,
        later.c.record_id == record_id,
        later.c.kind == "recovered",
        later.c.id > zombie,
    )
    return bool(await connection.scalar(select(recovered)))


async def _append_all(
    connection: AsyncConnection, workflow: str, kind: str, changed: Iterable[Any]
) -> None:
    rows = [
        {"workflow": workflow, "record_id": id_, "kind": kind, "zombie_count": count}
        for id_, count in changed
    ]
    if rows:
        await append_all(connection, rows)
