"""Every form in which an application may have its sessions."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.pool import QueuePool

from tests.database import Database
from tests.jobs import start
from unstuck import Unstuck

Source = Callable[[Database], Any]


async def start_on(database: Database, source: Any) -> Unstuck:
    prepared = await start(database)
    return Unstuck(source, prepared.settings, prepared.registry)


def checked_out(engine: AsyncEngine) -> int:
    return cast(QueuePool, engine.pool).checkedout()


def from_function(database: Database) -> Any:
    def get_session() -> AsyncSession:
        return database.sessions()

    return get_session


def from_coroutine(database: Database) -> Any:
    async def get_session() -> AsyncSession:
        return database.sessions()

    return get_session


def from_context_manager(database: Database) -> Any:
    @asynccontextmanager
    async def get_session() -> AsyncIterator[AsyncSession]:
        async with database.sessions() as session:
            yield session

    return get_session


def from_coroutine_to_context_manager(database: Database) -> Any:
    async def get_session() -> Any:
        return from_context_manager(database)()

    return get_session


def from_dependency(database: Database) -> Any:
    async def get_session() -> AsyncIterator[AsyncSession]:
        async with database.sessions() as session:
            yield session

    return get_session


def from_dependency_that_commits(database: Database) -> Any:
    async def get_session() -> AsyncIterator[AsyncSession]:
        async with database.sessions() as session:
            yield session
            await session.commit()

    return get_session


def from_scoped_session(database: Database) -> Any:
    return async_scoped_session(database.sessions, scopefunc=asyncio.current_task)


SOURCES: dict[str, Source] = {
    "async_sessionmaker": lambda database: database.sessions,
    "function": from_function,
    "coroutine function": from_coroutine,
    "context manager": from_context_manager,
    "coroutine function that gives a context manager": from_coroutine_to_context_manager,
    "sessionmaker.begin": lambda database: database.sessions.begin,
    "dependency": from_dependency,
    "dependency that commits": from_dependency_that_commits,
    "AsyncEngine": lambda database: database.engine,
    "URL": lambda database: make_url(database.url),
    "text of a URL": lambda database: database.url,
    "text of a sync URL": lambda database: database.url.replace("+asyncpg", "").replace(
        "+aiosqlite", ""
    ),
    "async_scoped_session": from_scoped_session,
}
