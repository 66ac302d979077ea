"""Takes a batch of zombies: the change, the strike and the ledger row in one transaction.

On PostgreSQL a batch is one statement whose parts are CTEs; SQLite, which has one writer at a time
and no writing CTEs, runs the same parts one by one over a temporary table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Delete,
    Executable,
    FromClause,
    Insert,
    Select,
    Table,
    Update,
    and_,
    case,
    delete,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy import column as plain_column
from sqlalchemy import table as plain_table
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ClauseElement

from unstuck import tables
from unstuck.claims.finding import Finder, Reach, key_of, stale_claims
from unstuck.claims.moving import fit, touched
from unstuck.clock import later, now
from unstuck.decisions import Outcome
from unstuck.identity import as_list, comparable
from unstuck.registry import Workflow

# What the caller is told of each zombie, besides its key.
_ANSWER = (
    "record_id",
    "status",
    "worker_id",
    "token",
    "cause",
    "outcome",
    "zombie_count",
    "stale_seconds",
    "mute",
    "due",
    "moves",
    "details",
    "effect",
)
_HANDED_OVER = Outcome.recovered.value


class CreateBatch(Executable, ClauseElement):
    """SQLite's stand-in for a CTE that several writes can read."""

    inherit_cache = False
    name = "zombie_batch"

    def __init__(self, query: Select[Any]) -> None:
        self.query = query


@compiles(CreateBatch)
def _create_batch(element: CreateBatch, compiler: SQLCompiler, **kw: Any) -> str:
    return f"CREATE TEMP TABLE {element.name} AS {compiler.process(element.query, **kw)}"


