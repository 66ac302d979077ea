"""The functions that work on a default `Unstuck`, so that most applications need never see one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from unstuck.app import Unstuck, WorkflowName
from unstuck.db import SessionSource
from unstuck.loop import Beating
from unstuck.registry import Registry
from unstuck.schedule import Handle
from unstuck.settings import ZombieSettings

P = ParamSpec("P")
Answer = TypeVar("Answer")


class _Default:
    """The instance behind the module-level functions, and what it was made with."""

    instance: Unstuck | None = None
    parameters: Mapping[str, Any] = MappingProxyType({})


def configure(
    session_factory: SessionSource = None,
    settings: ZombieSettings | None = None,
    registry: Registry | None = None,
    observers: Iterable[object] = (),
) -> Unstuck:
    """Sets what the module-level functions work with."""
    return _configure(
        session_factory=session_factory, settings=settings, registry=registry, observers=observers
    )


def _configure(**parameters: Any) -> Unstuck:
    _Default.instance, _Default.parameters = Unstuck(**parameters), parameters
    return _Default.instance


def default() -> Unstuck:
    return configure() if _Default.instance is None else _Default.instance


def setup_zombie_cleanup_scheduler(
    scheduler: AsyncIOScheduler | None = None,
    session_factory: SessionSource = None,
    *,
    settings: ZombieSettings | None = None,
    registry: Registry | None = None,
    create_tables: bool = False,
) -> Handle:
    """Sweeps from now on. Call it in the lifespan of the application.

    Without a scheduler it starts its own; without a session factory it opens a tiny pool of its own
    from ZOMBIE_DATABASE_URL or DATABASE_URL. What `configure` was told holds, unless told anew.
    """
    given = {"session_factory": session_factory, "settings": settings, "registry": registry}
    said = {name: value for name, value in given.items() if value is not None}
    unstuck = _configure(**{**_Default.parameters, **said}) if said else default()
    return unstuck.setup(scheduler, create_tables=create_tables)


async def cleanup_zombie_records() -> int:
    """Runs one sweep; the number of records that it took out of Processing."""
    return (await default().sweep()).left_processing


def _of_default(
    method: Callable[Concatenate[Unstuck, P], Awaitable[Answer]],
) -> Callable[P, Awaitable[Answer]]:
    """A method of `Unstuck` as a function that uses the default instance."""

    @wraps(method)
    async def call(*arguments: P.args, **named: P.kwargs) -> Answer:
        return await method(default(), *arguments, **named)

    bound = signature(method)
    own = [parameter for name, parameter in bound.parameters.items() if name != "self"]
    call.__signature__ = bound.replace(parameters=own)  # type: ignore[attr-defined]
    return call


run_job_loop = _of_default(Unstuck.run_job_loop)


def heartbeat(
    workflow: WorkflowName,
    record_id: object,
    *,
    step: str | None = None,
    details: dict[str, Any] | None = None,
    worker_id: str | None = None,
) -> Beating:
    """`async with heartbeat("Page.status", page.id, step="download"):` around work outside of the
    job loop: inside, the record counts as alive for as long as this process does."""
    return default().heartbeat(workflow, record_id, step=step, details=details, worker_id=worker_id)
