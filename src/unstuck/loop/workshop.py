"""What all loops and heartbeats on one source of sessions share."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from sqlalchemy import Engine
from sqlalchemy.pool import Pool

from unstuck.db import Breaker, Lifeline, Sessions
from unstuck.endings import Endings
from unstuck.events import Observers
from unstuck.loop.heart import Heart
from unstuck.registry import Registry
from unstuck.settings import ZombieSettings

# By their pools: an engine with options is another engine on the same pool.
Hearts = MutableMapping[Pool, tuple[Lifeline, Heart]]
_MOST_HEARTS = 20


class Workshop:
    """Sessions, their breaker, and what writes the ends; the heart is that of the whole process,
    and known once a session was had."""

    def __init__(
        self,
        sessions: Sessions,
        settings: ZombieSettings,
        registry: Registry,
        observers: Observers,
        hearts: Hearts,
    ) -> None:
        self.sessions = sessions
        self.settings = settings
        self.registry = registry
        self.observers = observers
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_reset_seconds)
        self.endings = Endings(sessions, settings, registry, observers)
        self._hearts = hearts
        self.meet(None)

    def meet(self, engine: Engine | None) -> None:
        """The engine that the sessions turned out to be of."""
        if engine is None:
            lifeline = Lifeline(self.sessions, None)
            self.lifeline, self.heart = lifeline, Heart(lifeline, self.settings)
            return
        if engine.pool not in self._hearts:
            for pool, (_, heart) in [*self._hearts.items()][:-_MOST_HEARTS]:
                if not len(heart):
                    del self._hearts[pool]
            lifeline = Lifeline(self.sessions, engine)
            self._hearts[engine.pool] = lifeline, Heart(lifeline, self.settings)
        self.lifeline, self.heart = self._hearts[engine.pool]
        self.endings.keep_for(engine)


def name_worker(name: str) -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{name}"
