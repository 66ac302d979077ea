"""What to do with a zombie: one pure table of rules, written as SQL so that a batch is decided at
once.

The rules stand in the order in which they are asked; the first that applies is the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import ColumnElement, Float, and_, case, literal, not_, null, or_

from unstuck.clock import chance

# A counter that overflows stops a queue: it saturates here instead.
MOST_STRIKES = 1_000_000
_MOST_DOUBLINGS = 20


class Outcome(StrEnum):
    """What a sweep did with a zombie."""

    requeued = "requeued"
    deferred = "deferred"
    failed = "failed"
    held = "held"
    recovered = "recovered"
    skipped = "skipped"


@dataclass(frozen=True)
class Policy:
    """A workflow's rules, with the settings filled in."""

    threshold: float
    grace: float
    max_resets: int
    backoff_base: float
    backoff_max: float
    stall_spread: float
    can_fail: bool
    custom_recovery: bool
    host_waits: bool


@dataclass(frozen=True)
class Facts:
    """What is known of one zombie, as SQL expressions."""

    mute: ColumnElement[bool]
    claimed: ColumnElement[bool]
    never_started: ColumnElement[bool]
    due: ColumnElement[bool]
    reapable: ColumnElement[bool]
    stalled: ColumnElement[bool]
    strikes: ColumnElement[int]


def count_strikes(facts: Facts) -> ColumnElement[int]:
    """The record's strikes after this: nothing counts that was not the record's own doing."""
    spared = or_(facts.mute, facts.never_started, facts.due, facts.stalled)
    struck = case((facts.strikes >= MOST_STRIKES, MOST_STRIKES), else_=facts.strikes + 1)
    return case((spared, facts.strikes), else_=struck)


def decide(policy: Policy, facts: Facts, strikes: ColumnElement[int]) -> ColumnElement[str]:
    """The outcome; `strikes` is the count after this one."""
    exhausted = Outcome.failed if policy.can_fail else Outcome.held
    rules: list[tuple[ColumnElement[bool], Outcome]] = [
        (facts.mute, Outcome.skipped),
        (facts.never_started, Outcome.requeued),
        (facts.due, Outcome.requeued),
    ]
    if policy.custom_recovery:
        rules.append((not_(facts.mute), Outcome.recovered))
    rules += [
        (not_(facts.reapable), Outcome.held),
        (facts.stalled, Outcome.requeued),
        (strikes > policy.max_resets, exhausted),
    ]
    if policy.backoff_base > 0 and not policy.host_waits:
        # A host whose own loop knows nothing of retry_at is made to wait by staying as it is.
        rules.append((and_(not_(facts.claimed), strikes >= 2), Outcome.deferred))
    return case(
        *((condition, outcome.value) for condition, outcome in rules), else_=Outcome.requeued.value
    )


def wait_seconds(
    policy: Policy, facts: Facts, outcome: ColumnElement[str], strikes: ColumnElement[int]
) -> ColumnElement[float]:
    """How long the record has to wait before its next attempt; NULL for not at all.

    From the second strike on it doubles, between half and all of it by chance; after a mass stall
    it is spread evenly, so that nothing comes back in lockstep.
    """
    doublings = case((strikes > _MOST_DOUBLINGS, _MOST_DOUBLINGS), else_=strikes - 2)
    factor = literal(1).op("<<", precedence=5)(doublings)
    uncapped = policy.backoff_base * factor
    ceiling = case((uncapped > policy.backoff_max, policy.backoff_max), else_=uncapped)
    waits = outcome.in_([Outcome.requeued.value, Outcome.deferred.value])
    rules = [(not_(waits), null()), (facts.stalled, policy.stall_spread * chance())]
    if policy.backoff_base > 0:
        backed_off = and_(strikes >= 2, not_(facts.due), not_(facts.never_started))
        rules.append((backed_off, ceiling * (0.5 + 0.5 * chance())))
    return case(*rules, else_=null()).cast(Float)
