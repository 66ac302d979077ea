"""Where sessions come from, in every form that applications have one.

`async_sessionmaker()` never fails, the checkout of a connection does: so a session counts as had
only once its connection is. Whatever goes wrong on the way is a `SessionUnavailable` with the
reason.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from traceback import clear_frames
from typing import Any

from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)

from unstuck.db.engine import make_engine
from unstuck.errors import SessionUnavailable, describe

# async_sessionmaker | AsyncEngine | URL | a function that gives a session in any of the usual ways
SessionSource = Any


class Sessions:
    """Opens sessions from any source; owns the engine only if it made it from a URL."""

    def __init__(self, source: SessionSource, *, size: int = 1) -> None:
        self._owned: AsyncEngine | None = None
        self.engine: Engine | None = None
        """What its sessions are bound to, once that is known."""
        self.gives_begun = False
        """Whether its sessions come in a transaction already, which they commit at their end."""
        if isinstance(source, str | URL):
            source = self._owned = make_engine(source, size=size)
        if isinstance(source, AsyncEngine):
            source = async_sessionmaker(source, expire_on_commit=False)
        bind = source.kw.get("bind") if isinstance(source, async_sessionmaker) else None
        if isinstance(bind, AsyncEngine):
            self.engine = bind.sync_engine
        if isinstance(source, async_scoped_session):
            # Every sweep is a task of its own, and the scope would keep a session for each.
            source = source.session_factory
        if not callable(source):
            # By its type alone: an object that holds a URL may well show the password.
            raise TypeError(
                f"session_factory={type(source).__name__} gives no sessions: pass an "
                "async_sessionmaker, an AsyncEngine, a URL, or a function that gives an "
                "AsyncSession."
            )
        self._source: Callable[[], Any] = source

    @asynccontextmanager
    async def open(self, within: float | None = None) -> AsyncIterator[AsyncSession]:
        """A session whose connection is truly there."""
        async with AsyncExitStack() as stack:
            limit = asyncio.timeout(within)
            try:
                async with limit:
                    session = await self._enter(stack)
                    self.engine = engine_of(session)
                    self.gives_begun = session.in_transaction()
                    await connect(session)
            except Exception as error:
                reason = f"none within {within:g} s" if limit.expired() else describe(error)
                raise SessionUnavailable(f"No database session: {reason}") from error
            try:
                yield session
            except asyncio.CancelledError as cancelled:
                # Its frames hold the cursor of a statement that was cut off, which keeps SQLite's
                # lock until the garbage collector comes by, though the connection is closed.
                clear_frames(cancelled.__traceback__)
                raise

    async def find_engine(self) -> Engine | None:
        """The engine behind the sessions, without a connection being asked for."""
        if self.engine is None:
            async with AsyncExitStack() as stack:
                try:
                    self.engine = engine_of(await self._enter(stack))
                except Exception as error:
                    raise SessionUnavailable(f"No database session: {describe(error)}") from error
        return self.engine

    async def close(self) -> None:
        if self._owned is not None:
            await self._owned.dispose()

    async def _enter(self, stack: AsyncExitStack) -> AsyncSession:
        given = self._source()
        if inspect.isasyncgen(given):
            given = _as_context(given)
        elif inspect.isawaitable(given) and not isinstance(given, AbstractAsyncContextManager):
            given = await given
        if given is not None and hasattr(given, "__aenter__"):
            given = await _enter(stack, given)
        if not isinstance(given, AsyncSession):
            kind = None if given is None else type(given).__name__
            raise TypeError(f"the session source gave {kind} instead of an AsyncSession")
        return given


async def connect(session: AsyncSession) -> AsyncConnection:
    """The session's connection, in a real transaction whatever the engine was told.

    In AUTOCOMMIT nothing could be set for a transaction, neither the time zone nor who leads; above
    READ COMMITTED the sweep would read what was true before it led."""
    bind = session.get_bind()
    if session.in_transaction() or not isinstance(bind, Engine):
        return await session.connection()
    level = {"isolation_level": "READ COMMITTED"} if bind.dialect.name == "postgresql" else {}
    return await session.connection(execution_options=level)


def engine_of(session: AsyncSession) -> Engine | None:
    """None where a session hangs on a connection of somebody else's, as in many a test."""
    bind = session.get_bind()
    return bind if isinstance(bind, Engine) else None


def _as_context(generator: Any) -> AbstractAsyncContextManager[Any]:
    """A FastAPI dependency as FastAPI would run it: to its end, or with the error thrown in."""
    return asynccontextmanager(lambda: generator)()


async def _enter(stack: AsyncExitStack, context: AbstractAsyncContextManager[Any]) -> Any:
    """Enters a context that may see our errors but not swallow them, as some dependencies do."""
    entered = await context.__aenter__()

    async def leave(*error: Any) -> None:
        await context.__aexit__(*error)

    stack.push_async_exit(leave)
    return entered
