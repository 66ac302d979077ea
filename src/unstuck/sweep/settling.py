"""Forgets what is settled: strikes of records that completed cleanly, holds and claims of those
that left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from uuid import UUID

from unstuck import ledger
from unstuck.claims import Finder, drop_stale, list_stale, read_statuses
from unstuck.db import Transaction
from unstuck.errors import UnknownRecord
from unstuck.identity import Key, most_keys
from unstuck.registry import Workflow
from unstuck.settings import ZombieSettings


class Settler:
    """Looks up a bounded part of what is remembered each time, and goes on there the next time."""

    def __init__(self, settings: ZombieSettings) -> None:
        self._settings = settings
        self._reached: dict[str, str | None] = {}

    async def settle(
        self, workflow: Workflow, begin: Callable[[], AbstractAsyncContextManager[Transaction]]
    ) -> None:
        size = most_keys(workflow.key, self._settings.batch_size)
        after = self._reached.get(workflow.name)
        for _ in range(max(1, self._settings.max_per_sweep // size)):
            async with begin() as tx:
                if not tx.leads:
                    return
                known = await ledger.list_remembered(
                    tx.connection, workflow.name, after=after, limit=size
                )
                await _settle(tx, workflow, dict(known))
            after = known[-1][0] if len(known) == size else None
            self._reached[workflow.name] = after
            if after is None:
                return

    async def drop_orphans(
        self, finder: Finder, begin: Callable[[], AbstractAsyncContextManager[Transaction]]
    ) -> None:
        """Claims of workers that died between the end of their record and that of the claim: kept,
        they would speak for whoever takes the record up next."""
        workflow = finder.workflow
        async with begin() as tx:
            size = most_keys(workflow.key, self._settings.batch_size)
            tokens = await list_stale(tx.connection, finder, size) if tx.leads else {}
            if gone := await _left_processing(tx, workflow, tokens):
                await drop_stale(tx.connection, finder, gone)


async def _left_processing(
    tx: Transaction, workflow: Workflow, tokens: dict[str, UUID]
) -> list[UUID]:
    keys = {id_: key for id_ in tokens if (key := _read_key(workflow, id_)) is not None}
    statuses = await read_statuses(tx.connection, workflow, list(keys.values())) if keys else {}
    gone = [id_ for id_ in keys if statuses.get(id_) not in workflow.processing]
    return [tokens[id_] for id_ in gone]


async def _settle(tx: Transaction, workflow: Workflow, known: dict[str, bool]) -> None:
    """`known`: whether each record is marked as held."""
    keys = [key for key in (_read_key(workflow, id_) for id_ in known) if key is not None]
    statuses = await read_statuses(tx.connection, workflow, keys) if keys else {}
    completed = [id_ for id_, status in statuses.items() if status == workflow.completed]
    if completed and workflow.completed is not None:
        await ledger.settle(tx.connection, workflow.name, completed)
    stays = (*workflow.processing, workflow.held, workflow.completed)
    left = [id_ for id_, status in statuses.items() if known.get(id_) and status not in stays]
    if left:
        await ledger.end_holds(tx.connection, workflow.name, left)


def _read_key(workflow: Workflow, record_id: str) -> Key | None:
    try:
        return workflow.read_key(record_id)
    except UnknownRecord:
        # The model's key has changed since; what is remembered under the old one is pruned.
        return None
