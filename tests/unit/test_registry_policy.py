from datetime import timedelta
from typing import Any

import pytest

from tests.unit.pages import Page, Shouted, register
from unstuck import Compensate, ZombieSettings


def test_times_are_given_as_seconds_or_timedelta() -> None:
    hours = register(lease="lease_until", threshold=timedelta(hours=2), grace=timedelta(0))
    assert (hours.threshold, hours.grace) == (7200, 0)
    seconds = register(lease="lease_until", threshold=90, grace=1.5)
    assert (seconds.threshold, seconds.grace) == (90, 1.5)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (10, (10, None)),
        (timedelta(minutes=1), (60, None)),
        ((10, timedelta(minutes=1)), (10, 60)),
        (0, (0, None)),
    ],
)
def test_backoff_is_the_first_wait_or_the_first_and_the_longest(given: Any, read: Any) -> None:
    assert register(backoff=given).backoff == read


def test_reapable_is_a_bool_a_column_or_a_callable() -> None:
    def only_small(model: Any) -> Any:
        return model.strikes < 5

    column = Page.__table__.c.idempotent
    assert register().reapable is True
    assert register(reapable=False).reapable is False
    for given in ("idempotent", Page.idempotent, column):
        assert register(reapable=given).reapable is column
    assert register(reapable=only_small).reapable is only_small


def test_the_rest_of_the_policy_is_kept() -> None:
    undo = Compensate([])
    workflow = register(
        name="pages",
        held="FAILED",
        max_resets=0,
        zombie_count="strikes",
        retry_at="retry_at",
        recover=undo,
        time_zone="Europe/Berlin",
    )
    assert (workflow.name, str(workflow)) == ("pages", "pages")
    assert (workflow.held, workflow.max_resets) == (Shouted.FAILED, 0)
    assert workflow.zombie_count is Page.__table__.c.strikes
    assert workflow.retry_at is Page.__table__.c.retry_at
    assert (workflow.recover, workflow.time_zone) == (undo, "Europe/Berlin")


def test_a_policy_takes_from_the_settings_what_the_workflow_does_not_say() -> None:
    settings = ZombieSettings(_env_file=None, backoff_base_seconds=7, max_resets=9)
    policy = register(threshold=5).policy(settings)
    assert (policy.threshold, policy.grace, policy.max_resets) == (5, 60, 9)
    assert (policy.backoff_base, policy.backoff_max) == (7, 3600)
    own = register(backoff=(1, 2), max_resets=1).policy(settings)
    assert (own.backoff_base, own.backoff_max, own.max_resets) == (1, 2, 1)


def test_a_first_wait_above_the_longest_of_the_settings_is_its_own_longest() -> None:
    policy = register(backoff=7200).policy(ZombieSettings(_env_file=None))
    assert (policy.backoff_base, policy.backoff_max) == (7200, 7200)


@pytest.mark.parametrize("threshold", [0.007, 0.053, 1.0, 7.0])
def test_a_derived_heartbeat_fits_every_threshold(threshold: float) -> None:
    policy = register(threshold=threshold).policy(ZombieSettings(_env_file=None))
    assert policy.threshold == threshold
