"""What the tests of kinds of models share: a stuck record of any model, and a sweep over it."""

import enum
from typing import Any, Unpack

from sqlalchemy import select

from tests.database import Database
from tests.jobs import HOUR, ago
from unstuck import Registry, Unstuck, ZombieSettings, metadata
from unstuck.events import SweepReport
from unstuck.registry import Parameters


class State(enum.Enum):
    queued = "waiting"
    processing = "busy"
    completed = "done"
    failed = "broken"


async def add(database: Database, *records: Any) -> None:
    """Each stuck for two hours unless it says otherwise."""
    for record in records:
        if getattr(record, "updated_at", None) is None:
            record.updated_at = ago(2 * HOUR)
    async with database.sessions.begin() as session:
        session.add_all(records)


async def prepare(database: Database, *records: Any) -> None:
    """The tables of these records, with the records in them, and unstuck's own."""
    tables = {table: None for record in records for table in record.__mapper__.tables}
    async with database.engine.begin() as connection:
        await connection.run_sync(records[0].metadata.create_all, tables=list(tables))
    await database.create(metadata)
    await add(database, *records)


async def sweep(
    database: Database,
    model: type[Any],
    *,
    batch_size: int = 1000,
    **parameters: Unpack[Parameters],
) -> SweepReport:
    registry = Registry()
    registry.register(model, **parameters)
    settings = ZombieSettings(_env_file=None, batch_size=batch_size)
    report = await Unstuck(database.sessions, settings, registry).sweep()
    assert report.errors == []
    return report


async def read(database: Database, model: type[Any]) -> list[Any]:
    """All records, in the order of their key."""
    async with database.sessions() as session:
        found = await session.scalars(select(model).order_by(*model.__mapper__.primary_key))
        return list(found)


async def record_ids(database: Database) -> list[str]:
    """The keys of the zombies in the ledger."""
    rows = await database.execute(
        "SELECT record_id FROM zombie_events WHERE kind = 'zombie' ORDER BY id"
    )
    return sorted(row.record_id for row in rows)
