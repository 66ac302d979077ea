"""What one call of the job loop did."""

from __future__ import annotations

from dataclasses import dataclass, fields

from unstuck.events import Ended


@dataclass(slots=True)
class LoopResult:
    """Counted by how the claims ended. `stuck`: neither written nor spooled; the sweep finds it.
    `error`: why nothing more could be claimed."""

    workflow: str
    claimed: int = 0
    completed: int = 0
    failed: int = 0
    requeued: int = 0
    held: int = 0
    moved: int = 0
    lost: int = 0
    spooled: int = 0
    stuck: int = 0
    error: str | None = None
    breaker_open: bool = False
    seconds: float = 0.0

    def count(self, ended: Ended) -> None:
        setattr(self, ended.outcome, getattr(self, ended.outcome) + 1)

    def __str__(self) -> str:
        names = [f.name for f in fields(self)][2:-3]
        counts = ", ".join(f"{getattr(self, n)} {n}" for n in names if getattr(self, n))
        stop = "; the circuit breaker is open" if self.breaker_open else ""
        stop += f"; {self.error}" if self.error else ""
        return f"{self.workflow}: claimed {self.claimed}: {counts or 'nothing to do'}{stop}"
