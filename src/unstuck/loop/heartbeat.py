"""Beats for work outside of the job loop: any record, in any worker, task or thread."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Any
from uuid import uuid4

from sqlalchemy.exc import SQLAlchemyError

from unstuck import ledger
from unstuck.claims import Claimed, drop_claim, take_claim
from unstuck.db import Sessions, transaction
from unstuck.errors import ClaimLost, UnstuckError, describe
from unstuck.loop.claim import Claim
from unstuck.loop.workshop import Workshop, name_worker
from unstuck.registry import Workflow

logger = logging.getLogger("unstuck.loop")


class Beating:
    """`async with` it around the work on one record that is in Processing already. Inside, the
    record counts as alive whatever its `updated_at` says, for as long as this process lives.

    Where another worker has a claim and lives, or takes the record over, it raises `ClaimLost`."""

    def __init__(
        self,
        shop: Workshop,
        workflow: Workflow,
        record: object,
        *,
        step: str | None,
        details: dict[str, Any] | None,
        worker_id: str | None,
    ) -> None:
        self._shop = shop
        self._settings = shop.settings
        self._threshold = workflow.policy(shop.settings).threshold
        self._step = step
        self._claimed = Claimed(
            workflow=workflow.name,
            record_id=workflow.write_key(record),
            token=uuid4(),
            worker_id=worker_id or name_worker(workflow.name),
            key=workflow.read_key(record),
            identity=record,
            details=details,
        )

    async def __aenter__(self) -> Claim:
        shop = self._shop
        shop.meet(await shop.sessions.find_engine())
        self._heart, self._lifeline = shop.heart, shop.lifeline
        claim = self._claim = Claim(self._claimed, shop.lifeline, self._settings)
        details = self._claimed.details

        async def take(sessions: Sessions) -> bool:
            async with transaction(sessions, self._settings) as tx:
                return await take_claim(
                    tx.connection,
                    claim,
                    claim.worker_id,
                    self._threshold,
                    step=self._step,
                    details=details,
                )

        if not await self._lifeline.run(take):
            raise ClaimLost(claim.label)
        claim.bind(asyncio.current_task())
        self._heart.add(claim, self._threshold)
        return claim

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        claim = self._claim
        claim.is_ending = True
        claim.stop_beating()
        owned = not claim.lost and await self._try_end()
        if owned:
            return
        if isinstance(error, asyncio.CancelledError) and claim.lost:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        if error is None or isinstance(error, asyncio.CancelledError):
            raise ClaimLost(claim.label) from error

    async def _try_end(self) -> bool:
        """The work is done, whatever the database says to that: a claim that stays will age."""
        try:
            return await self._lifeline.run(self._end)
        except (UnstuckError, SQLAlchemyError, OSError) as error:
            label = self._claim.label
            logger.error("The claim to %s could not be ended: %s", label, describe(error))
            return True

    async def _end(self, sessions: Sessions) -> bool:
        claim = self._claim
        async with transaction(sessions, self._settings) as tx:
            owned = await drop_claim(tx.connection, claim)
            if not owned:
                await ledger.append(
                    tx.connection,
                    claim.workflow,
                    claim.record_id,
                    "late_finish",
                    worker_id=claim.worker_id,
                    data={"token": str(claim.token)},
                )
        return owned
