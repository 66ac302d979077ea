"""How our tables and the host's meet: the conditions and joins that several statements share."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Table,
    and_,
    bindparam,
    literal,
    or_,
    select,
)

from unstuck.registry import Workflow


def is_same_record(table: FromClause, workflow: Workflow) -> ColumnElement[bool]:
    return and_(table.c.workflow == workflow.name, table.c.record_id == workflow.record_id)


def look_up(table: Table, workflow: Workflow, dialect: str) -> FromClause:
    """A table of ours, looked up by its key for each record.

    A plain join would let PostgreSQL hash the whole of it for every batch; to take one row for
    each record leaves it only the index. SQLite looks up by the index anyway."""
    if dialect != "postgresql":
        return table
    return select(table).where(is_same_record(table, workflow)).limit(1).lateral(table.name)


def has_status(workflow: Workflow, *statuses: Any) -> ColumnElement[bool]:
    """In the text of the statement, not bound: only so can a partial index be proved to fit."""
    kind = workflow.status.type
    written = [bindparam(None, s, type_=kind, literal_execute=True) for s in statuses]
    return or_(*(workflow.status == status for status in written))


def effect_note(effect: ColumnElement[Any]) -> ColumnElement[str]:
    """The evidence for whoever has to decide."""
    quoted = literal("the side effect '").concat(effect).concat("'")
    return quoted.concat(" had begun and was not seen to end, a human decides")
