"""How often and how patiently a session is tried for, and what is not worth another try."""

import asyncio
from typing import Any

import pytest
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    InvalidRequestError,
    OperationalError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from unstuck import ClaimLost, ZombieSettings
from unstuck.db import is_passing, retrying
from unstuck.errors import SessionUnavailable, TablesMissing


async def exhaust(error: BaseException, **settings: float) -> tuple[int, list[float]]:
    """How often it was tried for, and the waits in between."""
    waits: list[float] = []
    tries = 0

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def keep_trying() -> None:
        nonlocal tries
        async for attempt in retrying(ZombieSettings(**settings), sleep=sleep):
            with attempt:
                tries += 1
                raise error

    with pytest.raises(type(error)) as raised:
        await keep_trying()
    assert raised.value is error
    return tries, waits


async def test_by_default_there_are_three_tries_with_growing_jittered_waits() -> None:
    tries, (first, second) = await exhaust(SessionUnavailable("none"))
    assert tries == 3
    assert 0.5 <= first <= 1.0
    assert 1.0 <= second <= 1.5


async def test_the_settings_say_how_often_and_how_patiently() -> None:
    settings = {
        "session_attempts": 7,
        "session_wait_seconds": 2,
        "session_jitter_seconds": 0,
    }
    assert await exhaust(SessionUnavailable("none"), **settings) == (7, [2, 4, 8, 16, 16, 16])


async def test_the_jitter_differs_from_try_to_try() -> None:
    settings = {"session_attempts": 20, "session_wait_seconds": 0, "session_jitter_seconds": 5}
    _, waits = await exhaust(SessionUnavailable("none"), **settings)
    assert len(set(waits)) > 1
    assert all(0 <= wait <= 5 for wait in waits)


async def test_there_may_be_a_single_try_and_no_wait() -> None:
    assert await exhaust(SessionUnavailable("none"), session_attempts=1) == (1, [])
    settings = {"session_wait_seconds": 0, "session_jitter_seconds": 0}
    assert await exhaust(OSError("no route"), **settings) == (3, [0, 0])


async def test_a_try_that_does_better_is_the_last() -> None:
    tries = 0
    settings = ZombieSettings(session_wait_seconds=0, session_jitter_seconds=0)
    async for attempt in retrying(settings):
        with attempt:
            tries += 1
            if tries == 1:
                raise SessionUnavailable("none")
    assert tries == 2


async def test_what_would_be_refused_again_is_not_tried_again() -> None:
    refused = IntegrityError("UPDATE", {}, Exception("UNIQUE constraint failed"))
    assert await exhaust(refused) == (1, [])


async def test_a_cancellation_is_not_tried_again() -> None:
    assert await exhaust(asyncio.CancelledError()) == (1, [])


class Refusal(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        super().__init__("refused")
        self.sqlstate = sqlstate


def by_code(code: str | None, kind: type[DBAPIError] = DBAPIError, **named: Any) -> DBAPIError:
    return kind("UPDATE", {}, Refusal(code), **named)


PASSING = [
    SessionUnavailable("none"),
    ConnectionRefusedError("refused"),
    TimeoutError(),
    PoolTimeout("QueuePool limit reached"),
    InvalidRequestError("the transaction is closed"),
    by_code("08006"),  # the connection failed
    by_code("25006"),  # read-only, as after a failover
    by_code("40001"),  # serialization
    by_code("40P01"),  # deadlock
    by_code("53300"),  # too many connections
    by_code("55P03"),  # lock timeout
    by_code("57014"),  # statement timeout
    by_code("57P01"),  # shut down
    by_code(None, OperationalError),  # database is locked
    by_code("23505", IntegrityError, connection_invalidated=True),
]
LASTING = [
    ClaimLost("jobs 1"),
    TablesMissing(),
    ValueError("no"),
    asyncio.CancelledError(),
    by_code("22001"),  # too long
    by_code("23505", IntegrityError),
    by_code("23514"),  # a check
    by_code("42P01", ProgrammingError),  # no such table
    by_code("P0001"),  # RAISE in a trigger
    by_code(None, IntegrityError),  # of SQLite, a constraint or a trigger
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_another_try_may_do_better_after(error: BaseException) -> None:
    assert is_passing(error)


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_another_try_is_in_vain_after(error: BaseException) -> None:
    assert not is_passing(error)
