"""What a human decides: release, fail, retry or cancel one record, with who and why in the ledger.

Each is guarded like everything else: it applies to a record that is in the status it is for, and to
no other; the claim is taken away, so that a late result is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.engine import Row

from unstuck import ledger
from unstuck.claims import lock_record, move_record, revoke_claim
from unstuck.db import Transaction
from unstuck.errors import UnknownRecord, WrongState
from unstuck.registry import Workflow


@dataclass(frozen=True)
class Change:
    """What was changed."""

    workflow: str
    record_id: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Intervention:
    """One kind of decision: what it is for and where it leads."""

    kind: str
    wanted: str
    applies: Callable[[Workflow, Any, bool], bool]
    leads_to: Callable[[Workflow], Any]


def _is_held(workflow: Workflow, status: Any, marked: bool) -> bool:
    if workflow.held is not None and status == workflow.held:
        return True
    return marked and status in workflow.processing


def _has_failed(workflow: Workflow, status: Any, marked: bool) -> bool:
    return status is not None and status in (workflow.failed, workflow.crashed)


def _is_processing(workflow: Workflow, status: Any, marked: bool) -> bool:
    return status in workflow.processing


def _queue(workflow: Workflow) -> Any:
    return workflow.queued


def _end(workflow: Workflow) -> Any:
    return workflow.exhausted if workflow.failed is None else workflow.failed


RELEASE = Intervention("released", "held", _is_held, _queue)
FAIL = Intervention("failed", "held", _is_held, _end)
RETRY = Intervention("retried", "failed", _has_failed, _queue)
CANCEL = Intervention("cancelled", "processing", _is_processing, _end)


async def intervene(
    tx: Transaction,
    intervention: Intervention,
    workflow: Workflow,
    record: object,
    *,
    by: str,
    why: str,
    siblings: Sequence[Workflow] = (),
) -> Change:
    """Carries out a human's decision, or says why it cannot be."""
    if not by.strip() or not why.strip():
        raise ValueError("Say who decides and why: both by= and why= go into the ledger.")
    key, record_id = workflow.read_key(record), workflow.write_key(record)
    label = f"{workflow.model.__name__} {record_id}"
    row = await lock_record(tx.connection, workflow, key)
    if row is None:
        raise UnknownRecord(f"There is no {label}.")
    if not intervention.applies(workflow, row.status, row.held):
        raise WrongState(
            f"{label} is {_label(row.status)}, not {intervention.wanted}; nothing was changed."
        )
    new = intervention.leads_to(workflow)
    if new is None:
        raise WrongState(f"{workflow.name} has no failed status for {label} to go to.")
    note = f"{intervention.kind.capitalize()} by {by}: {why}"
    move = {"old": row.status, "new": new, "note": note, "siblings": siblings}
    strikes = 0 if new == workflow.queued else None
    if not await move_record(tx.connection, workflow, key, **move, strikes=strikes):
        raise WrongState(f"{label} could not be changed from {_label(row.status)}.")
    await revoke_claim(tx.connection, workflow, record_id)
    change = Change(workflow.name, record_id, row.status, new)
    await _write_down(tx, change, row, intervention.kind, {"by": by, "why": why})
    if new == workflow.queued:
        # With a clean slate, but not forgotten: that it completes cleanly is worth a ledger row.
        await ledger.remember(tx.connection, workflow.name, record_id, zombie_count=0)
    else:
        await ledger.forget(tx.connection, workflow.name, record_id)
    return change


async def _write_down(
    tx: Transaction, change: Change, row: Row[Any], kind: str, data: dict[str, str]
) -> None:
    await ledger.append(
        tx.connection,
        change.workflow,
        change.record_id,
        kind,
        worker_id=row.worker_id,
        zombie_count=row.zombie_count,
        data={**data, "old": _label(change.old), "new": _label(change.new)},
    )


def _label(status: Any) -> str:
    return status.name if isinstance(status, enum.Enum) else str(status)
