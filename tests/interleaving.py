"""Forces an order upon two transactions: a statement of the sweep is made to wait at a known point
while another connection writes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import event, func
from sqlalchemy.util import await_only

from tests.database import Database

_GATE = 4711
_PATIENCE = 20.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for the effect of another process, which cannot signal it."""
    async with asyncio.timeout(_PATIENCE):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def gated(model: Any) -> Any:
    """`reapable=`, by the model's own column, once the gate is open. A find asks it after it has
    taken its snapshot, and before it locks a row."""
    return func.pass_gate(model.idempotent)


@asynccontextmanager
async def closed_gate(database: Database) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """While it is closed a find stands still; gives what waits for one to stand there."""
    await database.execute(
        "CREATE FUNCTION pass_gate(boolean) RETURNS boolean LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM pg_advisory_xact_lock_shared({_GATE}); RETURN $1; END $$"
    )

    async def someone_waits() -> bool:
        waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = :gate"
        return bool(await database.execute(f"{waiting} AND NOT granted", gate=_GATE))

    async with database.engine.begin() as keeper:
        await keeper.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_GATE})")
        yield lambda: until(someone_waits)


@contextmanager
def before_statement(
    database: Database, part: str, act: Callable[[], Awaitable[object]]
) -> Iterator[None]:
    """Acts, once, before the first statement that contains `part` is sent."""
    done = False

    def on_execute(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal done
        if part in statement and not done:
            done = True
            await_only(act())

    engine = database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", on_execute)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", on_execute)
    assert done, f"no statement contained {part!r}"
