"""The heart of a process: one statement an interval beats for all its claims, from a thread of its
own, so that a processing function that blocks the event loop is not taken for dead.

Code that holds the interpreter's lock for longer than the threshold is; only another process could
beat for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from time import monotonic
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from unstuck import ledger
from unstuck.claims import beat, see
from unstuck.db import Lifeline, Sessions, transaction
from unstuck.errors import describe
from unstuck.loop.claim import Claim
from unstuck.settings import ZombieSettings

logger = logging.getLogger("unstuck.loop")

_Act = Callable[[list[Claim]], Coroutine[Any, Any, None]]

# Seconds after which the heart looks up who has come and gone.
_GLANCE = 1.0


class Heart:
    """Beats for every claim that is added until it is removed, and tells those that are lost."""

    def __init__(self, lifeline: Lifeline, settings: ZombieSettings) -> None:
        self._lifeline = lifeline
        self._settings = settings
        self._lock = threading.Lock()
        self._claims: dict[UUID, Claim] = {}
        self._intervals: dict[UUID, float] = {}
        self._sees_claims = False
        self._beats = False
        self._pid = os.getpid()
        self.last_beat: float | None = None
        """When it last beat, by `time.monotonic`."""

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claim: Claim, threshold: float) -> None:
        if self._pid != os.getpid():  # a fork inherits the claims, but they are its parent's
            self._pid, self._lock, self._beats = os.getpid(), threading.Lock(), False
            self._claims.clear()
            self._intervals.clear()
        claim.stop_beating = partial(self.remove, claim)
        with self._lock:  # which keeps the heart from looking before there is a claim
            if not self._beats and self._lifeline.is_apart:
                self._lifeline.submit(self._beat_on)
                self._beats = True
            self._claims[claim.token] = claim
            self._intervals[claim.token] = self._settings.heartbeat_interval(threshold)

    def remove(self, claim: Claim) -> None:
        with self._lock:
            self._claims.pop(claim.token, None)
            self._intervals.pop(claim.token, None)

    async def _beat_on(self, _sessions: Sessions) -> None:
        """In the lifeline's thread, until there is nobody left to beat for."""
        self._pace()
        last, misses = monotonic(), 0
        if not self._sees_claims and not await self._try(self._look, misses=0, patience=_GLANCE):
            misses = 1
        while (interval := self._pace()) is not None:
            # A beat that was missed is made up for sooner.
            due = last + (min(interval, _GLANCE) if misses else interval)
            if (left := due - monotonic()) > 0:
                await asyncio.sleep(min(left, _GLANCE))
                continue
            last = monotonic()
            done = await self._try(self._beat, misses=misses, patience=max(interval, _GLANCE))
            misses = 0 if done else misses + 1

    def _pace(self) -> float | None:
        """The shortest interval of all claims; None where there is none, and the heart stops."""
        with self._lock:
            self._beats = bool(self._intervals)
            return min(self._intervals.values(), default=None)

    async def _try(self, act: _Act, *, misses: int, patience: float) -> bool:
        """A beat that hangs, on a connection whose other end is gone, is left behind: to wait for
        its end would stop the heart."""
        claims = list(self._claims.values())
        beating = asyncio.ensure_future(act(claims))
        done, _ = await asyncio.wait({beating}, timeout=patience)
        error: BaseException | None
        if done:
            error = beating.exception()
        else:
            error = TimeoutError(f"no answer within {patience:g} s")
            beating.cancel()
            self._lifeline.renew()
        if error is not None:
            level = logging.DEBUG if misses else logging.WARNING
            logger.log(level, "The heartbeat of %d claims failed: %s", len(claims), describe(error))
            return False
        if misses:
            logger.warning("The heartbeat goes on after %d misses", misses)
        self.last_beat = monotonic()
        return True

    async def _look(self, claims: list[Claim]) -> None:
        """Reads only: whether claims are to be seen from here, before the first beat is due."""
        async with self._lifeline.sessions.open() as session:
            connection = await session.connection()
            living = await see(connection, claims) if claims else set()
            # Whoever takes a claim away writes that down, where we see claims.
            self._sees_claims = bool(living) or await _were_taken(connection, claims)
        await self._tell_lost(claims, living)

    async def _beat(self, claims: list[Claim]) -> None:
        if not claims:
            return
        async with transaction(self._lifeline.sessions, self._settings) as tx:
            living = await beat(tx.connection, claims)
            if not self._sees_claims:
                self._sees_claims = bool(living) or await _were_taken(tx.connection, claims)
        await self._tell_lost(claims, living)

    async def _tell_lost(self, claims: list[Claim], living: set[UUID]) -> None:
        lost = [c for c in claims if c.token not in living] if self._sees_claims else []
        for claim in lost:
            if claim.is_ending or claim.token not in self._claims:
                continue
            logger.warning("A beat for %s came too late: the claim is lost", claim.label)
            try:
                await self._write_down(claim)
            finally:
                self.remove(claim)
                claim.lose()

    async def _write_down(self, claim: Claim) -> None:
        async with transaction(self._lifeline.sessions, self._settings) as tx:
            await ledger.append(
                tx.connection,
                claim.workflow,
                claim.record_id,
                "late_beat",
                worker_id=claim.worker_id,
                data={"token": str(claim.token)},
            )


async def _were_taken(connection: AsyncConnection, claims: list[Claim]) -> bool:
    if not claims:
        return False
    workers = {claim.worker_id for claim in claims}
    records = {(claim.workflow, claim.record_id) for claim in claims}
    return await ledger.tells_of(connection, workers, records)
