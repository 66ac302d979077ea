"""What happened, told to observers after the commit.

An observer is any object with some of the methods of `Observer`, plain or async. They are isolated:
one that fails is logged, and neither the others nor the sweep notice.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from unstuck.decisions import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Zombie:
    """A record whose owner is gone, and what was decided for it.

    `identity` is its primary key as the database holds it; `session.get(Model, zombie.identity)`
    takes it, unless the key's type is a decorator that changes the value. `details` is the last
    checkpoint of its worker.
    """

    workflow: str
    record_id: str
    identity: Any
    cause: str
    outcome: Outcome
    zombie_count: int
    stale_seconds: float
    worker_id: str | None = None
    details: Any = None


@dataclass(frozen=True, slots=True)
class MassStall:
    """So many zombies at once that the records cannot be to blame."""

    workflow: str
    zombies: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a claim of the job loop ended.

    outcome: completed, failed, requeued, held; moved (the processing function set another status);
    lost (it was somebody else's by then); spooled or stuck (it could not be written)."""

    workflow: str
    record_id: str
    outcome: str
    cause: str | None
    error: str | None
    worker_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Hung:
    """A record whose worker lives and beats, but has been at it for too long."""

    workflow: str
    record_id: str
    worker_id: str
    seconds: float


@dataclass(slots=True)
class WorkflowReport:
    """What one sweep did for one workflow."""

    workflow: str
    found: int = 0
    requeued: int = 0
    deferred: int = 0
    failed: int = 0
    held: int = 0
    recovered: int = 0
    skipped: int = 0
    locked: int = 0
    hung: int = 0
    left_processing: int = 0
    oldest_seconds: float = 0.0
    seconds: float = 0.0
    mass_stall: bool = False
    swept_elsewhere: bool = False
    capped: bool = False
    errors: list[str] = field(default_factory=list)
    zombies: list[Zombie] = field(default_factory=list)
    """The records by name, in a dry run only: a real sweep of a million keeps no list."""

    def count(self, outcome: str, stale_seconds: float, *, mute: bool, left: bool) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.found += not mute
        self.left_processing += left
        self.oldest_seconds = max(self.oldest_seconds, stale_seconds)


@dataclass(slots=True)
class SweepReport:
    """What one sweep did."""

    started_at: datetime
    dry_run: bool = False
    seconds: float = 0.0
    workflows: list[WorkflowReport] = field(default_factory=list)

    def total(self, name: str) -> int:
        return sum(getattr(workflow, name) for workflow in self.workflows)

    @property
    def found(self) -> int:
        return self.total("found")

    @property
    def left_processing(self) -> int:
        """How many records the sweep took out of Processing."""
        return self.total("left_processing")

    @property
    def changed(self) -> bool:
        """Whether anything was done to any zombie."""
        return not self.dry_run and any(self.total(o) for o in Outcome if o is not Outcome.skipped)

    @property
    def zombies(self) -> list[Zombie]:
        return [zombie for workflow in self.workflows for zombie in workflow.zombies]

    @property
    def errors(self) -> list[str]:
        return [f"{w.workflow}: {error}" for w in self.workflows for error in w.errors]

    def __str__(self) -> str:
        counts = ", ".join(
            f"{self.total(name)} {name}"
            for name in (*Outcome, "locked", "hung")
            if self.total(name) or name == Outcome.requeued
        )
        verb = "would take" if self.dry_run else "found"
        return f"Zombie sweep {verb} {self.found}: {counts} in {self.seconds:.2f} s"


class Observer:
    """Override what you need; each method may be plain or async."""

    def on_zombie_detected(self, zombie: Zombie) -> Any: ...

    def on_status_changed(self, workflow: str, record_id: str, old: Any, new: Any) -> Any: ...

    def on_requeued(self, zombie: Zombie) -> Any: ...

    def on_deferred(self, zombie: Zombie) -> Any: ...

    def on_failed(self, zombie: Zombie) -> Any: ...

    def on_held(self, zombie: Zombie) -> Any: ...

    def on_recovered(self, zombie: Zombie) -> Any: ...

    def on_mass_stall(self, stall: MassStall) -> Any: ...

    def on_sweep_finished(self, report: SweepReport) -> Any: ...

    def on_hung(self, hung: Hung) -> Any: ...

    # By the job loop, after the end of the record was written.

    def on_attempt_ended(self, ended: Ended) -> Any: ...

    def on_session_failed(self, workflow: str, reason: str) -> Any: ...

    def on_breaker_changed(self, workflow: str, state: str) -> Any: ...


_METHODS = [name for name in vars(Observer) if name.startswith("on_")]
# Seconds that an observer may keep a sweep waiting.
_PATIENCE = 10.0
_OF_ZOMBIES = ("on_zombie_detected", "on_status_changed", *(f"on_{o}" for o in Outcome))


class Observers:
    """Calls every observer that listens; the rest costs nothing, however many records there are."""

    def __init__(self, observers: Iterable[object] = ()) -> None:
        listeners = tuple(observers)
        self._handlers = {method: _find_handlers(method, listeners) for method in _METHODS}

    @property
    def care_for_records(self) -> bool:
        """Whether anybody wants to hear of each single zombie."""
        return any(self._handlers.get(method) for method in _OF_ZOMBIES)

    async def tell(self, method: str, *arguments: Any) -> None:
        for handler in self._handlers[method]:
            try:
                answer = handler(*arguments)
                if inspect.isawaitable(answer):
                    async with asyncio.timeout(_PATIENCE):
                        await answer
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                    raise
                logger.exception("Observer %r failed in %s", handler, method)


def is_being_cancelled() -> bool:
    """Whether somebody cancels us, and not something that the user's code awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _find_handlers(method: str, observers: Sequence[object]) -> list[Any]:
    ignored = getattr(Observer, method)
    handlers = (getattr(observer, method, None) for observer in observers)
    return [h for h in handlers if h is not None and getattr(h, "__func__", h) is not ignored]
