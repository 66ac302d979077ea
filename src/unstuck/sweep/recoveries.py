"""Hands a zombie to its workflow's own recovery and writes down what came of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unstuck import ledger
from unstuck.claims import Taker, lock_record, move_record, revoke_claim
from unstuck.clock import now
from unstuck.db import Transaction
from unstuck.decisions import Outcome, Policy
from unstuck.errors import WrongState
from unstuck.events import Zombie
from unstuck.recovery import Recovered, run_recovery
from unstuck.registry import Workflow


async def hand_over(
    tx: Transaction, taker: Taker, zombie: Zombie, status: Any
) -> tuple[Zombie, bool, Any]:
    """The zombie as it was settled, whether it left Processing, and its new status.

    The record is locked by this transaction, so that only the recovery itself can have changed it.
    """
    workflow, policy = taker.finder.workflow, taker.finder.policy
    assert workflow.recover is not None
    answer = await run_recovery(workflow.recover, zombie, tx.session)
    if answer.outcome is Outcome.skipped:
        return replace(zombie, outcome=Outcome.skipped), False, status
    key = workflow.read_key(zombie.identity)
    record = await lock_record(tx.connection, workflow, key)
    current = None if record is None else record.status
    outcome, new = _destination(workflow, policy, zombie, answer, current)
    note = f"{_WORDS[outcome]} stuck Processing state: {answer.reason or 'by its own recovery'}"
    if new is not None:
        move = {"old": current, "new": new, "note": note, "strikes": zombie.zombie_count}
        if not await move_record(tx.connection, workflow, key, **move, siblings=taker.siblings):
            raise WrongState(f"record {zombie.record_id} could not be changed from {current!r}")
        current = new
    await revoke_claim(tx.connection, workflow, zombie.record_id)
    settled = replace(zombie, outcome=outcome)
    await _write_down(tx, settled, note, {"reason": answer.reason, **answer.data})
    return settled, current not in workflow.processing, current


async def _write_down(tx: Transaction, zombie: Zombie, note: str, data: dict[str, Any]) -> None:
    is_held = zombie.outcome is Outcome.held
    await ledger.remember(
        tx.connection,
        zombie.workflow,
        zombie.record_id,
        zombie_count=zombie.zombie_count,
        last_zombie_at=now(),
        held_at=now() if is_held else None,
        held_reason=note if is_held else None,
        **({} if zombie.details is None else {"details": zombie.details}),
    )
    await ledger.append(
        tx.connection,
        zombie.workflow,
        zombie.record_id,
        "zombie",
        cause=zombie.cause,
        outcome=zombie.outcome.value,
        worker_id=zombie.worker_id,
        zombie_count=zombie.zombie_count,
        stale_seconds=zombie.stale_seconds,
        data=data,
    )


_WORDS = {
    Outcome.recovered: "Recovered from",
    Outcome.requeued: "Requeued from",
    Outcome.failed: "Given up from",
    Outcome.held: "Held from",
}


def _destination(
    workflow: Workflow, policy: Policy, zombie: Zombie, answer: Recovered, current: Any
) -> tuple[Outcome, Any]:
    """Where the record goes: as the recovery said, or as its strikes allow; None for nowhere."""
    outcome = answer.outcome
    if current not in workflow.processing:
        return outcome, None  # the recovery has moved or deleted it
    if outcome is Outcome.recovered and zombie.zombie_count > policy.max_resets:
        outcome = Outcome.failed
    if outcome is Outcome.failed and workflow.exhausted is None:
        outcome = Outcome.held
    destinations = {Outcome.failed: workflow.exhausted, Outcome.held: workflow.held}
    return outcome, destinations.get(outcome, workflow.queued)
