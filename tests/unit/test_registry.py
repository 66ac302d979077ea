from typing import Any

import pytest
from sqlalchemy import Column, Enum, func
from sqlalchemy.orm import column_property, mapped_column, relationship

import unstuck
from tests.unit.pages import Page, Quiet, Shouted, model_with, register
from unstuck import Registry, recoverable
from unstuck.errors import UnknownWorkflow


def test_a_model_with_the_usual_names_needs_no_parameter() -> None:
    workflow = register()
    assert workflow.name == "Page.status"
    assert workflow.status is Page.__table__.c.status
    assert (workflow.queued, workflow.processing) == (Shouted.QUEUED, (Shouted.PROCESSING,))
    assert (workflow.completed, workflow.failed) == (Shouted.COMPLETE, Shouted.FAILED)
    assert (workflow.held, workflow.crashed) == (None, None)
    assert workflow.error is Page.__table__.c.error
    assert workflow.updated_at is Page.__table__.c.updated_at
    assert workflow.lease is None


def test_the_error_column_of_a_status_is_its_twin() -> None:
    assert register(status="page_status").error is Page.__table__.c.page_error


def test_a_status_without_a_twin_takes_the_usual_error_column() -> None:
    assert register(status="sitemap_status").error is Page.__table__.c.error


def test_error_is_the_failed_status_of_those_who_call_it_so() -> None:
    assert register(status="page_status").failed is Quiet.error


def test_the_only_enum_with_a_processing_is_the_status() -> None:
    model = model_with(
        kind=mapped_column(Enum("a", "b", name="kind")), state=mapped_column(Enum(Quiet))
    )
    assert Registry().register(model).status.name == "state"


def test_what_is_said_to_be_none_is_not_inferred() -> None:
    workflow = register(error=None, failed=None, completed=None, updated_at=None)
    assert (workflow.error, workflow.failed, workflow.completed) == (None, None, None)
    assert workflow.updated_at is None


def test_the_decorator_stacks() -> None:
    registry = Registry()
    decorate = recoverable(registry=registry)
    for status in ("page_status", "sitemap_status"):
        decorate = _both(decorate, recoverable(status=status, registry=registry))
    assert decorate(Page) is Page
    assert [workflow.name for workflow in registry] == [
        "Page.status",
        "Page.page_status",
        "Page.sitemap_status",
    ]
    assert {workflow.model for workflow in registry} == {Page}


def _both(first: Any, second: Any) -> Any:
    return lambda model: second(first(model))


def test_the_decorator_works_without_parentheses_and_fills_the_default_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unstuck.registry, "_workflows", {})
    assert recoverable(Page) is Page
    assert "Page.status" in unstuck.registry
    assert len(unstuck.registry) == 1


def test_a_model_is_registered_while_a_model_that_it_refers_to_is_not_there_yet() -> None:
    registry = Registry()
    model = model_with(
        status=mapped_column(Enum(Quiet)), other=relationship("NotYet", uselist=False)
    )
    registry.register(model)
    assert len(registry) == 1


def test_a_column_may_be_given_by_attribute_name_column_name_or_attribute() -> None:
    column = Page.__table__.c.leased
    for given in ("lease_until", "leased", Page.lease_until, column):
        assert register(lease=given).lease is column
    assert register(status=Page.page_status).name == "Page.page_status"
    assert register(status="sitemap_state").name == "Page.sitemap_status"


def test_what_a_mapping_computes_is_no_column() -> None:
    model = model_with(
        status=mapped_column(Enum(Quiet)), error=column_property(func.coalesce(Column("x"), ""))
    )
    assert Registry().register(model).error is None


def test_a_workflow_is_found_by_name_model_class_name_or_table() -> None:
    registry = Registry()
    workflow = registry.register(Page, name="pages by hand")
    for wanted in ("pages by hand", Page, "Page", "pages", workflow):
        assert registry.get(wanted) is workflow


def test_a_model_with_several_workflows_is_not_enough() -> None:
    registry = Registry()
    registry.register(Page)
    second = registry.register(Page, status="page_status")
    assert registry.get("Page.page_status") is second
    for wanted in (Page, "Page"):
        with pytest.raises(
            UnknownWorkflow, match=r"Page has several .* Page\.status, Page\.page_s"
        ):
            registry.get(wanted)


def test_an_unknown_workflow_is_answered_with_the_nearest() -> None:
    registry = Registry()
    registry.register(Page)
    with pytest.raises(UnknownWorkflow, match=r"'Page\.state': did you mean 'Page\.status'\?"):
        registry.get("Page.state")
    with pytest.raises(UnknownWorkflow, match=r"'object'"):
        registry.get(object)


def test_a_registry_may_grow_while_it_is_walked() -> None:
    registry = Registry()
    registry.register(Page)
    for _ in registry:
        registry.register(Page, status="page_status")
    assert len(registry) == 2
