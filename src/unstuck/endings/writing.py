"""Writes how a claim ends: the record's last status, the claim given up and the attempt in the
ledger, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from unstuck import ledger
from unstuck.claims import (
    Change,
    Claimed,
    drop_claim,
    drop_claims,
    end_lease,
    lock_record,
    move_record,
    move_records,
    read_statuses,
)
from unstuck.clock import now
from unstuck.errors import ClaimLost, WrongState
from unstuck.events import Ended
from unstuck.registry import Workflow

COMPLETED, FAILED, STOPPED, RETURNED = "completed", "failed", "stopped", "returned"
REQUEUED, HELD, MOVED, LOST, SPOOLED, STUCK = (
    "requeued",
    "held",
    "moved",
    "lost",
    "spooled",
    "stuck",
)
ATTEMPT = "attempt"


@dataclass(frozen=True, slots=True)
class Ending:
    """What is to be written of a claim.

    completed, failed: the processing function came to its end; stopped: it was cut off, and runs
    again unless it must not; returned: it never began."""

    outcome: str
    error: str | None = None
    cause: str | None = None
    keeps_error: bool = False
    data: dict[str, Any] = field(default_factory=dict)


async def write_ending(
    connection: AsyncConnection,
    workflow: Workflow,
    claim: Claimed,
    ending: Ending,
    siblings: Sequence[Workflow] = (),
) -> Ended:
    """Raises `ClaimLost` if the claim is another's by now; then nothing may be committed.

    The record is written before the claim, as everybody does who locks both."""
    if ending.outcome in (STOPPED, RETURNED):
        return await _let_go(connection, workflow, claim, ending, siblings)
    new = workflow.completed if ending.outcome == COMPLETED else workflow.failed
    moved = await move_record(
        connection,
        workflow,
        claim.key,
        old=workflow.processing,
        new=new,
        note=ending.error,
        keeps_error=ending.keeps_error,
        siblings=siblings,
    )
    if not await drop_claim(connection, claim):
        raise ClaimLost(f"{workflow.name} {claim.record_id}")
    outcome = ending.outcome if moved else await _read_outcome(connection, workflow, claim)
    await ledger.append_all(connection, [row_of(claim, ending, outcome)])
    if outcome == COMPLETED and claim.remembered:
        await ledger.settle(connection, workflow.name, [claim.record_id])
    return tell(claim, outcome, ending)


async def give_back(
    connection: AsyncConnection,
    workflow: Workflow,
    claims: Sequence[Claimed],
    cause: str,
    siblings: Sequence[Workflow] = (),
) -> list[Ended]:
    """What was claimed and never begun is queued again, without a strike. Of what is locked, or not
    to be seen from here, nothing is told: it is still to be given back."""
    statuses = await read_statuses(connection, workflow, [c.key for c in claims], lock=True)
    seen = [claim for claim in claims if claim.record_id in statuses]
    owned = await drop_claims(connection, seen) if seen else set()
    ours = {claim.record_id: claim for claim in seen if claim.token in owned}
    ending = Ending(RETURNED, cause=cause)
    busy = [ours[id_].key for id_ in ours if statuses[id_] in workflow.processing]
    change: Change = {"old": workflow.processing, "new": workflow.queued, "siblings": siblings}
    if busy and await move_records(connection, workflow, busy, **change) != len(busy):
        raise WrongState(f"{workflow.name}: records could not be queued again")
    ends = {id_: _outcome_of(workflow, statuses[id_], REQUEUED) for id_ in ours}
    if ours:
        rows = [row_of(claim, ending, ends[id_]) for id_, claim in ours.items()]
        await ledger.append_all(connection, rows)
    return [tell(claim, ends.get(claim.record_id, LOST), ending) for claim in seen]


async def _read_outcome(connection: AsyncConnection, workflow: Workflow, claim: Claimed) -> str:
    """The processing function has set a final status itself, and that one stands."""
    statuses = await read_statuses(connection, workflow, [claim.key])
    status = statuses.get(claim.record_id)
    if status is not None and status in workflow.processing:
        raise WrongState(f"{workflow.name} {claim.record_id} could not be changed from {status}")
    return _outcome_of(workflow, status, MOVED)


def _outcome_of(workflow: Workflow, status: Any, otherwise: str) -> str:
    known = {workflow.completed: COMPLETED, workflow.failed: FAILED, workflow.queued: REQUEUED}
    return known.get(status, otherwise if status in workflow.processing else MOVED)


async def _let_go(
    connection: AsyncConnection,
    workflow: Workflow,
    claim: Claimed,
    ending: Ending,
    siblings: Sequence[Workflow],
) -> Ended:
    """Queued again; or held, if it had begun and must not run twice."""
    row = await lock_record(connection, workflow, claim.key)
    if row is None:
        # Deleted, or not to be seen from here: the claim stays, and ages, for a sweep to settle.
        return tell(claim, MOVED, ending)
    if not await drop_claim(connection, claim):
        raise ClaimLost(f"{workflow.name} {claim.record_id}")
    if row.status not in workflow.processing:
        outcome = _outcome_of(workflow, row.status, MOVED)
        await ledger.append_all(connection, [row_of(claim, ending, outcome)])
        return tell(claim, outcome, ending)
    is_free = ending.outcome == RETURNED or (row.reapable and row.effect is None)
    outcome, new = (REQUEUED, workflow.queued) if is_free else (HELD, workflow.held)
    note = _why_stopped(ending, row, is_free)
    if new is None:
        await end_lease(connection, workflow, claim.key)
    else:
        move: Change = {"old": row.status, "new": new, "note": note, "siblings": siblings}
        if not await move_record(connection, workflow, claim.key, **move):
            raise WrongState(f"{workflow.name} {claim.record_id} could not be changed")
    if not is_free or row.details is not None:
        await ledger.remember(
            connection,
            workflow.name,
            claim.record_id,
            zombie_count=row.zombie_count,
            held_at=None if is_free else now(),
            held_reason=None if is_free else note,
            **({} if row.details is None else {"details": row.details}),
        )
    await ledger.append_all(connection, [row_of(claim, ending, outcome)])
    return tell(claim, outcome, ending)


def _why_stopped(ending: Ending, row: Any, is_free: bool) -> str | None:
    if ending.outcome == RETURNED:
        return None
    head = ending.error or "Stopped in mid-work"
    if is_free:
        return f"{head}; queued again"
    if row.effect is not None:
        begun = f"the side effect '{row.effect}' had begun and was not seen to end"
        return f"{head}; {begun}, a human decides"
    return f"{head}; not reapable, a human decides"


def row_of(claim: Claimed, ending: Ending, outcome: str) -> dict[str, Any]:
    said = {} if ending.error is None else {"error": ending.error}
    return {
        "workflow": claim.workflow,
        "record_id": claim.record_id,
        "kind": RETURNED if ending.outcome == RETURNED else ATTEMPT,
        "cause": ending.cause,
        "outcome": outcome,
        "worker_id": claim.worker_id,
        "data": {**token_of(claim), **said, **ending.data},
    }


def token_of(claim: Claimed) -> dict[str, Any]:
    return {"token": str(claim.token)}


def tell(claim: Claimed, outcome: str, ending: Ending) -> Ended:
    return Ended(
        workflow=claim.workflow,
        record_id=claim.record_id,
        outcome=outcome,
        cause=ending.cause,
        error=ending.error,
        worker_id=claim.worker_id,
        seconds=_seconds(ending),
    )


def _seconds(ending: Ending) -> float:
    seconds = ending.data.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0
