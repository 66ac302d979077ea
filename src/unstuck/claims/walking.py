"""Whether the host's table has the index that makes a walk by key cheap.

Without it, and with stale statistics, an ordered walk reads the whole primary key for nothing.
"""

from __future__ import annotations

import re

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from unstuck.registry import Workflow

# An expression in an index has no name, and so fits no column.
_INDEXES = text(
    """
    SELECT pg_get_expr(i.indpred, i.indrelid) AS predicate,
           ARRAY(SELECT coalesce(a.attname::text, '')
                   FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, n)
                   LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
                  ORDER BY k.n) AS columns
      FROM pg_index i
      JOIN pg_class c ON c.oid = i.indexrelid
      JOIN pg_am m ON m.oid = c.relam AND m.amname = 'btree'
     WHERE i.indrelid = to_regclass(:table) AND i.indisvalid
    """
)
_LITERAL = re.compile(r"'(?:[^']|'')*'")
# Of a predicate with one of these nobody can say here what it leaves out.
_MORE_THAN_A_STATUS = re.compile(r"<>|\bAND\b|\bNOT\b|\bALL\b")


async def can_walk(connection: AsyncConnection, workflow: Workflow) -> bool:
    """SQLite's tables lie in the order of their key; PostgreSQL needs the index."""
    if connection.dialect.name != "postgresql":
        return True
    table = workflow.status.table
    name = connection.dialect.identifier_preparer.format_table(table)
    rows = await connection.execute(_INDEXES, {"table": name})
    key = [column.name for column in workflow.key_in(table)]
    render = workflow.status.type.dialect_impl(connection.dialect).literal_processor(
        connection.dialect
    )
    statuses = {render(status) if render else str(status) for status in workflow.processing}
    for predicate, columns in rows:
        if predicate is None:
            wanted, fits = [workflow.status.name, *key], len(statuses) == 1
        else:
            wanted, fits = key, _is_about(predicate, workflow.status.name, statuses)
        if fits and columns[: len(wanted)] == wanted:
            return True
    return False


def _is_about(predicate: str, column: str, statuses: set[str]) -> bool:
    """Whether an index holds all records in these statuses, and hardly any other."""
    rest = _LITERAL.sub("", predicate)
    return (
        column in rest
        and _MORE_THAN_A_STATUS.search(rest) is None
        and statuses == set(_LITERAL.findall(predicate))
    )
