"""What cannot be registered is refused at import, naming model, parameter and what was meant."""

import re
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import (
    DateTime,
    Enum,
    LargeBinary,
    Numeric,
    String,
    select,
)
from sqlalchemy.orm import DeclarativeBase, mapped_column

from tests.unit.pages import Page, Quiet, model_with
from unstuck import RegistrationError, Registry, Unstuck, ZombieSettings, recoverable


def refusal(model: Any, **given: Any) -> str:
    registry = Registry()
    with pytest.raises(RegistrationError) as refused:
        registry.register(model, **given)
    assert len(registry) == 0, "nothing is registered by halves"
    return str(refused.value)


@pytest.mark.parametrize(
    ("parameter", "wrong", "near"),
    [
        ("status", "page_state", "page_status"),
        ("error", "pageerror", "page_error"),
        ("updated_at", "updatedat", "updated_at"),
        ("lease", "lease_untill", "lease_until"),
        ("zombie_count", "strike", "strikes"),
        ("retry_at", "retryat", "retry_at"),
        ("reapable", "idempotant", "idempotent"),
    ],
)
def test_an_unknown_column(parameter: str, wrong: str, near: str) -> None:
    told = refusal(Page, **{parameter: wrong})
    start = f"Page: {parameter}={wrong!r} is not one of its columns: did you mean {near!r}? "
    assert told.startswith(start)
    assert all(name in told for name in Page.__mapper__.columns.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    ("parameter", "wrong", "needed", "choices"),
    [
        ("error", "strikes", "String", "error, page_error"),
        ("error", "page_status", "String", "error, page_error"),
        ("updated_at", "error", "DateTime", "lease_until, retry_at, updated_at"),
        ("lease", "strikes", "DateTime", "lease_until, retry_at, updated_at"),
        ("retry_at", "idempotent", "DateTime", "lease_until, retry_at, updated_at"),
        ("zombie_count", "error", "Integer", "id, strikes"),
        ("reapable", "strikes", "Boolean", "idempotent"),
    ],
)
def test_a_column_of_the_wrong_type(parameter: str, wrong: str, needed: str, choices: str) -> None:
    told = refusal(Page, **{parameter: wrong})
    assert told.startswith(f"Page: {parameter}={wrong!r} is of type ")
    assert f"but a {needed} column is needed: " in told
    assert choices in told


def test_a_status_that_is_a_time() -> None:
    told = refusal(Page, status="updated_at", queued=1, processing=2)
    assert told.startswith("Page: status='updated_at' is of type DateTime, but an Enum or String")
    assert "page_status" in told


@pytest.mark.parametrize("parameter", ["queued", "processing", "failed", "held", "crashed"])
def test_a_value_that_the_enum_does_not_have(parameter: str) -> None:
    told = refusal(Page, status="page_status", **{parameter: "complete"})
    assert told == (
        f"Page: {parameter}='complete' is not a value of page_status: did you mean 'completed'? "
        "There are: completed, error, processing, queued."
    )


def test_one_wrong_value_of_several() -> None:
    told = refusal(Page, status="page_status", processing=[Quiet.processing, "proccesing"])
    assert told.startswith("Page: processing='proccesing' is not a value of page_status")


@pytest.mark.parametrize("parameter", ["queued", "completed", "failed", "held", "crashed"])
def test_no_other_status_may_be_processing(parameter: str) -> None:
    told = refusal(Page, status="page_status", **{parameter: Quiet.processing})
    assert told.startswith(f"Page: {parameter}=<Quiet.processing: 'p'> is also its processing")


@pytest.mark.parametrize("parameter", ["completed", "failed", "held", "crashed"])
def test_no_other_status_may_be_queued(parameter: str) -> None:
    told = refusal(Page, status="page_status", **{parameter: Quiet.queued})
    assert told.startswith(f"Page: {parameter}=<Quiet.queued: 'q'> is also its queued status")


def test_no_processing_at_all() -> None:
    assert refusal(Page, processing=[]) == "Page: processing= names no status."


def test_two_workflows_with_one_name() -> None:
    registry = Registry()
    registry.register(Page, name="pages")
    with pytest.raises(RegistrationError, match=r"^Page: name='pages' is taken by .* of Page"):
        registry.register(Page, name="pages", status="page_status")
    assert [workflow.status.name for workflow in registry] == ["status"]


def test_the_same_column_twice_by_default_names() -> None:
    registry = Registry()
    registry.register(Page)
    with pytest.raises(RegistrationError, match=r"^Page: name='Page\.status' is taken"):
        registry.register(Page)


def test_a_parameter_that_does_not_exist() -> None:
    told = refusal(Page, treshold=5)
    assert told.startswith("Page: treshold= is not a parameter: did you mean 'threshold'?")


def test_a_grace_without_a_lease() -> None:
    assert refusal(Page, grace=5).startswith("Page: grace= is for a lease; name the column with")


def test_a_model_without_any_sign_of_life() -> None:
    model = model_with(status=mapped_column(Enum(Quiet)), updated_at=None)
    assert refusal(model).startswith("Job: the model has no updated_at column: name one with")
    assert Registry().register(model, updated_at=None).updated_at is None