@dataclass(frozen=True, eq=False)
class Taker:
    """The statements that take one workflow's zombies."""

    finder: Finder
    siblings: tuple[Workflow, ...] = ()
    _kept: dict[Any, Select[Any]] = field(default_factory=dict)  # costly to build

    async def take(
        self, connection: AsyncConnection, reach: Reach, parameters: dict[str, Any]
    ) -> list[Row[Any]]:
        """Takes a batch. A row that slipped away in the meantime comes back with settled false.

        What moves is safe in one statement: the row that another sweep moved says so. What stays is
        marked in a table that the find read before it had the lock; so it is found once more."""
        if connection.dialect.name == "sqlite":
            return await self._take_stepwise(connection, reach, parameters)
        rows = list(await connection.execute(self._statement(reach, _moves), parameters))
        staying = [key_of(row) for row in rows if not row.moves and row.outcome != _HANDED_OVER]
        if not staying:
            return rows
        wanted = {"keys": as_list(staying), "noticed": parameters["noticed"]}
        again = await connection.execute(self._statement(Reach.in_keys, _is_ours), wanted)
        settled = {row.record_id: row for row in again}
        return [settled.get(row.record_id, row) for row in rows]

    async def look(
        self, connection: AsyncConnection, reach: Reach, parameters: dict[str, Any]
    ) -> list[Row[Any]]:
        """What `take` would take, locked for the rest of the transaction but not written."""
        plan = self._plan(reach).subquery("plan")
        rows = select(*self._answer(plan), literal(True).label("settled"))
        return list(await connection.execute(rows, parameters))

    async def lock_claim(self, connection: AsyncConnection, zombie: Row[Any]) -> bool:
        """Keeps beats out for the rest of the transaction; false if one has come already."""
        if zombie.token is None:
            return True
        claim = tables.claims.c
        same = (claim.record_id == zombie.record_id, claim.token == zombie.token)
        query = select(literal(1)).where(*self._dead_claims, *same)
        locked = await connection.execute(query.with_for_update(skip_locked=True))
        return locked.one_or_none() is not None

    @property
    def _dead_claims(self) -> tuple[ColumnElement[bool], ...]:
        return stale_claims(self.finder)

    def _plan(self, reach: Reach) -> Select[Any]:
        if reach not in self._kept:
            self._kept[reach] = self.finder.plan(reach, lock=True)
        return self._kept[reach]

    def _statement(self, reach: Reach, wanted: Callable[[FromClause], Any]) -> Select[Any]:
        if (reach, wanted) not in self._kept:
            self._kept[reach, wanted] = self._build(reach, wanted)
        return self._kept[reach, wanted]

    def _build(self, reach: Reach, wanted: Callable[[FromClause], Any]) -> Select[Any]:
        plan = self._plan(reach).cte("plan")
        dead = self._lock_claims(plan, wanted).cte("dead").prefix_with("MATERIALIZED")
        revoked = self._revoke(dead).returning(tables.claims.c.record_id).cte("revoked")
        is_free = or_(plan.c.token.is_(None), plan.c.record_id.in_(select(revoked.c.record_id)))
        moved = (
            self._move(plan, self.finder.workflow.status.table)
            .where(is_free)
            .returning(*plan.c)
            .cte("moved")
        )
        stayed = select(*plan.c).where(is_free, ~plan.c.moves, wanted(plan))
        settled = union_all(select(*moved.c), stayed).cte("settled")
        writes = [
            self._move(settled, table).cte(f"also_{n}")
            for n, table in enumerate(self.finder.workflow.tables[1:])
        ]
        writes += [update.cte("started") for update in self._start_clocks(settled)]
        writes += [
            self._strike(settled, "postgresql").cte("struck"),
            self._log(settled).cte("logged"),
        ]
        is_settled = plan.c.record_id.in_(select(settled.c.record_id))
        return select(*self._answer(plan), is_settled.label("settled")).add_cte(*writes)

    def _answer(self, batch: FromClause) -> list[ColumnElement[Any]]:
        return [column for column in batch.c if column.name.startswith("key_")] + [
            batch.c[name] for name in _ANSWER
        ]

    async def _take_stepwise(
        self, connection: AsyncConnection, reach: Reach, parameters: dict[str, Any]
    ) -> list[Row[Any]]:
        plan = self._plan(reach)
        columns = [plain_column(c.name, c.type) for c in plan.selected_columns]
        batch = plain_table(CreateBatch.name, *columns)
        settled = select(*batch.c).where(_is_ours(batch)).subquery("settled")
        writes: list[Executable] = [
            self._revoke(select(*batch.c).where(_is_ours(batch)).subquery("ours")),
            *(self._move(batch, table) for table in self.finder.workflow.tables),
            *self._start_clocks(batch),
            self._strike(settled, "sqlite"),
            self._log(settled),
        ]
        await connection.execute(CreateBatch(plan), parameters)
        for write in writes:
            await connection.execute(write)
        answer = select(*self._answer(batch), literal(True).label("settled"))
        rows: list[Any] = list(await connection.execute(answer))
        # After an error the rollback takes the table away.
        await connection.execute(text(f"DROP TABLE {CreateBatch.name}"))
        return rows

    def _lock_claims(self, batch: FromClause, wanted: Callable[[FromClause], Any]) -> Select[Any]:
        """The claims to take away, without those that a worker is writing: it lives, and may wait
        for the very rows that are locked here."""
        return (
            select(batch.c.record_id, batch.c.token)
            .join_from(batch, tables.claims, _same_claim(batch))
            .where(*self._dead_claims, wanted(batch))
            .with_for_update(of=tables.claims, skip_locked=True)
        )

    def _revoke(self, batch: FromClause) -> Delete:
        """Takes the claims away, unless a beat came at the last moment or the claim is another."""
        same = select(literal(1)).where(_same_claim(batch)).exists()
        return delete(tables.claims).where(*self._dead_claims, same)

    def _move(self, batch: FromClause, table: Table) -> Update:
        """Writes one table of the host, guarded by status and staleness once more."""
        finder, workflow = self.finder, self.finder.workflow
        guards: list[ColumnElement[bool]] = [batch.c.moves]
        if table is workflow.status.table:
            guards.append(finder.is_processing)
        signs = [column for column in (workflow.updated_at, workflow.lease) if column is not None]
        if all(column.table is table for column in signs):
            guards.append(or_(batch.c.token.is_not(None), finder.signal.row_is_stale))
        values = {c: v for c, v in self._values(batch).items() if c.table is table}
        return update(table).where(*self._same(batch, table), *guards).values(values)

    def _same(self, batch: FromClause, table: Any) -> list[ColumnElement[bool]]:
        key = self.finder.workflow.key_in(table)
        return [comparable(column) == batch.c[f"key_{n}"] for n, column in enumerate(key)]

    def _values(self, batch: FromClause) -> dict[Any, Any]:
        workflow = self.finder.workflow
        goes_to = {Outcome.requeued: workflow.queued, Outcome.failed: workflow.exhausted}
        goes_to[Outcome.held] = workflow.held
        kind = workflow.status.type
        values: dict[Any, Any] = {
            workflow.status: case(
                *(
                    (batch.c.outcome == outcome.value, literal(status, kind))
                    for outcome, status in goes_to.items()
                    if status is not None
                )
            )
        }
        if workflow.error is not None:
            values[workflow.error] = fit(batch.c.note, workflow.error.type)
        if workflow.updated_at is not None:
            values[workflow.updated_at] = touched(workflow.updated_at, self.siblings)
        if workflow.lease is not None and workflow.lease.nullable:
            values[workflow.lease] = null()
        if workflow.zombie_count is not None:
            values[workflow.zombie_count] = batch.c.zombie_count
        if workflow.retry_at is not None:
            due = batch.c.retry_at
            values[workflow.retry_at] = (
                due if workflow.retry_at.nullable else func.coalesce(due, now())
            )
        if workflow.version is not None:
            values[workflow.version] = workflow.version + 1
        return values

    def _start_clocks(self, batch: FromClause) -> list[Update]:
        """A record with no sign of life at all, not even an old one, is judged from now on."""
        workflow = self.finder.workflow
        column = workflow.updated_at if workflow.updated_at is not None else workflow.lease
        if column is None:
            return []
        start = now() if column is workflow.updated_at else later(self.finder.policy.threshold)
        mute = update(column.table).where(*self._same(batch, column.table), batch.c.mute)
        # Not WHERE it is NULL: that would tempt the planner to look for it in the whole table.
        return [mute.values({column: func.coalesce(column, start)})]

    def _strike(self, batch: FromClause, dialect: str) -> Any:
        """Remembers strikes, waits and holds."""
        b, r = batch.c, tables.records.c
        held = b.outcome == Outcome.held.value
        values: dict[str, ColumnElement[Any]] = {
            "workflow": literal(self.finder.workflow.name),
            "record_id": b.record_id,
            "zombie_count": b.zombie_count,
            "last_zombie_at": now(),
            "retry_at": b.retry_at,
            "deferred_at": _only(b.outcome == Outcome.deferred.value, now()),
            "held_at": _only(held, now()),
            "held_reason": _only(held, b.note),
            "details": b.details,
        }
        rows = select(*(v.label(k) for k, v in values.items())).where(~b.mute)
        new = tables.UPSERT[dialect](tables.records).from_select(list(values), rows)
        changed = {k: new.excluded[k] for k in values if k not in ("workflow", "record_id")}
        # The checkpoint of an attempt before stands until there is another.
        changed["details"] = func.coalesce(new.excluded.details, r.details)
        return new.on_conflict_do_update(index_elements=[r.workflow, r.record_id], set_=changed)

    def _log(self, batch: FromClause) -> Insert:
        b = batch.c
        values: dict[str, ColumnElement[Any]] = {
            "at": now(),
            "workflow": literal(self.finder.workflow.name),
            "record_id": b.record_id,
            # A deferred zombie that is requeued at last is not another zombie.
            "kind": case((b.mute, "clock_started"), (b.due, "deferral_ended"), else_="zombie"),
            "cause": _only(~b.mute, b.cause),
            "outcome": b.outcome,
            "worker_id": b.worker_id,
            "zombie_count": b.zombie_count,
            "stale_seconds": b.stale_seconds,
        }
        rows = select(*(v.label(k) for k, v in values.items()))
        return insert(tables.events).from_select(list(values), rows)


def _is_ours(batch: FromClause) -> ColumnElement[bool]:
    """Custom recovery is handed over one by one, outside of the batch."""
    return batch.c.outcome != _HANDED_OVER


def _moves(batch: FromClause) -> ColumnElement[bool]:
    moves: ColumnElement[bool] = batch.c.moves
    return moves


def _same_claim(batch: FromClause) -> ColumnElement[bool]:
    claim = tables.claims.c
    return and_(batch.c.record_id == claim.record_id, batch.c.token == claim.token)


def _only(condition: ColumnElement[bool], value: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((condition, value), else_=null())
