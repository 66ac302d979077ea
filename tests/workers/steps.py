"""Brings a worker to a halt at one exact step of its own."""

import asyncio
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_only

from tests.workers.orders import Moment, Step
from tests.workers.wire import say


def halt() -> None:
    """Like a laptop that is closed. This very thread goes no further than here."""
    say(at="step")
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class Watch:
    """Acts, once, when this process comes to the step, in whichever thread or pool."""

    def __init__(
        self, engine: AsyncEngine, step: Step, act: Callable[[], object], *, waits: bool
    ) -> None:
        """`waits`: for the other transactions of the process. A beat that is frozen as well would
        lock what the test is about to write."""
        self._step = step
        self._act = act
        self._waits = waits
        self._left = step.nth
        self._sent: dict[int, str] = defaultdict(str)  # by connection, in its transaction
        dialect = engine.sync_engine.dialect
        self._commit, self._rollback = dialect.do_commit, dialect.do_rollback
        vars(dialect).update(do_commit=self._on_commit, do_rollback=self._on_rollback)
        event.listen(Engine, "before_cursor_execute", self._on_execute)

    def _on_execute(
        self, connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any
    ) -> None:
        mine = id(connection.connection.dbapi_connection)
        text = f"{statement} {parameters}\n"
        self._arrive("before statement", text, mine)
        self._sent[mine] += text

    def _on_commit(self, connection: Any) -> None:
        mine = id(connection.dbapi_connection)
        text = self._sent[mine]
        self._arrive("before commit", text, mine)
        self._commit(connection)
        self._sent.pop(mine, None)
        self._arrive("after commit", text, mine)

    def _on_rollback(self, connection: Any) -> None:
        mine = id(connection.dbapi_connection)
        self._rollback(connection)
        self._sent.pop(mine, None)

    def _arrive(self, moment: Moment, text: str, mine: int) -> None:
        if moment != self._step.moment or self._step.words not in text:
            return
        self._left -= 1
        if self._left == 0:
            while self._waits and self._sent.keys() - {mine}:
                await_only(asyncio.sleep(0.001))
            self._act()
