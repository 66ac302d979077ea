"""Custom recovery: what a workflow does with a zombie instead of just requeueing it.

A recovery is an async callable `recover(zombie, session)`. It runs in a savepoint while the record
is locked; it must not commit. It returns None (the record goes on as its strikes allow), an
`Outcome`, or a `Recovered` with a reason and data for the ledger. If it raises, what it did is
rolled back and the record is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sqlalchemy.ext.asyncio import AsyncSession

from unstuck.decisions import Outcome
from unstuck.errors import describe
from unstuck.events import Zombie, is_being_cancelled

Step = Callable[[Zombie, AsyncSession], Awaitable[Any]]

_ALLOWED = (Outcome.requeued, Outcome.failed, Outcome.held, Outcome.recovered, Outcome.skipped)


@dataclass(frozen=True)
class Recovered:
    """What a recovery did. `recovered` lets the record's strikes decide where it goes."""

    outcome: Outcome = Outcome.recovered
    reason: str | None = None
    data: dict[str, Any] = field(default_factory=dict)


class Compensate:
    """Undoes the steps of a saga, last first, each in a savepoint of its own.

    The first that fails stops the rest and leaves the record held, with what was undone and what
    was not; what had been undone before stays undone.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    async def __call__(self, zombie: Zombie, session: AsyncSession) -> Recovered:
        undone: list[str] = []
        for at in reversed(range(len(self.steps))):
            try:
                async with session.begin_nested():
                    await self.steps[at](zombie, session)
            except (Exception, asyncio.CancelledError) as error:
                if is_being_cancelled():
                    raise
                left = [_name(step) for step in reversed(self.steps[: at + 1])]
                reason = f"{left[0]} failed: {describe(error)}"
                return Recovered(
                    Outcome.held,
                    f"compensation stopped: {reason}",
                    {"undone": undone, "not_undone": left, "error": reason},
                )
            undone.append(_name(self.steps[at]))
        return Recovered(data={"undone": undone, "not_undone": []})


async def run_recovery(recover: Step, zombie: Zombie, session: AsyncSession) -> Recovered:
    """Calls a recovery in a savepoint and reads its answer; never raises what it raised."""
    try:
        async with session.begin_nested():
            return _read(await recover(zombie, session))
    except (Exception, asyncio.CancelledError) as error:
        if is_being_cancelled():
            raise
        reason = f"{_name(recover)} failed: {describe(error)}"
        return Recovered(Outcome.held, f"recovery stopped: {reason}", {"error": reason})


def _read(answer: object) -> Recovered:
    if answer is None:
        return Recovered()
    told = answer if isinstance(answer, Recovered) else Recovered(cast(Outcome, answer))
    if told.outcome in _ALLOWED:
        return replace(told, outcome=Outcome(told.outcome))
    allowed = ", ".join(_ALLOWED)
    raise ValueError(f"returned {answer!r}; expected None, a Recovered, or one of {allowed}")


def _name(step: object) -> str:
    return getattr(step, "__name__", None) or type(step).__name__
