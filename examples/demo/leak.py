"""A bug of the kind that every application has once: a connection is taken and not given back.

It takes the only connection of its pool once the first record is done. A record that then finds no
session asks once to be worked on, and some times more to say that it could not be: the first asks
in vain each time, and is spooled; the second can at least say so.
"""

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker

from examples.demo.place import SESSION_ATTEMPTS
from unstuck import Observer
from unstuck.events import Ended

_IN_VAIN = 1 + SESSION_ATTEMPTS + 1


class Leak(Observer):
    """Where a worker has its sessions from, and what hears that a record has ended."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._sessions = async_sessionmaker(engine)
        self._leaked: AsyncConnection | None = None
        self._asked = 0

    async def get_session(self) -> AsyncSession:
        if self._leaked is not None:
            self._asked += 1
            if self._asked > _IN_VAIN:
                await self._leaked.close()
                self._leaked = None
        return self._sessions()

    async def on_attempt_ended(self, ended: Ended) -> None:
        if self._leaked is None and self._asked == 0:
            self._leaked = await self._engine.connect()
