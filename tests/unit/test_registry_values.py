import enum
from typing import Any

import pytest
from sqlalchemy import Dialect, Enum, String
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import mapped_column
from sqlalchemy.types import TypeDecorator

from tests.unit.pages import Quiet, Shouted, model_with, register
from unstuck import Registry


@pytest.mark.parametrize("given", [Quiet.error, "error", "e"])
def test_a_value_may_be_given_by_member_name_or_value(given: Any) -> None:
    assert register(status="page_status", failed=given).failed is Quiet.error


def test_a_number_is_a_value_too() -> None:
    assert register(crashed=4).crashed is Shouted.FAILED


def test_a_member_is_itself_even_where_its_name_is_the_value_of_another() -> None:
    class Crossed(enum.Enum):
        queued = "processing"
        processing = "queued"

    workflow = Registry().register(
        model_with(status=mapped_column(Enum(Crossed))),
        queued=Crossed.queued,
        processing=Crossed.processing,
    )
    assert (workflow.queued, workflow.processing) == (Crossed.queued, (Crossed.processing,))


@pytest.mark.parametrize(
    "kind",
    [
        Enum(Quiet),
        Enum(Quiet, values_callable=lambda members: [member.value for member in members]),
        Enum(Quiet, native_enum=False, length=20),
        postgresql.ENUM(Quiet, name="quiet", create_type=False),
    ],
)
def test_every_kind_of_enum_is_inferred(kind: Enum) -> None:
    workflow = Registry().register(model_with(status=mapped_column(kind)))
    assert (workflow.queued, workflow.processing) == (Quiet.queued, (Quiet.processing,))
    assert (workflow.completed, workflow.failed) == (Quiet.completed, Quiet.error)


@pytest.mark.parametrize("kind", [Enum, postgresql.ENUM])
def test_an_enum_of_plain_strings_is_inferred(kind: Any) -> None:
    workflow = Registry().register(
        model_with(status=mapped_column(kind("Queued", "Processing", "Failed", name="state")))
    )
    assert (workflow.queued, workflow.processing, workflow.failed) == (
        "Queued",
        ("Processing",),
        "Failed",
    )


def test_an_enum_of_plain_strings_takes_the_members_of_a_class_by_value() -> None:
    workflow = Registry().register(
        model_with(status=mapped_column(Enum("q", "p", "e", name="state"))),
        queued=Quiet.queued,
        processing=Quiet.processing,
    )
    assert (workflow.queued, workflow.processing) == ("q", ("p",))


def test_a_string_column_takes_plain_values_and_members() -> None:
    model = model_with(status=mapped_column(String(20)))
    plain = Registry().register(model, queued="new", processing="busy", failed="bad")
    assert (plain.queued, plain.processing, plain.failed) == ("new", ("busy",), "bad")
    members = Registry().register(model, queued=Quiet.queued, processing=Quiet.processing)
    assert (members.queued, members.processing) == ("q", ("p",))


def test_a_decorated_column_gets_the_values_as_they_are() -> None:
    class Letters(TypeDecorator[Quiet]):
        impl = String(1)
        cache_ok = True

        def process_bind_param(self, value: Quiet | None, dialect: Dialect) -> str | None:
            return None if value is None else value.value

    workflow = Registry().register(
        model_with(status=mapped_column(Letters)), queued=Quiet.queued, processing=Quiet.processing
    )
    assert (workflow.queued, workflow.processing) == (Quiet.queued, (Quiet.processing,))


@pytest.mark.parametrize("several", [list, tuple, set, frozenset])
def test_several_values_may_mean_processing(several: Any) -> None:
    given = several(["processing", Quiet.completed])
    workflow = register(status="page_status", processing=given, completed=None)
    assert set(workflow.processing) == {Quiet.processing, Quiet.completed}
