"""Keeps each workflow's statements, which are costly to build, from one sweep to the next."""

from __future__ import annotations

from unstuck.claims import Finder, Taker
from unstuck.registry import Registry, Workflow
from unstuck.settings import ZombieSettings


class Takers:
    """One taker for each workflow and database, made anew when the workflow gets a sibling."""

    def __init__(self, registry: Registry, settings: ZombieSettings) -> None:
        self._registry = registry
        self._settings = settings
        self._kept: dict[tuple[object, ...], Taker] = {}

    def get(self, workflow: Workflow, dialect: str) -> Taker:
        siblings = self._registry.siblings(workflow)
        key = (workflow, dialect, siblings)
        if key not in self._kept:
            policy = workflow.policy(self._settings)
            self._kept[key] = Taker(Finder(workflow, policy, self._settings, dialect), siblings)
        return self._kept[key]
