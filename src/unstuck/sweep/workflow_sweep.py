"""The sweep of one workflow: survey, take batch by batch, then settle what came good since."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from sqlalchemy.engine import Row
from sqlalchemy.exc import SQLAlchemyError

from unstuck import ledger
from unstuck.claims import Finder, Reach, can_walk, key_of
from unstuck.db import Sessions, Transaction, transaction
from unstuck.decisions import Outcome
from unstuck.errors import describe
from unstuck.events import MassStall, Observers, WorkflowReport
from unstuck.identity import Key, as_list
from unstuck.registry import Workflow
from unstuck.settings import ZombieSettings
from unstuck.sweep.recoveries import hand_over
from unstuck.sweep.settling import settle_completed
from unstuck.sweep.takers import Takers
from unstuck.sweep.telling import Teller

logger = logging.getLogger("unstuck.sweep")

# Keys are read this many batches at a time where there is no index to walk on.
_BATCHES_OF_KEYS = 50


class WorkflowSweep:
    """One pass; it counts into `report` as it goes, so that an error loses no count."""

    def __init__(
        self,
        workflow: Workflow,
        takers: Takers,
        sessions: Sessions,
        settings: ZombieSettings,
        observers: Observers,
        report: WorkflowReport,
        *,
        dry_run: bool,
    ) -> None:
        self._workflow = workflow
        self._sessions = sessions
        self._settings = settings
        self._report = report
        self._dry_run = dry_run
        self._takers = takers
        self._teller = Teller(workflow, observers, report, dry_run=dry_run)
        self._taken = 0
        self._noticed = False

    async def run(self) -> None:
        size = self._settings.batch_size
        async with self._transaction() as tx:
            if not tx.leads:
                self._report.swept_elsewhere = True
                return
            self._taker = self._takers.get(self._workflow, tx.dialect)
            survey = (await tx.connection.execute(self._finder.survey(self._horizon))).one()
            stall = await self._notice_stall(tx, survey)
            few = survey.found <= size
            walks = few or await can_walk(tx.connection, self._workflow)
            rows = await self._take(tx, Reach.any, limit=size) if survey.found and few else []
        await self._teller.tell_stall(stall)
        await self._finish(rows)
        if not few:
            await (self._walk() if walks else self._take_by_keys())
        await self._count_locked(survey.found)
        if survey.remembered and self._workflow.completed is not None and not self._dry_run:
            begin = partial(self._transaction, lead="settle")
            await settle_completed(self._workflow, begin, self._settings.batch_size)

    @property
    def _finder(self) -> Finder:
        return self._taker.finder

    @property
    def _horizon(self) -> int:
        """A survey counts no further than it has to: to a second batch, or to a mass stall."""
        return max(self._settings.batch_size + 1, self._settings.mass_stall_records)

    @property
    def _room(self) -> int:
        return max(0, self._settings.max_per_sweep - self._taken)

    async def _notice_stall(self, tx: Transaction, survey: Row[Any]) -> MassStall | None:
        """Too many at once cannot be the records' own fault. It is written down once, and seen by
        every sweep for a while, so that a second replica decides no differently."""
        self._noticed = 0 < self._settings.mass_stall_records <= survey.zombies
        self._report.mass_stall = self._noticed or survey.stalled
        if not self._noticed or survey.stalled or self._dry_run:
            return None
        stall = MassStall(self._workflow.name, survey.zombies)
        await ledger.append(
            tx.connection, stall.workflow, None, "mass_stall", data={"at_least": stall.zombies}
        )
        return stall

    async def _walk(self) -> None:
        """Batch after batch in the order of the key."""
        reach = Reach.from_start
        after: dict[str, Any] = {}
        while size := min(self._settings.batch_size, self._room):
            rows = await self._take_alone(reach, limit=size, **after)
            if len(rows) < size:
                return
            reach = Reach.after_key
            after = {f"after_{n}": part for n, part in enumerate(key_of(rows[-1]))}

    async def _take_by_keys(self) -> None:
        """Without an index the keys are read once and taken in batches; then again, if there are
        more.

        A chunk of which nothing could be taken ends it: what is left is locked."""
        size = self._settings.batch_size
        async for keys in self._chunks_of_keys():
            before = self._taken
            for at in range(0, len(keys), size):
                await self._take_alone(Reach.in_keys, keys=as_list(keys[at : at + size]))
                if self._report.swept_elsewhere:
                    return
            if self._taken == before or self._dry_run:
                return

    async def _chunks_of_keys(self) -> AsyncIterator[list[Key]]:
        chunk = self._settings.batch_size * _BATCHES_OF_KEYS
        while size := self._room if self._dry_run else min(chunk, self._room):
            async with self._transaction() as tx:
                if not tx.leads:
                    self._report.swept_elsewhere = True
                    return
                rows = await tx.connection.execute(self._finder.keys(size))
                keys = [tuple(row) for row in rows]
            if keys:
                yield keys
            if len(keys) < size:
                return

    async def _take_alone(self, reach: Reach, **parameters: Any) -> list[Row[Any]]:
        async with self._transaction() as tx:
            if not tx.leads:
                self._report.swept_elsewhere = True
                return []
            rows = await self._take(tx, reach, **parameters)
        await self._finish(rows)
        return rows

    async def _take(self, tx: Transaction, reach: Reach, **parameters: Any) -> list[Row[Any]]:
        parameters["noticed"] = self._noticed
        if not self._dry_run:
            return await self._taker.take(tx.connection, reach, parameters)
        rows = await self._taker.look(tx.connection, reach, parameters)
        await tx.rollback()
        return rows

    async def _finish(self, rows: list[Row[Any]]) -> None:
        """After the commit: hands over what has a recovery of its own, and tells the rest."""
        for row in rows:
            if not row.settled and row.outcome != Outcome.recovered:
                continue
            self._taken += 1
            if row.outcome == Outcome.recovered and not self._dry_run:
                await self._hand_over(row)
            else:
                await self._teller.tell(row)

    async def _hand_over(self, row: Row[Any]) -> None:
        """A recovery may break even its transaction; the other records still get theirs."""
        try:
            await self._recover(row)
        except SQLAlchemyError as error:
            reason = f"the recovery of {row.record_id} failed: {describe(error)}"
            logger.error("Zombie sweep of %s: %s", self._workflow.name, reason)
            self._report.errors.append(reason)

    async def _recover(self, row: Row[Any]) -> None:
        """One record in a transaction of its own, found and locked once more."""
        async with self._transaction() as tx:
            wanted = {"keys": as_list([key_of(row)]), "noticed": self._noticed}
            locked = await self._taker.look(tx.connection, Reach.in_keys, wanted)
            if not tx.leads or not locked:
                return
            if not await self._taker.lock_claim(tx.connection, locked[0]):
                return
            zombie = self._teller.zombie(locked[0])
            settled = await hand_over(tx, self._taker, zombie, locked[0].status)
        await self._teller.tell_settled(locked[0], *settled)

    async def _count_locked(self, surveyed: int) -> None:
        """What was stale and is still there was locked, by a transaction that lives."""
        self._report.capped = self._room == 0
        if self._report.swept_elsewhere or self._report.capped:
            return
        kept = self._taken if self._dry_run else 0
        left = surveyed - self._taken
        if left > 0 or surveyed >= self._horizon:
            async with self._transaction(lead=None) as tx:
                survey = self._finder.survey(self._horizon + kept)
                left = (await tx.connection.execute(survey)).one().found - kept
        self._report.locked = max(0, left)

    def _transaction(
        self, *, lead: str | None = "sweep"
    ) -> AbstractAsyncContextManager[Transaction]:
        """Who only counts or settles must not lead: the sweep elsewhere would think itself done."""
        return transaction(
            self._sessions,
            self._settings,
            time_zone=self._workflow.time_zone,
            lead=lead and f"{lead} {self._workflow.name}",
        )
