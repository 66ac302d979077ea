"""One attempt at one record: a session that is truly there, the started mark, the processing
function behind its fence, and the end."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from unstuck.claims import guard, start_claim
from unstuck.db import Fence, transaction, use_time_zone
from unstuck.endings import COMPLETED, FAILED, RETURNED, STOPPED, Ending, Endings, write_ending
from unstuck.errors import ClaimLost, SessionUnavailable, UnstuckError, explain, mask
from unstuck.events import Ended, is_being_cancelled
from unstuck.loop.claim import Claim
from unstuck.loop.shielding import see_through
from unstuck.loop.workshop import Workshop
from unstuck.registry import Workflow
from unstuck.settings import ZombieSettings
from unstuck.signals import Cause

logger = logging.getLogger("unstuck.loop")

NO_SESSION = "Failed to obtain processing session"


@dataclass(frozen=True, eq=False)
class Job:
    """What all attempts of one loop share."""

    workflow: Workflow
    siblings: tuple[Workflow, ...]
    function: Callable[..., Any]
    takes_claim: bool
    timeout: float | None
    shop: Workshop

    @property
    def settings(self) -> ZombieSettings:
        return self.shop.settings

    @property
    def patience(self) -> float:
        """Less than that of the loop, which waits for its attempts."""
        return self.settings.shutdown_timeout_seconds * 0.4


class Attempt:
    """Runs once. It never raises but by its own fault: however it goes, it says how it ended."""

    def __init__(self, job: Job, claim: Claim) -> None:
        self.job = job
        self.claim = claim
        self._began = monotonic()
        self._has_begun = False
        self._end: Ended | Ending | None = None
        """How it ended, or how it is still to be ended."""
        self._no_session: str | None = None
        self._fence: Fence | None = None

    async def run(self) -> Ended:
        try:
            return await self._run()
        finally:
            self.claim.stop_beating()

    async def _run(self) -> Ended:
        claim = self.claim
        claim.bind(asyncio.current_task())
        try:
            await self._work()
        except (Exception, asyncio.CancelledError) as error:
            if self._end is None:
                self._end = self._explain(error)
            elif not isinstance(error, asyncio.CancelledError):
                logger.error("The session of %s did not close: %s", claim.label, explain(error))
            if self._fence is not None and isinstance(error, asyncio.CancelledError):
                self._fence.cut()
        assert self._end is not None
        if isinstance(self._end, Ending):
            claim.is_ending = True
            ending = replace(self._end, data={**self._end.data, "seconds": self._seconds})
            self._end = await self._end_surely(ending)
        await self._tell_no_session()
        return self._end

    @property
    def _seconds(self) -> float:
        return round(monotonic() - self._began, 3)

    async def _work(self) -> None:
        job = self.job
        if job.shop.sessions.gives_begun:
            await self._start_apart()
        async with job.shop.sessions.open(job.settings.session_timeout_seconds) as session:
            connection = await session.connection()
            fence = self._fence = Fence(session, connection, guard(self.claim), self.claim.label)
            if not job.shop.sessions.gives_begun:
                with fence.lifted():
                    await self._start(session)
            job.shop.breaker.succeed()
            self._has_begun = True
            ending = await self._call(session, fence)
            finishing = self._finish(session, fence, ending)
            self._end = await see_through(finishing, job.patience)

    async def _start(self, session: AsyncSession) -> None:
        """Proves the connection as well: one that died idle in the pool is replaced once."""
        try:
            await self._mark_started(session)
        except DBAPIError as error:
            await _abandon(session)
            if not error.connection_invalidated:
                raise SessionUnavailable(f"No database session: {explain(error)}") from error
            await self._mark_started(session)

    async def _mark_started(self, session: AsyncSession) -> None:
        owned = await start_claim(await session.connection(), self.claim)
        await session.commit()
        if not owned:
            raise ClaimLost(self.claim.label)

    async def _start_apart(self) -> None:
        """For sessions that come in a transaction, which cannot be committed in between."""
        async with transaction(self.job.shop.sessions, self.job.settings) as tx:
            if not await start_claim(tx.connection, self.claim):
                raise ClaimLost(self.claim.label)

    async def _call(self, session: AsyncSession, fence: Fence) -> Ending:
        job, claim = self.job, self.claim
        arguments = [claim.claimed.identity, session] + ([claim] if job.takes_claim else [])
        limit = asyncio.timeout(job.timeout)
        try:
            async with limit:
                answer = job.function(*arguments)
                if inspect.isawaitable(answer):
                    answer = await answer
        except (Exception, asyncio.CancelledError) as error:
            if is_being_cancelled():  # whatever it made of that
                raise asyncio.CancelledError from error
            if claim.lost or fence.refused:
                raise ClaimLost(claim.label) from error
            return self._failed(error, timed_out=limit.expired())
        if claim.lost or fence.refused:
            raise ClaimLost(claim.label)
        if answer is False:
            return Ending(FAILED, "The processing function returned False", keeps_error=True)
        return Ending(COMPLETED)

    def _failed(self, error: BaseException, *, timed_out: bool) -> Ending:
        if timed_out:
            logger.error("%s timed out after %g s", self.claim.label, self.job.timeout)
            return Ending(FAILED, f"Timed out after {self.job.timeout:g} s", Cause.hung)
        trace = "".join(traceback.format_exception(error))
        logger.error("%s failed: %s\n%s", self.claim.label, explain(error), mask(trace))
        return Ending(FAILED, explain(error))

    async def _finish(self, session: AsyncSession, fence: Fence, ending: Ending) -> Ended | Ending:
        """In the session that did the work, and in its transaction if that is still open. What
        raised is rolled back; what returned is committed, False or not."""
        self.claim.is_ending = True
        claim, returned = self.claim, ending.outcome == COMPLETED or ending.keeps_error
        ending = replace(ending, data={"seconds": self._seconds})
        try:
            if not returned:
                await session.rollback()
            elif await _was_committed_below(session):
                return ending  # the session is good for nothing more, not even for a rollback
            was_open = session.in_transaction()
            await session.flush()
        except Exception as error:
            await _abandon(session)
            return Ending(FAILED, explain(error)) if returned else ending
        try:
            connection = await session.connection()
            await use_time_zone(connection, self.job.workflow.time_zone)
            ended = await write_ending(
                connection, self.job.workflow, claim.claimed, ending, self.job.siblings
            )
            with fence.lifted():
                await session.commit()
        except ClaimLost:
            await _abandon(session)
            claim.lost = True
            return ending
        except (SQLAlchemyError, OSError, UnstuckError) as error:
            await _abandon(session)
            logger.error("The end of %s could not be written: %s", claim.label, explain(error))
            # Work that was committed before stands; work that was lost with this did not happen.
            return Ending(FAILED, explain(error)) if was_open and returned else ending
        return ended

    def _explain(self, error: BaseException) -> Ending:
        """What came in between, be it before the processing function or after it."""
        was_stopped = isinstance(error, asyncio.CancelledError)
        if self.claim.lost or isinstance(error, ClaimLost):
            self.claim.lost = True
            end = STOPPED if was_stopped else COMPLETED
            return Ending(end if self._has_begun else RETURNED)
        if was_stopped and not self._has_begun:
            return Ending(RETURNED, cause=Cause.shutdown)
        if was_stopped:
            return Ending(STOPPED, "Stopped by a shutdown in mid-work", Cause.shutdown)
        if self._has_begun:
            return self._failed(error, timed_out=False)
        self._no_session = explain(error)
        self.job.shop.breaker.fail(self._no_session)
        logger.error("%s: %s: %s", self.claim.label, NO_SESSION, self._no_session)
        return Ending(FAILED, NO_SESSION, Cause.no_session, data={"reason": self._no_session})

    async def _tell_no_session(self) -> None:
        if self._no_session is not None:
            observers, workflow = self.job.shop.observers, self.claim.workflow
            await observers.tell("on_session_failed", workflow, self._no_session)

    async def _end_surely(self, ending: Ending) -> Ended:
        """By whatever still works: error sessions; the lifeline, where all around is being
        cancelled; the spool, where there is no more time."""
        limit = self.job.patience
        by_lifeline = ending.outcome in (STOPPED, RETURNED)
        try:
            try:
                return await see_through(self._end_apart(ending, by_lifeline), limit)
            except asyncio.CancelledError:
                if by_lifeline:
                    raise
            return await see_through(self._end_apart(ending, True), limit)
        except (asyncio.CancelledError, TimeoutError) as error:
            workflow, claimed = self.job.workflow, self.claim.claimed
            return await self.job.shop.endings.keep(workflow, claimed, ending, error)

    def _end_apart(self, ending: Ending, by_lifeline: bool) -> Awaitable[Ended]:
        """Without the session that did the work: it is closed, or it never was."""
        shop, workflow, claimed = self.job.shop, self.job.workflow, self.claim.claimed

        async def write(endings: Endings) -> Ended:
            if self.claim.lost:
                return await endings.record_late(claimed, ending)
            return await endings.write(workflow, claimed, ending)

        if not by_lifeline:
            return write(shop.endings)
        return shop.lifeline.run(lambda sessions: write(shop.endings.on(sessions)))


async def _was_committed_below(session: AsyncSession) -> bool:
    """A commit on the connection leaves the session in a transaction that is none any more."""
    return session.in_transaction() and not (await session.connection()).in_transaction()


async def _abandon(session: AsyncSession) -> None:
    """Rolls back what can be; the closing of the session sees to the rest."""
    try:
        await session.rollback()
    except Exception as error:
        logger.debug("A session could not be rolled back: %s", explain(error))
