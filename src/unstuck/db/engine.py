"""An engine of unstuck's own, so that cleaning goes on when the application's pool is exhausted.

It is made to work behind a pooler in transaction mode as well: no statement is cached, none is
named twice, and no state outlives a transaction.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from sqlalchemy import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from unstuck.errors import SettingsError, UnsupportedDatabase

# Drivers that cannot await, and the one that takes their place.
_ASYNC_DRIVERS = {
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
    "postgresql+psycopg2": "postgresql+asyncpg",
    "sqlite": "sqlite+aiosqlite",
    "sqlite+pysqlite": "sqlite+aiosqlite",
}


def make_engine(url: str | URL, *, size: int = 1) -> AsyncEngine:
    """An engine with a tiny pool from any database URL, sync or async."""
    parsed = async_url(url)
    if parsed.get_backend_name() == "sqlite":
        return create_async_engine(parsed)
    if parsed.get_backend_name() != "postgresql":
        raise UnsupportedDatabase(parsed.get_backend_name())
    return create_async_engine(
        parsed,
        pool_size=size,
        max_overflow=1,
        pool_pre_ping=True,
        pool_recycle=300,
        connect_args=_pooler_proof() if parsed.get_driver_name() == "asyncpg" else {},
    )


def twin_of(engine: Engine) -> AsyncEngine:
    """The same database by the same arguments, options and listeners, in a pool of its own:
    connections of asyncio belong to one event loop."""
    options = engine.get_execution_options()
    twin = Engine(engine.pool.recreate(), engine.dialect, engine.url, execution_options=options)
    # Listeners have no public way to be copied.
    twin.dispatch = engine.dispatch
    twin._has_events = engine._has_events  # noqa: SLF001
    return AsyncEngine(twin)


def async_url(url: str | URL) -> URL:
    """The same database through a driver that can await."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # a port that is no number is a ValueError
        raise SettingsError(
            "The database URL cannot be read; it should look like postgresql://user@host/database."
        ) from None
    parsed = parsed.set(drivername=_ASYNC_DRIVERS.get(parsed.drivername, parsed.drivername))
    if parsed.drivername == "postgresql+asyncpg" and "sslmode" in parsed.query:
        # asyncpg knows libpq's setting under another name.
        mode = str(parsed.query["sslmode"])
        parsed = parsed.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
    return parsed


def _pooler_proof() -> dict[str, Any]:
    return {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: f"unstuck_{uuid4().hex}",
    }
