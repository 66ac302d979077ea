"""The database of one test: its own, empty, on a real server or in a SQLite file."""

import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import asyncpg
from sqlalchemy import MetaData, Row, make_url, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

from tools.embedded_postgres import EmbeddedPostgres

PostgresVersion = Literal[16, 18]


@dataclass
class Database:
    url: str
    server: EmbeddedPostgres | None = None  # None: SQLite, or a server from outside

    @property
    def dialect(self) -> Literal["postgresql", "sqlite"]:
        return "sqlite" if self.url.startswith("sqlite") else "postgresql"

    @cached_property
    def engine(self) -> AsyncEngine:
        return create_async_engine(self.url)

    @cached_property
    def sessions(self) -> async_sessionmaker[AsyncSession]:
        return async_sessionmaker(self.engine, expire_on_commit=False)

    async def create(self, metadata: MetaData) -> None:
        async with self.engine.begin() as connection:
            await connection.run_sync(metadata.create_all)

    async def execute(self, sql: str, **params: object) -> list[Row[Any]]:
        """In a transaction of its own, committed; for what a test prepares and looks up."""
        async with self.engine.begin() as connection:
            result = await connection.execute(text(sql), params)
            return list(result.all()) if result.returns_rows else []

    async def dispose(self) -> None:
        if "engine" in self.__dict__:  # it is made on first use
            await self.engine.dispose()


class Servers:
    """The embedded servers that tests share, each started by the first test that wants it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: dict[PostgresVersion, EmbeddedPostgres] = {}

    def get(self, version: PostgresVersion) -> EmbeddedPostgres:
        if version not in self._running:
            self._running[version] = self._stack.enter_context(EmbeddedPostgres(version))
        return self._running[version]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@asynccontextmanager
async def postgres_database(
    server_url: str, server: EmbeddedPostgres | None = None
) -> AsyncIterator[Database]:
    name = f"unstuck_{uuid.uuid4().hex}"
    await _administer(server_url, f"CREATE DATABASE {name} TEMPLATE template1")
    url = make_url(server_url).set(database=name).render_as_string(hide_password=False)
    database = Database(url, server)
    try:
        yield database
    finally:
        await database.dispose()
        # FORCE: a test of crashed workers may well leave connections behind.
        await _administer(server_url, f"DROP DATABASE {name} WITH (FORCE)")


@asynccontextmanager
async def sqlite_database(directory: Path) -> AsyncIterator[Database]:
    database = Database(f"sqlite+aiosqlite:///{directory / 'unstuck.db'}")
    try:
        yield database
    finally:
        await database.dispose()


async def _administer(server_url: str, statement: str) -> None:
    """By the driver itself: an engine would first ask the server a handful of questions."""
    url = make_url(server_url).set(drivername="postgresql")
    connection = await asyncpg.connect(url.render_as_string(hide_password=False))
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
