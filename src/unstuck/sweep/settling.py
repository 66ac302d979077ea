"""Forgets the strikes of records that have completed cleanly since: strikes are consecutive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from unstuck import ledger
from unstuck.claims import completed_keys
from unstuck.db import Transaction
from unstuck.errors import UnknownRecord
from unstuck.identity import Key
from unstuck.registry import Workflow


async def settle_completed(
    workflow: Workflow, begin: Callable[[], AbstractAsyncContextManager[Transaction]], size: int
) -> None:
    """Looks up all that is remembered, in batches; one replica at a time."""
    after: str | None = None
    known: list[str] = []
    while after is None or len(known) == size:
        async with begin() as tx:
            if not tx.leads:
                return
            known = await ledger.list_remembered(
                tx.connection, workflow.name, after=after, limit=size
            )
            await _settle(tx, workflow, known)
        if not known:
            return
        after = known[-1]


async def _settle(tx: Transaction, workflow: Workflow, record_ids: list[str]) -> None:
    keys = [key for key in (_read_key(workflow, id_) for id_ in record_ids) if key is not None]
    done = await completed_keys(tx.connection, workflow, keys) if keys else []
    if done:
        ids = [workflow.write_key(key) for key in done]
        await ledger.settle(tx.connection, workflow.name, ids)


def _read_key(workflow: Workflow, record_id: str) -> Key | None:
    try:
        return workflow.read_key(record_id)
    except UnknownRecord:
        # The model's key has changed since; what is remembered under the old one is pruned.
        return None
