"""A fence around a session: no commit goes through it once its guard finds nothing.

The one point that every commit passes is the connection's, whether it was asked for by
`session.commit()`, by the end of `session.begin()`, or on the connection itself. The guard runs
there, in the same transaction, after everything was flushed. What the fence cannot see is a COMMIT
sent as text, or past SQLAlchemy, or a connection that is itself put into AUTOCOMMIT.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Select, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from unstuck.db.sources import engine_of
from unstuck.errors import ClaimLost, UnstuckError, describe

logger = logging.getLogger("unstuck.loop")


_KEY = "unstuck_fence"
_SERIALIZATION_FAILURE = "40001"
_TRIES = 5


class Fence:
    """Guards one session for as long as the session is used, also after its item has ended; until
    the session is given to another item."""

    def __init__(
        self, session: AsyncSession, connection: AsyncConnection, guard: Select[Any], label: str
    ) -> None:
        assert connection.sync_connection is not None
        self._session = session.sync_session
        self._connection = connection.sync_connection
        self._pool = self._connection.engine.pool
        self._guard = guard
        self._label = label
        self._lifted = False
        self.refused = False
        if engine_of(session) is None:
            return  # it hangs on a connection of the host's, and commits nothing
        earlier = self._session.info.pop(_KEY, None)
        if earlier is not None:
            earlier.retire()
        self._session.info[_KEY] = self
        forbid_autocommit(session)
        event.listen(self._session, "after_begin", self._begun)
        self._begun(None, None, self._connection)

    def retire(self) -> None:
        event.remove(self._session, "after_begin", self._begun)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For the one commit that ends the claim, and has proved by doing so that it was owned."""
        self._lifted = True
        try:
            yield
        finally:
            self._lifted = False

    def cut(self) -> None:
        """Ends the connection by force, if it was not given back: a task that was cancelled while
        it closed its session would leave it open, with all its locks."""
        if self._connection.closed or self._connection.invalidated:
            return
        try:
            if self._connection.dialect.name == "sqlite":
                _roll_back_in_its_thread(self._connection.connection.driver_connection)
            self._connection.invalidate()
        except Exception as error:
            logger.debug("A connection could not be cut: %s", describe(error))

    def _begun(self, _session: Any, _transaction: Any, connection: Connection) -> None:
        if connection.engine.pool is not self._pool:
            return  # another database of the host's: the claim is not there
        self._connection = connection
        level = isolation_of(connection)
        if level == "AUTOCOMMIT":
            connection.invalidate()  # or it would go on, and commit whatever it is given
            raise UnstuckError(f"{self._label}: a session in AUTOCOMMIT cannot be fenced.")
        event.listen(connection, "commit", self._check)
        event.listen(connection, "prepare_twophase", self._check)
        if connection.dialect.name == "sqlite":
            # Its driver begins no transaction before a savepoint: the release is then the commit.
            event.listen(connection, "release_savepoint", self._check)
        if level in _FIXED_SNAPSHOT:
            # At its end it could not lock what a beat has changed since its beginning.
            self._check_at_begin(connection)

    def _check_at_begin(self, connection: Connection) -> None:
        """A beat may come between the snapshot and the lock; another snapshot costs nothing yet."""
        for _ in range(_TRIES):
            try:
                return self._check(connection)
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) != _SERIALIZATION_FAILURE:
                    raise
                connection.dialect.do_rollback(connection.connection)
        return self._check(connection)

    def _check(self, connection: Connection, *_: Any) -> None:
        if self._lifted or self._session.info.get(_KEY) is not self:
            return
        if connection.execute(self._guard).first() is not None:
            return
        self.refused = True
        # By the driver: a transaction whose commit failed counts as ended, and its connection would
        # go back to the pool with everything in it still to be committed by the next.
        connection.dialect.do_rollback(connection.connection)
        raise ClaimLost(self._label)


_FIXED_SNAPSHOT = ("REPEATABLE READ", "SERIALIZABLE")


def _roll_back_in_its_thread(driver: Any) -> None:
    """aiosqlite has a thread for each connection, which is told at the first step; older versions
    of SQLAlchemy cannot end it without awaiting."""
    rollback = driver.rollback()
    rollback.send(None)
    rollback.close()


def isolation_of(connection: Connection) -> str | None:
    """As the connection was told, else as its engine was, else as the server has it."""
    dialect = connection.dialect
    if dialect.name != "postgresql":
        return None
    told = connection.get_execution_options().get("isolation_level")
    usual = getattr(dialect, "_on_connect_isolation_level", None)
    return told or usual or dialect.default_isolation_level


def forbid_autocommit(session: AsyncSession) -> None:
    """In AUTOCOMMIT each statement would be its own commit, and none of them passes here."""
    bind = session.get_bind()
    if not isinstance(bind, Engine) or bind.dialect.name != "postgresql":
        return
    asked = bind.get_execution_options().get("isolation_level")
    usual = getattr(bind.dialect, "_on_connect_isolation_level", None)
    if (asked or usual) == "AUTOCOMMIT":
        # An engine beside it, on the same pool: one derived from it would be in AUTOCOMMIT as well.
        options = {**bind.get_execution_options(), "isolation_level": "READ COMMITTED"}
        session.sync_session.bind = Engine(
            bind.pool, bind.dialect, bind.url, execution_options=options
        )
