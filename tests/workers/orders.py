"""What a test tells a worker, before it starts."""

from dataclasses import dataclass, field
from typing import Any, Literal

Moment = Literal["before statement", "before commit", "after commit"]
Act = Literal["halt", "freeze", "cancel", "cancel all"]
Life = Literal["once", "task", "scheduler", "application"]


@dataclass(frozen=True)
class Step:
    """A point in the life of a worker: a statement that contains some words, parameters included,
    or the commit of the transaction that it is in; the first of its kind, or the nth."""

    moment: Moment
    words: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.moment} of {self.words} {self.nth}"


# What the steps of the loop are known by.
PREPARE = {"postgresql": "set_config", "sqlite": "DELETE FROM zombie_claims WHERE 0 = 1"}
CLAIM = "INSERT INTO zombie_claims"
START = "UPDATE zombie_claims SET started_at"
BEAT = "UPDATE zombie_claims SET heartbeat_at"
WORK = "INSERT INTO effects"
GUARD = "SELECT zombie_claims.token"  # what the fence asks before a commit
MOVE = "UPDATE jobs SET status"  # the first of them claims
END = "INSERT INTO zombie_events"
RELEASE = "'returned'"
CHECKPOINT = "details="
EFFECT = "effect="


# Seconds for what an application has to close besides its scheduler.
CLOSING = 0.5


@dataclass(frozen=True)
class Orders:
    """`act`: what becomes of the worker at the step. It halts, to be killed; or, to be frozen, as
    soon as no other thread is in a transaction; or it is cancelled.

    `life`: it runs the loop once, or until SIGTERM. That cancels its task; or it shuts down the
    scheduler that runs it, and ends, at once or, as an application does, when everything else is
    closed."""

    url: str
    function: str
    step: Step | None = None
    act: Act = "halt"
    life: Life = "once"
    policy: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
