"""The job loop: claims a batch, attempts each record, gives back what it did not begin."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

from unstuck.claims import Claimed, Claimer
from unstuck.db import engine_of, is_passing, transaction
from unstuck.errors import SessionUnavailable, describe
from unstuck.events import Ended, is_being_cancelled
from unstuck.identity import most_keys
from unstuck.loop.arguments import (
    Filters,
    check_count,
    read_filters,
    read_order,
    read_seconds,
    takes_claim,
)
from unstuck.loop.attempt import Attempt, Job
from unstuck.loop.claim import Claim
from unstuck.loop.result import LoopResult
from unstuck.loop.shielding import see_through, settle
from unstuck.loop.workshop import Workshop, name_worker
from unstuck.registry import Workflow
from unstuck.signals import Cause

logger = logging.getLogger("unstuck.loop")


@dataclass(eq=False)
class JobLoop:
    """One call of `run_job_loop`."""

    job: Job
    claimer: Claimer
    worker_id: str
    batch_size: int
    concurrency: int
    filters: Filters
    drain: bool
    result: LoopResult = field(init=False)

    def __post_init__(self) -> None:
        self.result = LoopResult(self.job.workflow.name)

    def refuse(self, reason: str) -> LoopResult:
        self.result.error = reason
        return self.result

    @staticmethod
    def of(
        shop: Workshop,
        workflow: Workflow,
        processing: Any,
        function: Callable[..., Any],
        *,
        timeout: float | timedelta | None,
        order: Any,
        name: str | None,
        **pace: Any,
    ) -> JobLoop:
        """From the arguments of `run_job_loop`; `pace` is the rest of the fields."""
        check_count("batch_size", pace["batch_size"])
        check_count("concurrency", pace["concurrency"])
        siblings = shop.registry.siblings(workflow)
        wants = takes_claim(function)
        job = Job(workflow, siblings, function, wants, read_seconds(timeout), shop)
        threshold = workflow.policy(shop.settings).threshold
        claimer = Claimer(workflow, processing, threshold, read_order(workflow.model, order))
        return JobLoop(job, claimer, name_worker(name or workflow.name), **pace)

    async def run(self) -> LoopResult:
        began = monotonic()
        try:
            while await self._may_claim():
                batch, requeued = await self._claim(), self.result.requeued
                await self._process(batch)
                if not self.result.error:
                    await self.job.shop.endings.drain()
                # What only goes round in circles would never be drained.
                if not self.drain or self.result.requeued - requeued == len(batch):
                    break
        finally:
            self.result.breaker_open = not self.job.shop.breaker.is_closed
            self.result.seconds = monotonic() - began
            level = logging.INFO if self.result.claimed else logging.DEBUG
            logger.log(level, "%s", self.result)
        return self.result

    async def _may_claim(self) -> bool:
        """False while sessions cannot be had. The one that finds out opens a session for it."""
        shop = self.job.shop
        if not shop.breaker.is_closed:
            if not shop.breaker.try_probe():
                return False
            try:
                await self._tell_breaker()
                async with shop.sessions.open(shop.settings.session_timeout_seconds):
                    shop.breaker.succeed()
            except BaseException as error:  # a probe that says nothing would be the last
                shop.breaker.fail(describe(error))
                if not isinstance(error, Exception):
                    raise
            await self._tell_breaker()
        return shop.breaker.is_closed

    async def _claim(self) -> list[Claim]:
        """What was claimed while we were cancelled goes back at once."""
        claiming = asyncio.create_task(self._claim_batch())
        was_cancelled = await settle([claiming], self._patience)
        batch = claiming.result() if claiming.done() else []
        if was_cancelled:
            claiming.cancel()
            await self._wind_up({}, batch, Cause.shutdown)
            raise asyncio.CancelledError
        return batch

    async def _claim_batch(self) -> list[Claim]:
        """An outage is logged and waited out: the next call tries again."""
        shop, workflow = self.job.shop, self.job.workflow
        size = most_keys(workflow.key, self.batch_size)
        zone, filters = workflow.time_zone, read_filters(self.filters)
        found: list[Claimed] = []
        try:
            async with transaction(shop.sessions, shop.settings, time_zone=zone) as tx:
                shop.meet(engine_of(tx.session))
                found = await self.claimer.claim(tx.connection, self.worker_id, size, filters)
        except BaseException as error:
            failed = isinstance(error, Exception)
            if found:  # perhaps it was committed: if so, what is ours goes back
                cause = Cause.no_session if failed else Cause.shutdown
                await see_through(self._give_back(found, cause), self._patience)
            if not failed or not is_passing(error):
                raise
            await self._could_not_claim(error)
            return []
        shop.breaker.succeed()
        self.result.claimed += len(found)
        return [self._hold(claimed) for claimed in found]

    async def _could_not_claim(self, error: BaseException) -> None:
        shop, name = self.job.shop, self.job.workflow.name
        self.result.error = describe(error)
        logger.error("Records of %s could not be claimed: %s", name, self.result.error)
        if isinstance(error, SessionUnavailable):
            shop.breaker.fail(self.result.error)
            await shop.observers.tell("on_session_failed", name, self.result.error)
            await self._tell_breaker()

    def _hold(self, claimed: Claimed) -> Claim:
        claim = Claim(claimed, self.job.shop.lifeline, self.job.settings)
        self.job.shop.heart.add(claim, self.claimer.threshold)
        return claim

    async def _process(self, batch: list[Claim]) -> None:
        waiting = deque(batch)
        running: dict[asyncio.Task[Ended], Claim] = {}
        cause, breaker = Cause.shutdown, self.job.shop.breaker
        try:
            while waiting or running:
                while waiting and len(running) < self.concurrency and breaker.is_closed:
                    claim = waiting.popleft()
                    attempt = Attempt(self.job, claim)
                    running[asyncio.create_task(attempt.run(), name=claim.label)] = claim
                if not running:
                    cause = Cause.no_session
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await self._count([task.result()])
                    del running[task]
        finally:
            await self._wind_up(running, list(waiting), cause)

    async def _wind_up(
        self, running: dict[asyncio.Task[Ended], Claim], waiting: list[Claim], cause: Cause
    ) -> None:
        """Whatever ended the batch: stops what runs, gives back what does not."""
        for task in running:
            task.cancel()
        returned = [self._let_go(waiting, cause)] if waiting else []
        was_cancelled = await settle([*running, *returned], self._patience, at_most=self._patience)
        # A task that was cancelled before its first step has ended nothing.
        unbegun = [claim for task, claim in running.items() if task.done() and task.cancelled()]
        if unbegun:
            returned.append(self._let_go(unbegun, cause))
            was_cancelled |= await settle(returned[-1:], self._patience, at_most=self._patience)
        ended = [one for future in returned if future.done() for one in future.result()]
        for task, claim in running.items():
            if task.done() and not task.cancelled() and task.exception() is None:
                ended.append(task.result())
            elif claim not in unbegun:
                logger.error("%s was not ended in time; the sweep finds it", claim.label)
        await self._count(ended)
        if was_cancelled:
            raise asyncio.CancelledError

    def _let_go(self, claims: list[Claim], cause: Cause) -> asyncio.Future[list[Ended]]:
        for claim in claims:
            claim.is_ending = True
        future = self._give_back([claim.claimed for claim in claims], cause)
        future.add_done_callback(lambda _: [claim.stop_beating() for claim in claims])
        return future

    def _give_back(self, claims: list[Claimed], cause: Cause) -> asyncio.Future[list[Ended]]:
        """By the lifeline, which nobody cancels; what takes too long is spooled."""
        shop, workflow = self.job.shop, self.job.workflow
        return shop.lifeline.run(
            lambda sessions: shop.endings.on(sessions).give_back(
                workflow, claims, cause, within=self._patience * 0.8
            )
        )

    @property
    def _patience(self) -> float:
        return self.job.settings.shutdown_timeout_seconds

    async def _count(self, ends: Sequence[Ended]) -> None:
        """Observers may take their time, but not the time of a shutdown."""
        for ended in ends:
            self.result.count(ended)
        try:
            async with asyncio.timeout(self._patience if is_being_cancelled() else None):
                for ended in ends:
                    await self.job.shop.observers.tell("on_attempt_ended", ended)
                await self._tell_breaker()
        except TimeoutError:
            logger.error("Observers took longer than a shutdown may take")

    async def _tell_breaker(self) -> None:
        shop, name = self.job.shop, self.job.workflow.name
        while shop.breaker.changes:
            await shop.observers.tell("on_breaker_changed", name, shop.breaker.changes.pop(0))
