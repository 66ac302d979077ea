"""How often, and how patiently, a session is tried for when a record's end has to be written."""

from __future__ import annotations

from typing import Any

from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from unstuck.errors import SessionUnavailable, UnstuckError
from unstuck.settings import ZombieSettings

# Classes of SQLSTATE: the value, a constraint, the statement, a RAISE in a trigger.
_REFUSALS = ("22", "23", "42", "P0")


def retrying(settings: ZombieSettings, **hooks: Any) -> AsyncRetrying:
    """Tenacity's policy, from ZOMBIE_SESSION_*. The last error is raised as it is."""
    base = settings.session_wait_seconds
    return AsyncRetrying(
        stop=stop_after_attempt(settings.session_attempts),
        wait=wait_exponential(multiplier=base, min=base, max=base * 8)
        + wait_random(0, settings.session_jitter_seconds),
        retry=retry_if_exception(is_passing),
        reraise=True,
        **hooks,
    )


def is_locked(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) == "55P03" or "is locked" in str(error.orig)


def is_deadlock(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) == "40P01"


def is_passing(error: BaseException) -> bool:
    """Whether another try may do better: no connection, no lock, a deadlock. A constraint or a
    trigger that refuses the row will refuse it again."""
    if isinstance(error, SessionUnavailable | OSError):
        return True
    if isinstance(error, UnstuckError) or not isinstance(error, SQLAlchemyError):
        return False
    if not isinstance(error, DBAPIError):
        return True
    code = str(getattr(error.orig, "sqlstate", "") or "")
    is_refused = isinstance(error, IntegrityError) or code.startswith(_REFUSALS)
    return error.connection_invalidated or not is_refused
