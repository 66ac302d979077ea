"""A thread with an event loop and connections of its own.

Beats go through it while the application's loop is blocked; checkpoints, while its pool is
exhausted; the last words of a cancelled task, while everything around it is being cancelled. It
ends by itself when there is nothing to do, and starts again when there is.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from unstuck.db.engine import twin_of
from unstuck.db.sources import Sessions

Answer = TypeVar("Answer")
Work = Callable[[Sessions], Awaitable[Answer]]

_LINGER = 1.0
_PATIENCE = 5.0


class Lifeline:
    """For one engine of the host's; its connections are made just as the host makes them."""

    def __init__(self, sessions: Sessions, engine: Engine | None) -> None:
        self._host = sessions
        self._engine = engine
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy = 0
        self._pid = os.getpid()
        self._engines: list[AsyncEngine] = []
        self.sessions = sessions

    @property
    def is_apart(self) -> bool:
        """False where nobody else can see what a session writes: a database in memory, a session
        in a transaction of the test that uses it."""
        if self._engine is None:
            return False
        return not isinstance(self._engine.pool, StaticPool | SingletonThreadPool)

    def run(self, work: Work[Answer]) -> asyncio.Future[Answer]:
        """Begins at once. Where there is no thread, in the caller's own loop, on the host's own
        sessions."""
        if not self.is_apart:
            return asyncio.ensure_future(work(self._host))
        return asyncio.wrap_future(self.submit(work))

    def submit(self, work: Work[Answer]) -> Future[Answer]:
        if self._pid != os.getpid():  # a fork inherits no thread, but perhaps a lock that is held
            self._pid, self._lock, self._loop = os.getpid(), threading.Lock(), None
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._start()
            assert self._loop is not None
            self._busy += 1
            future = asyncio.run_coroutine_threadsafe(_run(work, self.sessions), self._loop)
        future.add_done_callback(partial(self._done, self._loop))
        return future

    def _start(self) -> None:
        self._busy = 0
        self._engines = []
        self.renew()
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(loop, self._engines), name="unstuck-lifeline", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # too many threads
            loop.close()
            raise
        self._loop = loop

    def renew(self) -> None:
        """New connections: the old ones hang, or belong to the parent of this process."""
        assert self._engine is not None
        engine = twin_of(self._engine)
        self._engines.append(engine)
        self.sessions = Sessions(engine)

    def _done(self, loop: asyncio.AbstractEventLoop, _future: object) -> None:
        with self._lock:
            self._busy -= 1
            if self._loop is loop:
                loop.call_soon_threadsafe(loop.call_later, _LINGER, self._end_if_idle)

    def _end_if_idle(self) -> None:
        """What was cancelled counts as done, but may still be at its end."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._busy or self._loop is not loop:
                return
            if asyncio.all_tasks(loop):
                loop.call_later(_LINGER, self._end_if_idle)
                return
            self._loop = None
            loop.stop()


async def _run(work: Work[Answer], sessions: Sessions) -> Answer:
    return await work(sessions)


def _serve(loop: asyncio.AbstractEventLoop, engines: list[AsyncEngine]) -> None:
    """The thread, until nothing is left to do."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        for engine in engines:
            with suppress(TimeoutError):
                loop.run_until_complete(asyncio.wait_for(engine.dispose(), _PATIENCE))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
