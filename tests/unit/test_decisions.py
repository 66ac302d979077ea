"""The rules as SQL, on every combination of facts, against the same rules in plain Python."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Integer,
    MetaData,
    Table,
    create_engine,
    select,
)

from unstuck.decisions import (
    MOST_STRIKES,
    Facts,
    Outcome,
    Policy,
    count_strikes,
    decide,
    wait_seconds,
)

POLICY = Policy(
    threshold=3600,
    grace=60,
    max_resets=2,
    backoff_base=60,
    backoff_max=600,
    stall_spread=300,
    can_fail=True,
    custom_recovery=False,
    host_waits=False,
)
POLICIES = [
    replace(
        POLICY, can_fail=can_fail, custom_recovery=custom, host_waits=waits, backoff_base=backoff
    )
    for can_fail, custom, waits, backoff in product(
        (True, False), (True, False), (True, False), (60, 0)
    )
]


class Case(NamedTuple):
    """The facts of one zombie. Some exclude each other; every combination has an answer."""

    mute: bool
    claimed: bool
    never_started: bool
    due: bool
    reapable: bool
    stalled: bool
    strikes: int


STRIKES = (0, 1, 2, 3, MOST_STRIKES, 2**31 - 1)
CASES = [Case._make(facts) for facts in product(*[(False, True)] * 6, STRIKES)]
zombies = Table(
    "zombies",
    MetaData(),
    *(Column(name, Boolean) for name in Case._fields if name != "strikes"),
    Column("strikes", Integer),
)


def expected_strikes(case: Case) -> int:
    if case.mute or case.never_started or case.due or case.stalled:
        return case.strikes
    return min(case.strikes + 1, MOST_STRIKES)


def expected_outcome(policy: Policy, case: Case) -> str:
    """The table of the design, read from top to bottom."""
    strikes = expected_strikes(case)
    if case.mute:
        return "skipped"
    if case.never_started or case.due:
        return "requeued"
    if policy.custom_recovery:
        return "recovered"
    if not case.reapable:
        return "held"
    if case.stalled:
        return "requeued"
    if strikes > policy.max_resets:
        return "failed" if policy.can_fail else "held"
    if strikes >= 2 and policy.backoff_base and not policy.host_waits and not case.claimed:
        return "deferred"
    return "requeued"


def expected_wait(policy: Policy, case: Case) -> tuple[float, float] | None:
    """The least and the most that it waits."""
    strikes = expected_strikes(case)
    if expected_outcome(policy, case) not in ("requeued", "deferred"):
        return None
    if case.stalled:
        return 0, policy.stall_spread
    if case.due or case.never_started or strikes < 2 or not policy.backoff_base:
        return None
    ceiling = min(policy.backoff_max, policy.backoff_base * 2 ** min(strikes - 2, 50))
    return ceiling / 2, ceiling


@pytest.fixture
def connection() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        zombies.create(connection)
        connection.execute(zombies.insert(), [case._asdict() for case in CASES])
        yield connection
    engine.dispose()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_combination_of_facts_is_decided_by_the_table(
    connection: Connection, policy: Policy
) -> None:
    columns = {name: zombies.c[name] for name in Case._fields}
    facts = Facts(**columns)
    strikes = count_strikes(facts)
    outcome = decide(policy, facts, strikes)
    wait = wait_seconds(policy, facts, outcome, strikes)
    rows = connection.execute(select(strikes, outcome, wait, *columns.values())).all()
    assert len(rows) == len(CASES)
    for counted, decided, waits, *values in rows:
        case = Case(*values)
        assert counted == expected_strikes(case), case
        assert decided == expected_outcome(policy, case), case
        least, most = expected_wait(policy, case) or (None, None)
        if least is None or most is None:
            assert waits is None, case
        else:
            assert least <= waits <= most, case


def test_every_outcome_is_decided_by_some_combination() -> None:
    outcomes = {expected_outcome(policy, case) for policy in POLICIES for case in CASES}
    assert outcomes == set(Outcome)
