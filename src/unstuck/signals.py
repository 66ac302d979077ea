"""What proves life: the beat of a claim, a lease, or the age of `updated_at`.

Where there is a claim, the claim alone decides: another workflow's write to the same row neither
proves nor hides anything. Without a claim the lease decides, and without a lease the age. Age is
not proof of death: see the caveats in the README.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, FromClause, and_, case, false, func, null, or_, true

from unstuck.clock import latest, not_after, older_than


class Cause(StrEnum):
    """Why a record was a zombie."""

    never_started = "never_started"
    aged = "aged"
    lease_expired = "lease_expired"
    lost_heartbeat = "lost_heartbeat"
    hung = "hung"
    no_session = "no_session"
    shutdown = "shutdown"


@dataclass(frozen=True)
class Signal:
    """How a workflow tells the living from the dead, as SQL expressions over one record."""

    claim: FromClause
    updated_at: ColumnElement[Any] | None
    lease: ColumnElement[Any] | None
    threshold: float
    grace: float

    @property
    def claimed(self) -> ColumnElement[bool]:
        return self.claim.c.token.is_not(None)

    @property
    def never_started(self) -> ColumnElement[bool]:
        return and_(self.claimed, self.claim.c.started_at.is_(None))

    @property
    def last_beat(self) -> ColumnElement[Any]:
        """A claim's latest sign of life; a beat that never came is as old as the claim."""
        claim = self.claim.c
        return latest(
            claim.claimed_at,
            func.coalesce(claim.started_at, claim.claimed_at),
            func.coalesce(claim.heartbeat_at, claim.claimed_at),
        )

    @property
    def claim_is_stale(self) -> ColumnElement[bool]:
        return older_than(self.last_beat, self.threshold)

    @property
    def row_is_stale(self) -> ColumnElement[bool]:
        """Staleness of a record without a claim, from the host's own columns."""
        by_age = false() if self.updated_at is None else older_than(self.updated_at, self.threshold)
        if self.lease is None:
            return by_age
        return or_(older_than(self.lease, self.grace), and_(self.lease.is_(None), by_age))

    @property
    def row_is_mute(self) -> ColumnElement[bool]:
        """The host's columns are there but say nothing: NULL never compares as old."""
        columns = [column for column in (self.lease, self.updated_at) if column is not None]
        return and_(*(column.is_(None) for column in columns)) if columns else false()

    @property
    def stale(self) -> ColumnElement[bool]:
        return or_(and_(self.claimed, self.claim_is_stale), and_(~self.claimed, self.row_is_stale))

    @property
    def mute(self) -> ColumnElement[bool]:
        return and_(~self.claimed, self.row_is_mute)

    @property
    def last_life(self) -> ColumnElement[Any]:
        row = [column for column in (self.lease, self.updated_at) if column is not None]
        unclaimed = func.coalesce(*row) if len(row) > 1 else row[0] if row else null()
        return case((self.claimed, self.last_beat), else_=unclaimed)

    def still_held(self, held_at: ColumnElement[Any]) -> ColumnElement[bool]:
        """A hold ends with a beat or a new lease of this very workflow. `updated_at` ends none:
        whoever works on another column of the row would undo what a human has to decide."""
        leased = null() if self.lease is None else self.lease
        renewed = case((self.claimed, self.last_beat), else_=leased)
        return and_(held_at.is_not(None), func.coalesce(not_after(renewed, held_at), true()))

    @property
    def cause(self) -> ColumnElement[str]:
        rules = [
            (self.never_started, Cause.never_started.value),
            (self.claimed, Cause.lost_heartbeat.value),
        ]
        if self.lease is not None:
            rules.append((self.lease.is_not(None), Cause.lease_expired.value))
        return case(*rules, else_=Cause.aged.value)
