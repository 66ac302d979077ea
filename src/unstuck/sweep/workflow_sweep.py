"""The sweep of one workflow: survey, take batch by batch, then settle what came good since."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from sqlalchemy.engine import Row
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from unstuck import ledger
from unstuck.claims import Finder, Reach, can_walk, key_of, mark_hung
from unstuck.db import Sessions, Transaction, tables_are_missing, transaction
from unstuck.decisions import Outcome
from unstuck.errors import WrongState, describe
from unstuck.events import MassStall, Observers, WorkflowReport
from unstuck.identity import Key, as_list, most_keys
from unstuck.registry import Workflow
from unstuck.settings import ZombieSettings
from unstuck.sweep.recoveries import hand_over
from unstuck.sweep.settling import Settler
from unstuck.sweep.takers import Takers
from unstuck.sweep.telling import Teller

logger = logging.getLogger("unstuck.sweep")

# Keys are read this many batches at a time where there is no index to walk on.
_BATCHES_OF_KEYS = 50
# So many records that the database refuses are not each a bad record: something is wrong with all.
_MOST_REFUSALS = 20


class WorkflowSweep:
    """One pass; it counts into `report` as it goes, so that an error loses no count."""

    def __init__(
        self,
        workflow: Workflow,
        takers: Takers,
        settler: Settler,
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
        self._settler = settler
        self._teller = Teller(workflow, observers, report, dry_run=dry_run)
        self._taken = 0
        self._noticed = False
        self._refusals = 0

    async def run(self) -> None:
        async with self._transaction() as tx:
            if not tx.leads:
                self._report.swept_elsewhere = True
                return
            self._taker = self._takers.get(self._workflow, tx.dialect)
            survey = (await tx.connection.execute(self._finder.survey(self._horizon))).one()
            stall = await self._notice_stall(tx, survey)
            few = survey.found <= self._size
            walks = few or await can_walk(tx.connection, self._workflow)
            parameters = {"limit": self._size}
            rows = await self._try_take(tx, Reach.any, parameters) if survey.found and few else []
        if rows is None and stall is not None:  # it went with the batch that was refused
            async with self._transaction() as tx:
                await self._write_down(tx, stall)
        await self._teller.tell_stall(stall)
        await (self._take_apart(Reach.any, parameters) if rows is None else self._finish(rows))
        if not few:
            await (self._walk() if walks else self._take_by_keys())
        await self._count_locked(survey.found)
        if not self._dry_run:
            await self._look_after(survey)

    async def _look_after(self, survey: Row[Any]) -> None:
        """What is no zombie, but left over from one, or about to be."""
        begin = partial(self._transaction, lead="settle")
        if survey.remembered:
            await self._settler.settle(self._workflow, begin)
        if survey.claims:
            await self._settler.drop_orphans(self._finder, begin)
        if survey.hung:
            async with begin() as tx:
                hung = await mark_hung(tx.connection, self._finder) if tx.leads else []
                await ledger.log_hung(tx.connection, self._workflow.name, hung)
            await self._teller.tell_hung(hung)

    @property
    def _finder(self) -> Finder:
        return self._taker.finder

    @property
    def _size(self) -> int:
        return most_keys(self._workflow.key, self._settings.batch_size)

    @property
    def _horizon(self) -> int:
        """A survey counts no further than it has to: to a second batch, or to a mass stall."""
        return max(self._size + 1, self._settings.mass_stall_records)

    @property
    def _room(self) -> int:
        return max(0, self._settings.max_per_sweep - self._taken)

    async def _notice_stall(self, tx: Transaction, survey: Row[Any]) -> MassStall | None:
        """Too many at once cannot be the records' own fault. It is written down once, and seen by
        every sweep for a while, so that a second replica decides no differently."""
        self._noticed = 0 < self._settings.mass_stall_records <= survey.zombies
        self._report.mass_stall = self._noticed or survey.stalled
        if not self._noticed or self._dry_run:
            return None
        stall = MassStall(self._workflow.name, survey.zombies)
        await self._write_down(tx, stall)
        return stall

    async def _write_down(self, tx: Transaction, stall: MassStall) -> None:
        await ledger.append(
            tx.connection, stall.workflow, None, "mass_stall", data={"at_least": stall.zombies}
        )

    async def _walk(self) -> None:
        """Batch after batch in the order of the key."""
        reach = Reach.from_start
        after: dict[str, Any] = {}
        while size := min(self._size, self._room):
            rows = await self._take_alone(reach, limit=size, **after)
            if len(rows) < size:
                return
            reach = Reach.after_key
            after = {f"after_{n}": part for n, part in enumerate(key_of(rows[-1]))}

    async def _take_by_keys(self) -> None:
        """Without an index the keys are read once and taken in batches; then again, if there are
        more.

        A chunk of which nothing could be taken ends it: what is left is locked."""
        size = self._size
        async for keys in self._chunks_of_keys():
            before = self._taken
            for at in range(0, len(keys), size):
                await self._take_alone(Reach.in_keys, keys=as_list(keys[at : at + size]))
                if self._report.swept_elsewhere:
                    return
            if self._taken == before or self._dry_run:
                return

    async def _chunks_of_keys(self) -> AsyncIterator[list[Key]]:
        chunk = self._size * _BATCHES_OF_KEYS
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
            rows = await self._try_take(tx, reach, parameters)
        if rows is None:
            return await self._take_apart(reach, parameters)
        await self._finish(rows)
        return rows

    async def _try_take(
        self, tx: Transaction, reach: Reach, parameters: dict[str, Any]
    ) -> list[Row[Any]] | None:
        """Ends the transaction, with a commit if this is no dry run. None if the database refuses
        the batch, be it for the sake of one record."""
        try:
            if self._dry_run:
                rows = await self._taker.look(tx.connection, reach, self._with_stall(parameters))
                await tx.rollback()
            else:
                rows = await self._taker.take(tx.connection, reach, self._with_stall(parameters))
                await tx.commit()
        except DBAPIError as error:
            if error.connection_invalidated or tables_are_missing(error):
                raise
            await tx.rollback()
            self._refusal = error
            return None
        return rows

    async def _take_apart(self, reach: Reach, parameters: dict[str, Any]) -> list[Row[Any]]:
        """Halves the batch until the records stand alone that the database refuses, so that one
        that breaks a constraint of the host's does not keep the others stuck."""
        async with self._transaction() as tx:
            rows = await self._taker.look(tx.connection, reach, self._with_stall(parameters))
            await tx.rollback()
        pending = [rows] if rows else []
        while pending:
            part = pending.pop()
            async with self._transaction() as tx:
                keys = as_list([key_of(row) for row in part])
                taken = await self._try_take(tx, Reach.in_keys, {"keys": keys})
            if taken is not None:
                await self._finish(taken)
            elif len(part) > 1:
                middle = len(part) // 2
                pending += [part[middle:], part[:middle]]
            else:
                self._refused(part[0].record_id)
        return rows

    def _refused(self, record_id: str) -> None:
        self._refusals += 1
        if self._refusals > _MOST_REFUSALS:
            raise self._refusal
        reason = f"record {record_id} cannot be written: {describe(self._refusal)}"
        logger.error("Zombie sweep of %s: %s", self._workflow.name, reason)
        self._report.errors.append(reason)

    def _with_stall(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {**parameters, "noticed": self._noticed}

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
        except (SQLAlchemyError, WrongState) as error:
            reason = f"the recovery of {row.record_id} failed: {describe(error)}"
            logger.error("Zombie sweep of %s: %s", self._workflow.name, reason)
            self._report.errors.append(reason)

    async def _recover(self, row: Row[Any]) -> None:
        """One record in a transaction of its own, found and locked once more."""
        async with self._transaction() as tx:
            wanted = self._with_stall({"keys": as_list([key_of(row)])})
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
