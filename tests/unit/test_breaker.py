"""The circuit breaker, by a clock that the test moves."""

import logging

import pytest

from unstuck.db import Breaker, State


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    """Opens at the third failure in a row, and lets one try after half a minute."""
    return Breaker(3, 30, clock=clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.fail("no session")


def test_it_is_closed_until_so_many_failures_in_a_row(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert (breaker.is_closed, breaker.state, breaker.changes) == (True, State.closed, [])
    fail(breaker, 1)
    assert (breaker.is_closed, breaker.state, breaker.changes) == (False, State.open, [State.open])


def test_a_success_in_between_starts_the_count_anew(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeed()
    fail(breaker, 2)
    assert breaker.is_closed
    fail(breaker, 1)
    assert not breaker.is_closed


def test_a_success_of_a_closed_one_is_no_change(breaker: Breaker) -> None:
    breaker.succeed()
    assert breaker.changes == []


def test_one_failure_may_be_enough(clock: Clock) -> None:
    breaker = Breaker(1, 30, clock=clock)
    fail(breaker, 1)
    assert breaker.state is State.open


def test_with_0_it_never_opens(clock: Clock) -> None:
    breaker = Breaker(0, 30, clock=clock)
    fail(breaker, 1000)
    assert (breaker.state, breaker.changes, breaker.failures) == (State.closed, [], 1000)


def test_nobody_may_try_before_the_wait_is_over(breaker: Breaker, clock: Clock) -> None:
    assert not breaker.try_probe()
    fail(breaker, 3)
    clock.now = 29.9
    assert (breaker.state, breaker.try_probe()) == (State.open, False)
    clock.now = 30
    assert (breaker.state, breaker.try_probe()) == (State.half_open, True)


def test_only_one_at_a_time_may_try(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now = 30
    assert [breaker.try_probe() for _ in range(3)] == [True, False, False]
    clock.now = 1000
    assert (breaker.state, breaker.try_probe()) == (State.open, False)
    assert breaker.changes == [State.open, State.half_open]


def test_a_try_that_succeeds_closes_it(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now = 30
    assert breaker.try_probe()
    breaker.succeed()
    assert (breaker.is_closed, breaker.failures) == (True, 0)
    assert breaker.changes == [State.open, State.half_open, State.closed]
    fail(breaker, 2)
    assert breaker.is_closed


def test_a_try_that_fails_opens_it_for_another_wait(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now = 30
    assert breaker.try_probe()
    clock.now = 40
    fail(breaker, 1)
    assert breaker.changes == [State.open, State.half_open, State.open]
    clock.now = 69.9
    assert not breaker.try_probe()
    clock.now = 70
    assert breaker.try_probe()


def test_failures_of_what_was_under_way_do_not_make_the_wait_longer(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now = 20
    fail(breaker, 5)
    assert breaker.changes == [State.open]
    clock.now = 30
    assert breaker.try_probe()


def test_whatever_had_a_session_closes_it(breaker: Breaker) -> None:
    fail(breaker, 3)
    breaker.succeed()
    assert breaker.changes == [State.open, State.closed]


def test_without_a_wait_the_next_one_may_try_at_once(clock: Clock) -> None:
    breaker = Breaker(1, 0, clock=clock)
    fail(breaker, 1)
    assert breaker.try_probe()


def test_its_opening_and_closing_are_logged_once_and_with_the_reason(
    breaker: Breaker, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    fail(breaker, 4)
    clock.now = 30
    assert breaker.try_probe()
    breaker.succeed()
    breaker.succeed()
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        (
            "unstuck.loop",
            logging.ERROR,
            "3 sessions in a row could not be had (no session): claiming stops, and is tried again "
            "in 30 s",
        ),
        ("unstuck.loop", logging.WARNING, "Sessions can be had again: claiming goes on"),
    ]
