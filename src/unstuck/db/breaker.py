"""A circuit breaker for sessions: after several in a row that could not be had, nobody asks for
more until a probe has had one.

None of the libraries for this fits: see docs/decisions.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from time import monotonic

logger = logging.getLogger("unstuck.loop")


class State(StrEnum):
    """closed: all is well; open: nobody asks; half_open: one may try."""

    closed = "closed"
    open = "open"
    half_open = "half_open"


class Breaker:
    """Counts failures in a row. It decides nothing by itself: whoever had a session, or had none,
    says so."""

    def __init__(
        self, failures: int, reset_seconds: float, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._limit = failures
        self._reset_seconds = reset_seconds
        self._clock = clock
        self._opened_at: float | None = None
        self._probing = False
        self.failures = 0
        self.changes: list[State] = []
        """What nobody has been told of yet."""

    @property
    def state(self) -> State:
        if self._opened_at is None:
            return State.closed
        waited = self._clock() - self._opened_at >= self._reset_seconds
        return State.half_open if waited and not self._probing else State.open

    @property
    def is_closed(self) -> bool:
        return self._opened_at is None

    def try_probe(self) -> bool:
        """True for the one that may try; it has to say how it went."""
        if self.state is not State.half_open:
            return False
        self._probing = True
        self.changes.append(State.half_open)
        return True

    def succeed(self) -> None:
        self.failures = 0
        if self._opened_at is not None:
            self._opened_at, self._probing = None, False
            self.changes.append(State.closed)
            logger.warning("Sessions can be had again: claiming goes on")

    def fail(self, reason: str) -> None:
        self.failures += 1
        was_probe, self._probing = self._probing, False
        if self._opened_at is None and not 0 < self._limit <= self.failures:
            return
        if self._opened_at is None or was_probe:
            self._opened_at = self._clock()
            self.changes.append(State.open)
            logger.error(
                "%d sessions in a row could not be had (%s): claiming stops, and is tried again "
                "in %g s",
                self.failures,
                reason,
                self._reset_seconds,
            )
