"""What tests look up in unstuck's own tables, and an observer that writes down what it is told."""

from typing import Any

from sqlalchemy import ColumnElement, Row, Table, select, update

from tests.database import Database
from tests.jobs import Base
from unstuck import Observer
from unstuck.tables import claims, events, records

jobs = Base.metadata.tables["jobs"]


async def recall(database: Database, record_id: int) -> Row[Any] | None:
    """What is remembered of a job."""
    async with database.engine.connect() as connection:
        same = records.c.record_id == str(record_id)
        return (await connection.execute(select(records).where(same))).one_or_none()


async def remember(database: Database, record_id: int, **values: Any) -> None:
    """Makes unstuck remember this of a job, as earlier sweeps would have."""
    async with database.engine.begin() as connection:
        await connection.execute(
            records.insert().values(workflow="jobs", record_id=str(record_id), **values)
        )


async def rewrite(
    database: Database, table: Table, *where: ColumnElement[bool], **values: Any
) -> None:
    """Changes all rows of a table, or some: that is how time passes in a test."""
    async with database.engine.begin() as connection:
        await connection.execute(update(table).where(*where).values(**values))


async def count_claims(database: Database) -> int:
    return len(await _read(database, claims))


async def read_everything(database: Database) -> dict[str, list[Row[Any]]]:
    """Every row of the host's table and of unstuck's three."""
    return {table.name: await _read(database, table) for table in (jobs, claims, records, events)}


async def _read(database: Database, table: Table) -> list[Row[Any]]:
    async with database.engine.connect() as connection:
        return list(await connection.execute(select(table).order_by(*table.primary_key)))


class Witness(Observer):
    """Writes down every call as (method, arguments)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def heard(self, method: str) -> list[Any]:
        """The arguments of each call; a single argument by itself."""
        heard = [arguments for name, arguments in self.calls if name == method]
        return [arguments[0] if len(arguments) == 1 else arguments for arguments in heard]

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *arguments: self.calls.append((name, arguments))
