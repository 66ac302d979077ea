"""Sees to it that every end of a claim is written: tried for several times in an error session,
else spooled and shouted about, and drained from there at the next chance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from unstuck import ledger
from unstuck.claims import Claimed
from unstuck.db import Entry, Sessions, is_passing, make_spool, retrying, transaction
from unstuck.endings.writing import (
    ATTEMPT,
    COMPLETED,
    FAILED,
    LOST,
    RETURNED,
    SPOOLED,
    STOPPED,
    STUCK,
    Ending,
    give_back,
    tell,
    token_of,
    write_ending,
)
from unstuck.errors import (
    ClaimLost,
    NoSpool,
    SessionUnavailable,
    UnknownWorkflow,
    UnstuckError,
    describe,
)
from unstuck.events import Ended, Observers
from unstuck.registry import Registry, Workflow
from unstuck.settings import ZombieSettings

logger = logging.getLogger("unstuck.loop")

# Claims that go back in one transaction.
_AT_ONCE = 1000
_LATE = {FAILED: "late_failure", RETURNED: "late_start"}


class Endings:
    """Writes the ends of claims, on sessions of one source."""

    def __init__(
        self, sessions: Sessions, settings: ZombieSettings, registry: Registry, observers: Observers
    ) -> None:
        self._sessions = sessions
        self._settings = settings
        self._registry = registry
        self._observers = observers
        self._engine: Engine | None = None

    def keep_for(self, engine: Engine | None) -> None:
        """Whose spool it is; to be said while the database can still be reached."""
        self._engine = engine

    def on(self, sessions: Sessions) -> Endings:
        """The same, on other sessions to the same database."""
        other = Endings(sessions, self._settings, self._registry, self._observers)
        other.keep_for(self._engine)
        return other

    async def write(self, workflow: Workflow, claim: Claimed, ending: Ending) -> Ended:
        """In an error session, tried for several times; else in the spool."""
        try:
            async for attempt in retrying(self._settings):
                with attempt:
                    return await self._write_once(workflow, claim, ending)
        except ClaimLost:
            return await self._explain_loss(claim, ending)
        except (UnstuckError, SQLAlchemyError, OSError) as error:
            return await self.keep(workflow, claim, ending, error)
        raise AssertionError("unreachable")  # pragma: no cover - tenacity raises or returns

    async def give_back(
        self, workflow: Workflow, claims: Sequence[Claimed], cause: str, *, within: float
    ) -> list[Ended]:
        """What was claimed and never begun is queued again; what cannot be in time is spooled."""
        ended: list[Ended] = []
        error: Exception
        try:
            async with asyncio.timeout(within):
                for at in range(0, len(claims), _AT_ONCE):
                    await self._give_back(workflow, claims[at : at + _AT_ONCE], cause, ended)
                return ended
        except (UnstuckError, SQLAlchemyError, OSError) as failure:  # a timeout is an OSError
            error = failure
        told, ending = {one.record_id for one in ended}, Ending(RETURNED, cause=cause)
        for claim in claims:
            if claim.record_id not in told:
                ended.append(await self.keep(workflow, claim, ending, error))
        return ended

    async def _give_back(
        self, workflow: Workflow, claims: Sequence[Claimed], cause: str, ended: list[Ended]
    ) -> None:
        left, siblings = claims, self._registry.siblings(workflow)
        async for attempt in retrying(self._settings):
            with attempt:
                zone = workflow.time_zone
                async with transaction(self._sessions, self._settings, time_zone=zone) as tx:
                    given = await give_back(tx.connection, workflow, left, cause, siblings)
                ended += given
                told = {one.record_id for one in given}
                left = [claim for claim in left if claim.record_id not in told]
                if left:
                    raise SessionUnavailable("the record is locked, or not to be seen")

    async def record_late(self, claim: Claimed, ending: Ending) -> Ended:
        """The claim was lost while its worker lived: that is a false reap, and worth knowing."""
        try:
            await self._append_late(claim, ending)
        except (UnstuckError, SQLAlchemyError, OSError) as error:
            logger.error("That could not be written down: %s", describe(error))
        return tell(claim, LOST, ending)

    async def drain(self) -> int:
        """Writes what was spooled, guarded by the token; how many entries were settled."""
        settled = 0

        async def write(entry: Entry) -> bool:
            nonlocal settled
            done = await self._settle(entry)
            settled += done
            return done

        self._engine = self._engine or self._sessions.engine
        if self._engine is None:
            return 0  # nobody knows yet whose spool it is
        try:
            for trouble in await make_spool(self._settings, self._engine).drain(write):
                logger.error("%s", trouble)
        except (UnstuckError, SQLAlchemyError, OSError) as error:
            logger.error("The spool could not be drained: %s", describe(error))
        if settled:
            logger.warning("%d ends of records were written from the spool", settled)
        return settled

    async def _write_once(self, workflow: Workflow, claim: Claimed, ending: Ending) -> Ended:
        zone = workflow.time_zone
        async with transaction(self._sessions, self._settings, time_zone=zone) as tx:
            siblings = self._registry.siblings(workflow)
            return await write_ending(tx.connection, workflow, claim, ending, siblings)

    async def _append_late(self, claim: Claimed, ending: Ending) -> None:
        kind = _LATE.get(ending.outcome, "late_finish")
        data = {**token_of(claim), **ending.data, "end": ending.outcome, "error": ending.error}
        logger.warning(
            "%s %s was taken from its worker %s while it still ran; its %s is refused",
            claim.workflow,
            claim.record_id,
            claim.worker_id,
            kind.replace("_", " "),
        )
        name, record_id, worker = claim.workflow, claim.record_id, claim.worker_id
        async with transaction(self._sessions, self._settings) as tx:
            await ledger.append(tx.connection, name, record_id, kind, worker_id=worker, data=data)

    async def _explain_loss(self, claim: Claimed, ending: Ending) -> Ended:
        try:
            written = await self._find_written(claim)
        except (UnstuckError, SQLAlchemyError, OSError):
            written = None
        return written or await self.record_late(claim, ending)

    async def _find_written(self, claim: Claimed) -> Ended | None:
        """How the claim ended, if it is we who ended it: a commit that was never answered, an entry
        whose settling was cut off or done twice at once."""
        async with transaction(self._sessions, self._settings) as tx:
            story = await ledger.read_history(tx.connection, claim.workflow, claim.record_id)
        for entry in story:
            data = entry.data or {}
            if entry.kind in (ATTEMPT, RETURNED) and data.get("token") == str(claim.token):
                written = Ending(entry.kind, data.get("error"), entry.cause, data=data)
                return tell(claim, str(entry.outcome), written)
        return None

    async def keep(
        self, workflow: Workflow, claim: Claimed, ending: Ending, error: BaseException
    ) -> Ended:
        """In the spool, or at least in the log."""
        label = f"{workflow.model.__name__} ID {claim.record_id}"
        if isinstance(error, Exception) and not is_passing(error):
            # It would be refused each time; the sweep finds the record when its claim has aged.
            logger.critical(
                "ZOMBIE RECORD ALERT: %s stuck in Processing - its end was refused", label
            )
            logger.error("%s: %s; it was %s: %s", label, describe(error), *_words(ending))
            return tell(claim, STUCK, ending)
        logger.critical(
            "ZOMBIE RECORD ALERT: %s stuck in Processing - could not obtain error session", label
        )
        entry = Entry(
            claim.workflow,
            claim.record_id,
            claim.token,
            claim.worker_id,
            ending.outcome,
            ending.cause,
            ending.error,
            ending.data,
            ending.keeps_error,
        )
        try:
            await make_spool(self._settings, self._engine).put(entry)
        except NoSpool as trouble:
            logger.critical("%s %s was %s: %s", trouble, label, *_words(ending))
            return tell(claim, STUCK, ending)
        logger.error("%s: %s; spooled that it was %s: %s", label, describe(error), *_words(ending))
        return tell(claim, SPOOLED, ending)

    async def _settle(self, entry: Entry) -> bool:
        """False if it has to stay: it is another application's, or this one's to decide."""
        workflow = self._find_workflow(entry)
        if workflow is None:
            return False
        try:
            ended = await self._write_spooled(workflow, entry)
        except Exception as error:
            if is_passing(error):
                raise
            name = f"{entry.workflow} {entry.record_id}"
            logger.error("The spooled end of %s is refused: %s", name, describe(error))
            return False
        if ended is not None:
            await self._observers.tell("on_attempt_ended", ended)
        return True

    async def _write_spooled(self, workflow: Workflow, entry: Entry) -> Ended | None:
        """None if it had been written before, and only not removed."""
        claim, ending = _read_claim(workflow, entry), _read_ending(entry)
        try:
            return await self._write_once(workflow, claim, ending)
        except ClaimLost:
            if await self._find_written(claim) is not None:
                return None
            await self._append_late(claim, ending)
            return tell(claim, LOST, ending)

    def _find_workflow(self, entry: Entry) -> Workflow | None:
        """None as well where it is registered without the status that the record is to have."""
        try:
            found = self._registry.get(entry.workflow)
        except UnknownWorkflow:
            return None
        last = {COMPLETED: found.completed, FAILED: found.failed}.get(entry.outcome, found.queued)
        return found if found.name == entry.workflow and last is not None else None


def _read_claim(workflow: Workflow, entry: Entry) -> Claimed:
    return Claimed(
        entry.workflow,
        entry.record_id,
        entry.token,
        entry.worker_id,
        workflow.read_key(entry.record_id),
        identity=None,
        remembered=True,
    )


def _read_ending(entry: Entry) -> Ending:
    if entry.outcome not in (COMPLETED, FAILED, STOPPED, RETURNED):
        raise NoSpool(f"{entry.outcome!r} is no end of a claim.")
    data = {**entry.data, "spooled": True}
    return Ending(entry.outcome, entry.error, entry.cause, entry.keeps_error, data=data)


def _words(ending: Ending) -> tuple[str, str]:
    return ending.outcome, ending.error or "no error"
