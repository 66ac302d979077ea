"""Hands a zombie to its workflow's own recovery and writes down what came of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unstuck import ledger
from unstuck.claims import lock_record, move_record, revoke_claim
from unstuck.clock import now
from unstuck.db import Transaction
from unstuck.decisions import Outcome, Policy
from unstuck.events import Zombie
from unstuck.recovery import Recovered, run_recovery
from unstuck.registry import Workflow


async def hand_over(
    tx: Transaction, workflow: Workflow, policy: Policy, zombie: Zombie, status: Any
) -> tuple[Zombie, bool, Any] | None:
    """The zombie as it was settled, whether it left Processing, and its new status.

    The record is locked by this transaction, so nobody else can have changed it in between. None if
    the recovery chose to leave it alone.
    """
    assert workflow.recover is not None
    answer = await run_recovery(workflow.recover, zombie, tx.session)
    if answer.outcome is Outcome.skipped:
        return None
    await tx.session.flush()
    key = workflow.read_key(zombie.identity)
    record = await lock_record(tx.connection, workflow, key)
    current = status if record is None else record.status
    outcome, new = _destination(workflow, policy, zombie, answer)
    note = f"{_WORDS[outcome]} stuck Processing state: {answer.reason or 'by its own recovery'}"
    if current in workflow.processing and new is not None:
        await move_record(tx.connection, workflow, key, old=current, new=new, note=note)
        current = new
    await revoke_claim(tx.connection, workflow, zombie.record_id)
    held = {"held_at": now(), "held_reason": note} if outcome is Outcome.held else {}
    await ledger.remember(
        tx.connection,
        workflow.name,
        zombie.record_id,
        zombie_count=zombie.zombie_count,
        last_zombie_at=now(),
        **held,
    )
    await ledger.append(
        tx.connection,
        workflow.name,
        zombie.record_id,
        "zombie",
        cause=zombie.cause,
        outcome=outcome.value,
        worker_id=zombie.worker_id,
        zombie_count=zombie.zombie_count,
        stale_seconds=zombie.stale_seconds,
        data={"reason": answer.reason, **answer.data},
    )
    return replace(zombie, outcome=outcome), current not in workflow.processing, current


_WORDS = {
    Outcome.recovered: "Recovered from",
    Outcome.requeued: "Requeued from",
    Outcome.failed: "Given up from",
    Outcome.held: "Held from",
}


def _destination(
    workflow: Workflow, policy: Policy, zombie: Zombie, answer: Recovered
) -> tuple[Outcome, Any]:
    """Where the record goes: as the recovery said, or as its strikes allow."""
    outcome = answer.outcome
    if outcome is Outcome.recovered and zombie.zombie_count > policy.max_resets:
        outcome = Outcome.failed
    if outcome is Outcome.failed and workflow.exhausted is None:
        outcome = Outcome.held
    destinations = {Outcome.failed: workflow.exhausted, Outcome.held: workflow.held}
    return outcome, destinations.get(outcome, workflow.queued)
