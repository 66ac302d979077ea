"""Finds the zombies of a workflow and decides on them, as one SELECT.

Dry run and real run read the same query: the real one only writes what this one says. Rows that
cannot be taken (held, deferred, locked) are left out before the LIMIT, so that they starve nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    FromClause,
    Integer,
    Select,
    Text,
    and_,
    bindparam,
    case,
    cast,
    exists,
    false,
    func,
    literal,
    literal_column,
    not_,
    null,
    or_,
    select,
    tuple_,
)
from sqlalchemy.engine import Row
from sqlalchemy.sql.selectable import CTE, Subquery

from unstuck import tables
from unstuck.claims.joining import effect_note, has_status, is_same_record, look_up
from unstuck.clock import later, not_after, now, older_than, seconds_since
from unstuck.decisions import Facts, Outcome, Policy, count_strikes, decide, wait_seconds
from unstuck.identity import Key, comparable, is_one_of
from unstuck.registry import Workflow
from unstuck.settings import ZombieSettings
from unstuck.signals import Signal

MASS_STALL = "mass_stall"


class Reach(Enum):
    """Which of a workflow's zombies a query is after."""

    any = auto()
    from_start = auto()
    after_key = auto()
    in_keys = auto()


@dataclass(frozen=True, eq=False)
class Finder:
    """The queries that find one workflow's zombies."""

    workflow: Workflow
    policy: Policy
    settings: ZombieSettings
    dialect: str

    @cached_property
    def claim(self) -> FromClause:
        return look_up(tables.claims, self.workflow, self.dialect)

    @cached_property
    def memory(self) -> FromClause:
        return look_up(tables.records, self.workflow, self.dialect)

    @cached_property
    def signal(self) -> Signal:
        return self.signal_of(self.claim)

    def signal_of(self, claim: FromClause) -> Signal:
        return Signal(
            claim=claim,
            updated_at=self.workflow.updated_at,
            lease=self.workflow.lease,
            threshold=self.policy.threshold,
            grace=self.policy.grace,
        )

    @cached_property
    def is_processing(self) -> ColumnElement[bool]:
        return has_status(self.workflow, *self.workflow.processing)

    def survey(self, limit: int) -> Select[*tuple[Any, ...]]:
        """How many zombies there are, counted no further than the limit; and what is remembered."""
        known_stall = func.coalesce(
            not_after(self.signal.last_life, self._recorded_stall()), false()
        )
        is_new = not_(or_(self.signal.mute, self._is_due, known_stall))
        some = self._select(is_new.label("is_new")).limit(limit).subquery("some")
        known = exists().where(tables.records.c.workflow == self.workflow.name)
        return select(
            func.count().filter(some.c.is_new).label("zombies"),
            func.count().label("found"),
            known.label("remembered"),
            self._recorded_stall().is_not(None).label("stalled"),
            exists().where(*stale_claims(self)).label("claims"),
            exists().where(*hung_claims(self)).label("hung"),
        ).select_from(some)

    def keys(self, limit: int) -> Select[Any]:
        return self._select(*self._key_columns()).limit(limit)

    def plan(self, reach: Reach, *, lock: bool) -> Select[Any]:
        """One row per zombie: its key, the facts, the outcome, and what is to be written."""
        decided = self._decide(self._found(reach, lock=lock))
        d = decided.c
        facts = _facts_of(decided)
        wait = wait_seconds(self.policy, facts, d.outcome, d.zombie_count)
        # Drawn once: a random wait that is read twice would be two waits.
        waited = select(*decided.c, wait.label("wait")).subquery("waited")
        w = waited.c
        retry_at = case((w.wait.is_not(None), later(w.wait)), else_=null())
        return select(
            *(column for column in w if column.name != "wait"),
            retry_at.label("retry_at"),
            self._moves(w.outcome).label("moves"),
            self._note(w).label("note"),
        )

    def _found(self, reach: Reach, *, lock: bool) -> CTE:
        signal = self.signal
        query = self._select(
            *self._key_columns(),
            self.workflow.record_id.label("record_id"),
            self.workflow.status.label("status"),
            self.claim.c.token.label("token"),
            self.claim.c.worker_id.label("worker_id"),
            signal.cause.label("cause"),
            case((signal.mute, 0.0), else_=seconds_since(signal.last_life)).label("stale_seconds"),
            func.coalesce(self.memory.c.zombie_count, 0).label("strikes"),
            signal.mute.label("mute"),
            signal.claimed.label("claimed"),
            signal.never_started.label("never_started"),
            self._is_due.label("due"),
            and_(self.workflow.may_requeue, self.claim.c.effect.is_(None)).label("reapable"),
            self.claim.c.effect.label("effect"),
            self.claim.c.details.label("details"),
            func.coalesce(not_after(signal.last_life, self._open_stall()), false()).label(
                "stalled"
            ),
        )
        query = self._reach(query, reach)
        if lock:
            query = query.with_for_update(of=list(self.workflow.tables), skip_locked=True)
        return query.cte("found").prefix_with("MATERIALIZED", dialect="postgresql")

    def _select(self, *columns: ColumnElement[Any]) -> Select[Any]:
        joined = self.workflow.source
        for looked_up in (self.claim, self.memory):
            joined = joined.outerjoin(looked_up, is_same_record(looked_up, self.workflow))
        memory = self.memory.c
        waits = and_(self._is_due, not_(older_than(memory.retry_at, 0.0)))
        held = self.signal.still_held(memory.held_at)
        return (
            select(*columns)
            .select_from(joined)
            .where(
                self.is_processing,
                self.workflow.scope,
                or_(self.signal.stale, self.signal.mute),
                not_(func.coalesce(or_(waits, held), false())),
            )
        )

    def _reach(self, query: Select[Any], reach: Reach) -> Select[Any]:
        keys = [comparable(column) for column in self.workflow.key]
        if reach is Reach.in_keys:
            return query.where(is_one_of(self.workflow.key, bindparam("keys", expanding=True)))
        query = query.limit(bindparam("limit", type_=Integer()))
        if reach is Reach.any:
            # In no order: without its index, an ordered LIMIT tempts the planner to walk the table.
            return query
        if reach is Reach.after_key:
            after = [bindparam(f"after_{n}", type_=key.type) for n, key in enumerate(keys)]
            query = query.where(
                keys[0] > after[0] if len(keys) == 1 else tuple_(*keys) > tuple_(*after)
            )
        return query.order_by(*self.workflow.key)

    def _key_columns(self) -> list[ColumnElement[Any]]:
        return [comparable(column).label(f"key_{n}") for n, column in enumerate(self.workflow.key)]

    @property
    def _is_due(self) -> ColumnElement[bool]:
        """Deferred once, and among the records found only when its time has come."""
        deferred_at = self.memory.c.deferred_at
        return and_(deferred_at.is_not(None), self._unchanged_since(deferred_at))

    def _unchanged_since(self, mark: ColumnElement[Any]) -> ColumnElement[bool]:
        """A deferral counts only until the record shows life again: then it is another matter."""
        return func.coalesce(not_after(self.signal.last_life, mark), literal(True))

    def _open_stall(self) -> ColumnElement[Any]:
        """When the mass stall was noticed that is being cleaned up; NULL if there is none.

        `noticed` says that this sweep noticed one: a dry run does not write it down."""
        noticed = bindparam("noticed", type_=Boolean())
        return case((noticed, now()), else_=self._recorded_stall())

    def _recorded_stall(self) -> ColumnElement[Any]:
        event = tables.events.c
        return (
            select(func.max(event.at))
            .where(
                event.workflow == self.workflow.name,
                # Literal for the sake of its partial index.
                event.kind == literal_column(f"'{MASS_STALL}'"),
                not_(older_than(event.at, self.settings.mass_stall_window_minutes * 60)),
            )
            .scalar_subquery()
        )

    def _decide(self, found: CTE) -> Subquery:
        facts = _facts_of(found)
        struck = select(*found.c, count_strikes(facts).label("zombie_count")).subquery("struck")
        outcome = decide(self.policy, _facts_of(struck), struck.c.zombie_count)
        return select(*struck.c, outcome.label("outcome")).subquery("decided")

    def _moves(self, outcome: ColumnElement[str]) -> ColumnElement[bool]:
        """Whether the record leaves Processing."""
        moving = [Outcome.requeued.value]
        if self.workflow.exhausted is not None:
            moving.append(Outcome.failed.value)
        if self.workflow.held is not None:
            moving.append(Outcome.held.value)
        return outcome.in_(moving)

    def _note(self, w: Any) -> ColumnElement[str]:
        """What happened, in the words that the error column gets."""
        most = self.policy.max_resets
        strikes, seconds = cast(w.zombie_count, Text), cast(cast(w.stale_seconds, BigInteger), Text)
        count = case(
            (w.stalled, "no strike, mass stall"),
            (w.never_started, "no strike"),
            (
                w.zombie_count > most,
                literal("stuck ").concat(strikes).concat(f" times, {most} allowed"),
            ),
            else_=literal("strike ").concat(strikes).concat(f" of {most}"),
        )
        head = case(
            (w.outcome == Outcome.requeued.value, self.settings.reset_message),
            (w.outcome == Outcome.failed.value, "Given up from stuck Processing state"),
            else_="Held from stuck Processing state",
        )
        held = w.outcome == Outcome.held.value
        tail = case(
            (
                w.outcome == Outcome.failed.value,
                literal("; earlier: ").concat(func.coalesce(self._past(w.record_id), "none")),
            ),
            (and_(held, w.effect.is_not(None)), literal("; ").concat(effect_note(w.effect))),
            (and_(held, not_(w.reapable)), "; not reapable, a human decides"),
            else_="",
        )
        return (
            head.concat(": ")
            .concat(count)
            .concat(", no sign of life for ")
            .concat(seconds)
            .concat(" s, cause ")
            .concat(w.cause)
            .concat(tail)
        )

    def _past(self, record_id: ColumnElement[str]) -> ColumnElement[str]:
        """The record's last strikes from the ledger; read for given-up records alone."""
        event = tables.events.c
        last = (
            select(event.id, event.at, event.cause)
            .where(
                event.workflow == self.workflow.name,
                event.record_id == record_id,
                event.kind == "zombie",
            )
            .order_by(event.id.desc())
            .limit(10)
            .correlate(*_froms_of(record_id))
            .subquery("past")
        )
        line = func.substr(cast(last.c.at, Text), 1, 19).concat(" ").concat(last.c.cause)
        return select(func.aggregate_strings(line, ", ")).scalar_subquery()


def stale_claims(finder: Finder) -> tuple[ColumnElement[bool], ...]:
    """Claims of workers that are gone."""
    mine = tables.claims.c.workflow == finder.workflow.name
    return mine, finder.signal_of(tables.claims).claim_is_stale


def hung_claims(finder: Finder) -> tuple[ColumnElement[bool], ...]:
    """Claims of workers that live and beat, but have been at one record for too long."""
    claim, after = tables.claims.c, finder.settings.hung_after_minutes
    mine, stale = stale_claims(finder)
    is_long = false() if after is None else older_than(claim.started_at, after * 60)
    return mine, not_(stale), claim.hung_at.is_(None), func.coalesce(is_long, false())


def key_of(row: Row[Any]) -> Key:
    return tuple(value for name, value in row._mapping.items() if name.startswith("key_"))


def _froms_of(expression: ColumnElement[Any]) -> list[Any]:
    return [expression.table] if hasattr(expression, "table") else []


def _facts_of(source: CTE | Subquery) -> Facts:
    c = source.c
    return Facts(
        mute=c.mute,
        claimed=c.claimed,
        never_started=c.never_started,
        due=c.due,
        reapable=c.reapable,
        stalled=c.stalled,
        strikes=c.strikes,
    )
