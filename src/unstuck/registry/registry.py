"""The registry of workflows, and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypedDict, TypeVar, Unpack
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from sqlalchemy import Column, DateTime, Integer, String

from unstuck.errors import UnknownWorkflow, closest, nearest
from unstuck.recovery import Step
from unstuck.registry.inference import Reader
from unstuck.registry.workflow import Workflow

Model = TypeVar("Model", bound=type[Any])
Seconds = float | timedelta


class Parameters(TypedDict, total=False):
    """What may be said of a workflow. What is left out is inferred, or taken from the settings."""

    name: str
    status: Any
    queued: Any
    processing: Any
    completed: Any
    failed: Any
    held: Any
    crashed: Any
    error: Any
    updated_at: Any
    lease: Any
    threshold: Seconds
    grace: Seconds
    max_resets: int
    backoff: Seconds | tuple[Seconds, Seconds]
    reapable: Any
    zombie_count: Any
    retry_at: Any
    recover: Step
    time_zone: str


class Registry:
    """The workflows that a sweep looks after, by name."""

    def __init__(self) -> None:
        self._workflows: dict[str, Workflow] = {}

    def __iter__(self) -> Iterator[Workflow]:
        return iter(tuple(self._workflows.values()))

    def __len__(self) -> int:
        return len(self._workflows)

    def __contains__(self, name: object) -> bool:
        return name in self._workflows

    def register(self, model: type[Any], **given: Unpack[Parameters]) -> Workflow:
        """Registers a model; a wrong parameter is refused with the nearest right one."""
        reader = Reader(model)
        for parameter in given.keys() - Parameters.__annotations__.keys():
            known = nearest(parameter, Parameters.__annotations__)
            raise reader.refuse(f"{parameter}=", f"is not a parameter: {known}")
        workflow = _read_workflow(reader, given)
        if workflow.name in self._workflows:
            other = self._workflows[workflow.name].model.__name__
            raise reader.refuse(
                f"name={workflow.name!r}", f"is taken by a workflow of {other}; choose another"
            )
        self._workflows[workflow.name] = workflow
        return workflow

    def amend(self, workflow: Workflow, **statuses: Any) -> Workflow:
        """The workflow with what its registration did not say."""
        self._workflows[workflow.name] = replace(workflow, **statuses)
        return self._workflows[workflow.name]

    def siblings(self, workflow: Workflow) -> tuple[Workflow, ...]:
        """The other status columns of the same rows: those that share its `updated_at`."""
        mine = workflow.updated_at
        return tuple(w for w in self if w is not workflow and w.updated_at is mine is not None)

    def get(self, wanted: str | type[Any] | Workflow) -> Workflow:
        """A workflow by its name, or by its model where the model has only one."""
        if isinstance(wanted, Workflow):
            return wanted
        if isinstance(wanted, str) and wanted in self._workflows:
            return self._workflows[wanted]
        of_model = [w for w in self if wanted in (w.model, w.model.__name__, w.status.table.name)]
        if len(of_model) == 1:
            return of_model[0]
        label = wanted if isinstance(wanted, str) else wanted.__name__
        if of_model:
            names = ", ".join(workflow.name for workflow in of_model)
            raise UnknownWorkflow(f"{label} has several workflows; name one of them: {names}.")
        raise UnknownWorkflow(f"No workflow is named {label!r}: {nearest(label, self._workflows)}.")


registry = Registry()


def recoverable(
    model: Any = None, /, *, registry: Registry = registry, **given: Unpack[Parameters]
) -> Any:
    """Registers the decorated model. Stack it for a second status column."""

    def register(model: Model) -> Model:
        registry.register(model, **given)
        return model

    decorator: Callable[[Any], Any] = register
    return decorator if model is None else decorator(model)


def _read_workflow(reader: Reader, given: Parameters) -> Workflow:
    status = reader.status(given["status"]) if "status" in given else reader.infer_status()
    key = reader.mapper.get_property_by_column(status).key
    statuses = _read_statuses(reader, given, status)
    columns = _read_columns(reader, given, status)
    if columns["updated_at"] is None and columns["lease"] is None and "updated_at" not in given:
        raise reader.refuse(
            "the model",
            "has no updated_at column: name one with updated_at= or lease=, or say "
            "updated_at=None if only run_job_loop claims its records",
        )
    if "grace" in given and columns["lease"] is None:
        raise reader.refuse("grace=", "is for a lease; name the column with lease=")
    return Workflow(
        name=given.get("name", f"{reader.model.__name__}.{key}"),
        model=reader.model,
        mapper=reader.mapper,
        status=status,
        **statuses,
        **columns,
        **_read_policy(reader, given),
    )


def _read_statuses(reader: Reader, given: Parameters, status: Column[Any]) -> dict[str, Any]:
    said: dict[str, Any] = dict(given)
    found: dict[str, Any] = {}
    several = said.get("processing")
    if several is None:
        found["processing"] = (reader.infer_value(status, "processing"),)
    else:
        values = several if isinstance(several, list | tuple | set | frozenset) else [several]
        found["processing"] = tuple(reader.value("processing", status, v) for v in values)
    for parameter in ("queued", "completed", "failed", "held", "crashed"):
        if said.get(parameter) is not None:
            found[parameter] = reader.value(parameter, status, said[parameter])
        elif parameter == "queued":
            found[parameter] = reader.infer_value(status, parameter)
        elif parameter in ("completed", "failed") and parameter not in said:
            found[parameter] = reader.find_value(status, parameter)
    _check_statuses(reader, found)
    return found


def _check_statuses(reader: Reader, found: dict[str, Any]) -> None:
    if not found["processing"]:
        raise reader.refuse("processing=", "names no status")
    for parameter, value in found.items():
        if parameter != "processing" and value is not None and value in found["processing"]:
            raise reader.refuse(
                f"{parameter}={value!r}", "is also its processing status; they must differ"
            )
    for parameter in ("completed", "failed", "held", "crashed"):
        if found.get(parameter) is not None and found[parameter] == found["queued"]:
            raise reader.refuse(
                f"{parameter}={found[parameter]!r}", "is also its queued status; they must differ"
            )


def _read_columns(reader: Reader, given: Parameters, status: Column[Any]) -> dict[str, Any]:
    said: dict[str, Any] = dict(given)
    kinds = {
        "error": String,
        "updated_at": DateTime,
        "lease": DateTime,
        "zombie_count": Integer,
        "retry_at": DateTime,
    }
    columns = {
        name: None if said.get(name) is None else reader.column(name, said[name], kind)
        for name, kind in kinds.items()
    }
    if "error" not in said:
        columns["error"] = reader.infer_error(status)
    if "updated_at" not in said:
        columns["updated_at"] = reader.infer_updated_at()
    return columns


def _read_policy(reader: Reader, given: Parameters) -> dict[str, Any]:
    policy: dict[str, Any] = {}
    if given.get("threshold") is not None:
        policy["threshold"] = reader.seconds("threshold", given["threshold"], zero=False)
    if given.get("grace") is not None:
        policy["grace"] = reader.seconds("grace", given["grace"], zero=True)
    if given.get("max_resets") is not None:
        policy["max_resets"] = reader.whole("max_resets", given["max_resets"])
    if given.get("backoff") is not None:
        policy["backoff"] = reader.backoff(given["backoff"])
    if given.get("reapable") is not None:
        policy["reapable"] = reader.reapable(given["reapable"])
    if given.get("recover") is not None:
        if not callable(given["recover"]):
            raise reader.refuse(f"recover={given['recover']!r}", "must be an async callable")
        policy["recover"] = given["recover"]
    if given.get("time_zone") is not None:
        policy["time_zone"] = _read_time_zone(reader, given["time_zone"])
    return policy


def _read_time_zone(reader: Reader, name: str) -> str:
    try:
        return ZoneInfo(name).key
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):  # OSError: a folder of zones
        known = closest(str(name), available_timezones()) or "UTC"
        reason = f"is not a time zone; did you mean {known!r}?"
        raise reader.refuse(f"time_zone={name!r}", reason) from None
