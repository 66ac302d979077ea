"""What is true at the end, counted in the database, and whether the promises were kept."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from examples.demo.invoice import Delivery, Status
from examples.demo.sight import FINAL, Entry, look


@dataclass(frozen=True)
class Verdict:
    """`lost`: neither completed nor failed at the end, or completed without its delivery.
    `twice`: more than one delivery was committed."""

    counts: dict[str, int]
    lost: int
    twice: int

    @property
    def is_kept(self) -> bool:
        return self.lost == 0 and self.twice == 0

    @property
    def rows(self) -> list[tuple[str, int]]:
        promises = [("lost", self.lost), ("run twice by two owners", self.twice)]
        return [*self.counts.items(), *promises]


async def judge(engine: AsyncEngine, ids: Collection[int]) -> Verdict:
    sight = await look(engine)
    async with engine.connect() as connection:
        deliveries = Counter(await connection.scalars(select(Delivery.invoice_id)))
    statuses = {one.id: one.status for one in sight.invoices}
    final = {i for i in ids if statuses.get(i) in FINAL}
    undelivered = {i for i in final if statuses[i] is Status.Completed and not deliveries[i]}
    counts = {
        "invoices": len(ids),
        "brought back by the sweep": _count(sight.entries, "zombie"),
        "given back by their worker": _count(sight.entries, "returned")
        + _count(sight.entries, "attempt", outcome="requeued"),
        "failed for want of a session": _count(sight.entries, "attempt", cause="no_session"),
        "retried by a human": _count(sight.entries, "retried"),
        "late results refused": _count(sight.entries, "late_finish"),
        "completed": sum(statuses.get(i) is Status.Completed for i in ids),
        "failed": sum(statuses.get(i) is Status.Failed for i in ids),
    }
    twice = sum(number > 1 for number in deliveries.values())
    return Verdict(counts, lost=len(ids) - len(final) + len(undelivered), twice=twice)


def _count(entries: Collection[Entry], kind: str, *, cause: str = "", outcome: str = "") -> int:
    return sum(
        entry.kind == kind and cause in ("", entry.cause) and outcome in ("", entry.outcome)
        for entry in entries
    )
