"""Reads the arguments of `run_job_loop` into a workflow, and says what disagrees."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement

from unstuck.errors import RegistrationError
from unstuck.loop.claim import Claim
from unstuck.registry import Reader, Registry, Workflow

Filters = Any

_KINDS = ("queued", "processing", "completed", "failed")
_USUAL_ERROR = "error"


def find_workflow(
    registry: Registry,
    model: type[Any],
    status_enum: Any,
    statuses: Sequence[Any],
    fields: tuple[str, str],
    name: str | None,
) -> tuple[Workflow, Any]:
    """The workflow that is registered for this model and column, or one made from the arguments, so
    that the sweep covers it; and the status that its records get when they are claimed."""
    reader = Reader(model)
    status_field, error_field = fields
    column = reader.status(status_field)
    said = {
        kind: reader.value(f"{kind}_status", column, _member(status_enum, given))
        for kind, given in zip(_KINDS, statuses, strict=True)
    }
    known = [w for w in registry if w.model is model and w.status is column]
    if known:
        return _agree(registry, known[0], said), said["processing"]
    parameters: dict[str, Any] = {"status": status_field, **said}
    if error_field != _USUAL_ERROR or reader.has_column(error_field):
        parameters["error"] = error_field
    if reader.infer_updated_at() is None:
        parameters["updated_at"] = None
    if name is not None:
        parameters["name"] = name
    return registry.register(model, **parameters), said["processing"]


def read_filters(given: Filters) -> list[ColumnElement[bool]]:
    """One condition, several, or a callable that gives them anew for each batch."""
    if given is None:
        return []
    if callable(given) and not isinstance(given, ColumnElement):
        given = given()
    return list(given) if isinstance(given, list | tuple) else [given]


def read_order(model: type[Any], given: Any) -> Sequence[Any]:
    if given is None:
        return ()
    reader = Reader(model)
    several = given if isinstance(given, list | tuple) else [given]
    name = "order_by_column"
    return [reader.column(name, one) if isinstance(one, str) else one for one in several]


def takes_claim(function: Callable[..., Any]) -> bool:
    """Whether a processing function wants the claim as its third argument.

    A third parameter with a default is the function's own, unless it is called claim."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    if len(required) > 3 or (len(positional) < 2 and not takes_any):
        name = getattr(function, "__qualname__", repr(function))
        raise RegistrationError(
            f"processing_function={name}{signature} cannot be called: it must take (item_id, "
            "session), or (item_id, session, claim)."
        )
    if len(positional) < 3:
        return False
    third = positional[2]
    return len(required) == 3 or third.name == "claim" or third.annotation in (Claim, "Claim")


def read_seconds(timeout: float | timedelta | None) -> float | None:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is not None and not seconds > 0:
        raise ValueError(f"timeout={timeout!r} must be more than 0 seconds, or None for no limit.")
    return seconds


def check_count(parameter: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{parameter}={given!r} must be a whole number of at least 1.")


def _member(status_enum: Any, given: Any) -> Any:
    """A status may be given by the name of its member."""
    members: Any = status_enum.__members__ if isinstance(status_enum, enum.EnumMeta) else {}
    return members.get(given, given) if isinstance(given, str) else given


def _agree(registry: Registry, workflow: Workflow, said: dict[str, Any]) -> Workflow:
    """What was registered and what the loop was told must be one and the same: the sweep would
    else queue records where the loop never looks."""
    missing: dict[str, Any] = {}
    for kind, value in said.items():
        known = getattr(workflow, kind)
        if kind == "processing":
            agrees = value in known
        elif known is None:
            missing[kind], agrees = value, True
        else:
            agrees = value == known
        if not agrees:
            registered = ", ".join(map(str, known)) if kind == "processing" else known
            raise RegistrationError(
                f"{workflow.model.__name__}: run_job_loop says {kind}_status={value}, but "
                f"{workflow.name} is registered with {kind}={registered}; make them agree."
            )
    return registry.amend(workflow, **missing) if missing else workflow
