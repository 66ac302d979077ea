"""Whether the host's table has the index that makes a walk by key cheap.

Without it, and with stale statistics, an ordered walk reads the whole primary key for nothing.
"""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from unstuck.registry import Workflow

_INDEXES = text(
    """
    SELECT pg_get_expr(i.indpred, i.indrelid) AS predicate,
           ARRAY(SELECT a.attname::text
                   FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, n)
                   JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
                  ORDER BY k.n) AS columns
      FROM pg_index i
     WHERE i.indrelid = to_regclass(:table) AND i.indisvalid
    """
)


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
    statuses = [render(status) if render else str(status) for status in workflow.processing]
    for predicate, columns in rows:
        if predicate is None:
            fits = len(statuses) == 1 and columns == [workflow.status.name, *key]
        else:
            named = all(word in predicate for word in (workflow.status.name, *statuses))
            fits = columns[: len(key)] == key and named
        if fits:
            return True
    return False
