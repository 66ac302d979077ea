"""A claim as its worker holds it: what it may say of its progress, and whether it is still its
own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from unstuck.claims import Claimed, mark_effect, save_checkpoint
from unstuck.db import Lifeline, Sessions, is_locked, transaction
from unstuck.errors import ClaimLost, UnstuckError
from unstuck.settings import ZombieSettings

_Write = Callable[[AsyncConnection], Awaitable[bool]]


class Claim:
    """A worker's ownership of one record, from its claiming to its end."""

    def __init__(self, claimed: Claimed, lifeline: Lifeline, settings: ZombieSettings) -> None:
        self.claimed = claimed
        self.details: dict[str, Any] = dict(claimed.details or {})
        """The last checkpoint, of this attempt or of the one before."""
        self.lost = False
        self.is_ending = False
        self._lifeline = lifeline
        self._settings = settings
        self.stop_beating: Callable[[], None] = lambda: None
        self._effects: list[str] = []
        self._marking = asyncio.Lock()
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def workflow(self) -> str:
        return self.claimed.workflow

    @property
    def record_id(self) -> str:
        return self.claimed.record_id

    @property
    def token(self) -> UUID:
        return self.claimed.token

    @property
    def worker_id(self) -> str:
        return self.claimed.worker_id

    @property
    def label(self) -> str:
        return f"{self.workflow} {self.record_id}"

    def __repr__(self) -> str:
        return f"<Claim {self.label} by {self.worker_id}>"

    async def checkpoint(
        self,
        details: dict[str, Any],
        *,
        step: str | None = None,
        session: AsyncSession | None = None,
    ) -> None:
        """Keeps `details` for the next attempt, should this one die.

        At once, whatever the session does; or, with `session`, in its transaction: then the
        checkpoint is committed with the work that it speaks of, or not at all."""

        async def write(connection: AsyncConnection) -> bool:
            return await save_checkpoint(connection, self, details, step)

        if session is not None:
            self._believe(await write(await session.connection()))
        else:
            await self._write_apart(write)
        self.details = dict(details)

    @asynccontextmanager
    async def effect(self, name: str) -> AsyncIterator[None]:
        """Around a side effect that must not happen twice. Whoever dies inside leaves the record
        held, with this name as the evidence; so does a block that raises, unless the record ends
        otherwise: what raised may well have happened."""
        await self._mark_effects(lambda effects: effects.append(name))
        yield
        await self._mark_effects(lambda effects: effects.remove(name))

    async def _mark_effects(self, change: Callable[[list[str]], None]) -> None:
        """One after the other: several effects may begin and end at once."""
        async with self._marking:
            effects = [*self._effects]
            change(effects)
            mark = ", ".join(effects) or None
            await self._write_apart(lambda connection: mark_effect(connection, self, mark))
            self._effects = effects

    def bind(self, task: asyncio.Task[Any] | None) -> None:
        """The task that is stopped when the claim is lost."""
        self._task, self._loop = task, asyncio.get_running_loop()

    def lose(self) -> None:
        """May be called from any thread. A worker that is at its end learns of it there."""
        if not self.lost and not self.is_ending:
            self.lost = True
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._task is not None and not self.is_ending:
            self._task.cancel(f"The claim to {self.label} was lost")

    async def _write_apart(self, write: _Write) -> None:
        async def work(sessions: Sessions) -> bool:
            async with transaction(sessions, self._settings) as tx:
                return await write(tx.connection)

        try:
            owned = await self._lifeline.run(work)
        except DBAPIError as error:
            if not is_locked(error):
                raise
            raise UnstuckError(
                f"{self.label} is locked, most likely by the session that works on it (SQLite has "
                "one writer at a time): commit it before a checkpoint or an effect, or say "
                "checkpoint(..., session=session)."
            ) from error
        self._believe(owned)

    def _believe(self, owned: bool) -> None:
        if not owned:
            self.lost = True
            raise ClaimLost(self.label)