def test_an_updated_at_that_is_no_time_is_no_sign_of_life() -> None:
    model = model_with(status=mapped_column(Enum(Quiet)), updated_at=mapped_column(String))
    assert "has no updated_at column" in refusal(model)


def test_a_status_that_cannot_be_inferred() -> None:
    columns = {name: mapped_column(Enum(Quiet)) for name in ("a", "b")}
    told = refusal(model_with(**columns))
    assert told.startswith("Job: status= cannot be inferred; name its column: ")
    assert all(name in told for name in ("a", "b", "updated_at"))


@pytest.mark.parametrize(
    ("kind", "known"),
    [(Enum("new", "processing", name="x"), "new, processing"), (String(9), "of type String")],
)
def test_a_value_that_cannot_be_inferred(kind: Any, known: str) -> None:
    told = refusal(model_with(status=mapped_column(kind)), processing="processing")
    assert told.startswith("Job: queued= cannot be inferred from status (")
    assert known in told


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), timedelta(0), timedelta.max])
def test_a_threshold_that_is_no_span_of_time(wrong: Any) -> None:
    told = refusal(Page, threshold=wrong)
    assert told.startswith(f"Page: threshold={wrong!r} must be more than 0 and at most ")


@pytest.mark.parametrize("wrong", ["60", True, [60]])
def test_a_threshold_that_is_no_number(wrong: Any) -> None:
    told = refusal(Page, threshold=wrong)
    assert told == f"Page: threshold={wrong!r} must be a timedelta or seconds."


@pytest.mark.parametrize(
    ("parameter", "wrong", "rule"),
    [
        ("max_resets", -1, "must be a whole number from 0 to 1000000"),
        ("max_resets", 1.5, "must be a whole number from 0 to 1000000"),
        ("max_resets", True, "must be a whole number from 0 to 1000000"),
        ("max_resets", 2**31, "must be a whole number from 0 to 1000000"),
        ("backoff", (1, 2, 3), "must be the first wait, or (first, longest)"),
        ("backoff", (2, 1), "must not have its longest below its first"),
        ("backoff", -1, "must be 0 or more and at most"),
        ("reapable", 5, "must be a bool, a column, or a callable that gives SQL"),
        ("recover", "undo", "must be an async callable"),
        ("time_zone", "Europe/Berln", "is not a time zone; did you mean 'Europe/Berlin'?"),
        ("time_zone", "America", "is not a time zone; did you mean 'America/"),
        ("time_zone", "../../etc", "is not a time zone; did you mean '"),
        ("time_zone", "", "is not a time zone; did you mean 'UTC'?"),
        ("time_zone", 5, "is not a time zone; did you mean '"),
    ],
)
def test_a_policy_that_cannot_be(parameter: str, wrong: Any, rule: str) -> None:
    assert refusal(Page, **{parameter: wrong}).startswith(f"Page: {parameter}={wrong!r} {rule}")


def test_an_sql_expression_instead_of_a_callable() -> None:
    told = refusal(Page, reapable=Page.strikes < 5)
    assert told.endswith("must be a bool, a column, or a callable that gives SQL.")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DateTime, "DateTime"),
        (Numeric, "Numeric"),
        (LargeBinary, "LargeBinary"),
        (Enum(Quiet), "Enum"),
    ],
)
def test_a_key_that_cannot_be_written_as_text(kind: Any, name: str) -> None:
    model = model_with(id=mapped_column(kind, primary_key=True), status=mapped_column(Enum(Quiet)))
    assert refusal(model) == (
        f"Job: the primary key 'id' is of type {name}; integers, UUIDs and strings can be "
        "recovered."
    )


@pytest.mark.parametrize("thing", [object, Registry, "Page", Page.__table__, None, 5])
def test_what_is_no_mapped_class(thing: Any) -> None:
    assert refusal(thing).startswith(f"{thing!r} is not a mapped class; register it after")


def test_the_decorator_above_a_class_that_is_not_mapped() -> None:
    registry = Registry()
    with pytest.raises(RegistrationError, match="is not a mapped class"):

        @recoverable(registry=registry)
        class Plain:
            pass


def test_a_model_that_is_mapped_to_a_query() -> None:
    class OwnBase(DeclarativeBase):
        pass

    class Summary(OwnBase):
        __table__ = select(Page.__table__).subquery("summary")
        __mapper_args__ = {"primary_key": [__table__.c.id]}  # noqa: RUF012

    assert refusal(Summary).startswith("Summary: the model is mapped to a query")


def test_a_threshold_below_three_beats_is_refused_at_set_up() -> None:
    settings = ZombieSettings(_env_file=None, heartbeat_interval_seconds=21)
    registry = Registry()
    registry.register(Page, threshold=60)
    unstuck = Unstuck("sqlite+aiosqlite://", settings, registry)
    rule = re.escape(
        "Page: threshold=60 seconds of Page.status must be at least 3 x "
        "ZOMBIE_HEARTBEAT_INTERVAL_SECONDS=21"
    )
    with pytest.raises(RegistrationError, match=f"^{rule}"):
        unstuck.setup()
