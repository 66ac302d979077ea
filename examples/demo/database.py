"""The application's connections to its database, as each of its processes makes them."""

import os

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from examples.demo.invoice import Base

# Seconds that SQLite waits for its one writer to finish.
_PATIENCE = 15


def connect(url: str | None = None, *, pool_size: int = 5, pool_timeout: float = 10) -> AsyncEngine:
    """A pool with a limit, on SQLite as well: nothing else can be exhausted."""
    url = url or os.environ["DATABASE_URL"]
    return create_async_engine(
        url,
        poolclass=AsyncAdaptedQueuePool,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_timeout,
        connect_args={"timeout": _PATIENCE} if url.startswith("sqlite") else {},
    )


async def create_tables(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            # Readers and the writer do not wait for each other: several processes share the file.
            await connection.execute(text("PRAGMA journal_mode=WAL"))
        await connection.run_sync(Base.metadata.create_all)
        await connection.commit()
