"""One look at the database: each invoice as it is now, and everything that the ledger says."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from examples.demo.invoice import Invoice, Status
from unstuck import metadata

_claims = metadata.tables["zombie_claims"]
_events = metadata.tables["zombie_events"]
FINAL = (Status.Completed, Status.Failed)


@dataclass(frozen=True)
class Seen:
    """An invoice, and the worker that has it."""

    id: int
    status: Status
    owner: str | None = None
    at_work: bool = False
    beat_at: datetime | None = None


@dataclass(frozen=True)
class Entry:
    """What the ledger says of an invoice."""

    invoice_id: int
    kind: str
    cause: str | None
    outcome: str | None
    worker: str
    strikes: int | None
    data: dict[str, Any]


@dataclass(frozen=True)
class Sight:
    invoices: tuple[Seen, ...] = ()
    entries: tuple[Entry, ...] = ()

    def owned_by(self, worker: str) -> list[Seen]:
        return [one for one in self.invoices if one.owner == worker]

    def is_in_mid_batch(self, worker: str) -> bool:
        """It has done one invoice, is at work on another, and has yet another to begin."""
        mine = self.owned_by(worker)
        return self.completed_by(worker) > 0 and {one.at_work for one in mine} == {True, False}

    def completed_by(self, worker: str) -> int:
        return sum(e.worker == worker and e.outcome == "completed" for e in self.entries)

    def last_beat(self, worker: str) -> datetime | None:
        return max((one.beat_at for one in self.owned_by(worker) if one.beat_at), default=None)

    def are_final(self, ids: set[int]) -> bool:
        return all(one.status in FINAL for one in self.invoices if one.id in ids)

    @property
    def failed(self) -> list[int]:
        return [one.id for one in self.invoices if one.status is Status.Failed]

    def has_refused(self, worker: str) -> bool:
        return any(e.worker == worker and e.kind == "late_finish" for e in self.entries)


async def look(engine: AsyncEngine) -> Sight:
    async with engine.connect() as connection:
        entries = [_read_entry(row) for row in await connection.execute(_LEDGER)]
        claims = {int(row.record_id): row for row in await connection.execute(select(_claims))}
        found = await connection.execute(select(Invoice.id, Invoice.status).order_by(Invoice.id))
        invoices = [_read_invoice(row.id, row.status, claims.get(row.id)) for row in found]
    return Sight(tuple(invoices), tuple(entries))


# Without what always goes with another entry.
_TWINS = ("recovered", "late_beat")
_LEDGER = (
    select(_events)
    .where(_events.c.record_id.is_not(None), _events.c.kind.not_in(_TWINS))
    .order_by(_events.c.id)
)


def _read_entry(row: Any) -> Entry:
    return Entry(
        int(row.record_id),
        row.kind,
        row.cause,
        row.outcome,
        _short(row.worker_id or ""),
        row.zombie_count,
        row.data or {},
    )


def _read_invoice(invoice_id: int, status: Status, claim: Any) -> Seen:
    if claim is None or status is not Status.Processing:
        return Seen(invoice_id, status)
    at_work = claim.started_at is not None
    return Seen(invoice_id, status, _short(claim.worker_id), at_work, claim.heartbeat_at)


def _short(worker_id: str) -> str:
    """host:pid:name, of which the name says enough here."""
    return worker_id.rpartition(":")[2]
