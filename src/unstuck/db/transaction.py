"""One short, bounded transaction on the host's database.

Everything that is set is set for this transaction alone, so that nothing strands behind a pooler
and the host's own sessions never notice.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import delete, false, func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.schema import CreateIndex, CreateTable

from unstuck.db.sources import Sessions, connect
from unstuck.errors import (
    SessionUnavailable,
    SettingsError,
    TablesMissing,
    UnsupportedDatabase,
    describe,
)
from unstuck.settings import ZombieSettings
from unstuck.tables import claims, metadata

_UNDEFINED = ("42P01", "42703")  # table, column


@dataclass
class Transaction:
    """A session in a transaction, and whether it leads the work on its subject."""

    session: AsyncSession
    connection: AsyncConnection
    leads: bool = True

    @property
    def dialect(self) -> str:
        return self.connection.dialect.name

    async def commit(self) -> None:
        await self.session.commit()

    async def rollback(self) -> None:
        await self.session.rollback()


@asynccontextmanager
async def transaction(
    sessions: Sessions, settings: ZombieSettings, *, time_zone: str = "UTC", lead: str | None = None
) -> AsyncIterator[Transaction]:
    """Commits at the end unless the block raised. `lead` names what one replica at a time does."""
    async with sessions.open(settings.session_timeout_seconds) as session:
        try:
            yield await _begin(session, settings, time_zone, lead)
            if session.in_transaction():  # else it was rolled back on purpose
                await session.commit()
        except DBAPIError as error:
            await session.rollback()
            if tables_are_missing(error):
                raise TablesMissing from error
            raise
        except BaseException:
            await session.rollback()
            raise


async def create_tables(sessions: Sessions) -> None:
    """Creates what is missing of unstuck's own tables; several replicas may do so at once."""
    async with sessions.open() as session:
        connection = await session.connection()
        if connection.dialect.name == "postgresql":
            await connection.execute(select(func.pg_advisory_xact_lock(_lock_key("create_tables"))))
        for table in metadata.sorted_tables:
            await connection.execute(CreateTable(table, if_not_exists=True))
            for index in sorted(table.indexes, key=lambda index: str(index.name)):
                await connection.execute(CreateIndex(index, if_not_exists=True))
        await session.commit()


async def _begin(
    session: AsyncSession, settings: ZombieSettings, time_zone: str, lead: str | None
) -> Transaction:
    connection = await session.connection()
    try:
        leads = await _prepare(connection, settings, time_zone, lead)
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
        # It died idle in the pool, which has dropped everything of its age by now.
        await session.rollback()
        connection = await _connect_again(session)
        leads = await _prepare(connection, settings, time_zone, lead)
    return Transaction(session, connection, leads)


async def _connect_again(session: AsyncSession) -> AsyncConnection:
    try:
        return await connect(session)
    except Exception as error:  # older versions of SQLAlchemy pass on what the driver raised
        raise SessionUnavailable(f"No database session: {describe(error)}") from error


async def _prepare(
    connection: AsyncConnection, settings: ZombieSettings, time_zone: str, lead: str | None
) -> bool:
    if connection.dialect.name == "sqlite":
        if time_zone != "UTC":
            raise SettingsError(
                f"time_zone={time_zone!r} needs PostgreSQL: on SQLite, keep times in UTC."
            )
        # A write, even of nothing, takes SQLite's one write lock before anything is read.
        await connection.execute(delete(claims).where(false()))
        return True
    if connection.dialect.name != "postgresql":
        raise UnsupportedDatabase(connection.dialect.name)
    local = {
        "TimeZone": time_zone,
        "lock_timeout": _milliseconds(settings.lock_timeout_seconds),
        "statement_timeout": _milliseconds(settings.statement_timeout_seconds),
        # Our tables grow while a sweep goes on: a plan kept from when they were small is ruinous.
        "plan_cache_mode": "force_custom_plan",
    }
    asked = [func.set_config(name, value, True) for name, value in local.items()]
    if lead is not None:
        asked.insert(0, func.pg_try_advisory_xact_lock(_lock_key(lead)))
    answer = (await connection.execute(select(*asked))).one()
    return lead is None or bool(answer[0])


async def use_time_zone(connection: AsyncConnection, time_zone: str) -> None:
    """All that our statements need in a transaction of the host's own, which keeps its patience."""
    if connection.dialect.name == "postgresql":
        await connection.execute(select(func.set_config("TimeZone", time_zone, True)))


def _milliseconds(seconds: float) -> str:
    return str(max(1, int(seconds * 1000)))


def _lock_key(name: str) -> int:
    digest = hashlib.blake2b(f"unstuck:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def tables_are_missing(error: DBAPIError) -> bool:
    words = str(error.orig)
    undefined = getattr(error.orig, "sqlstate", None) in _UNDEFINED or "no such " in words
    return undefined and any(table in words for table in metadata.tables)
