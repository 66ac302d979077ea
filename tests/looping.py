"""What the tests of the job loop share: jobs that wait in their queue, and a loop over them."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy import case, select, update

from tests.database import Database
from tests.jobs import HOUR, Job, Status, add_job, ago
from unstuck import Unstuck
from unstuck.loop import LoopResult
from unstuck.tables import claims, events

# What an application passes to the loop that it has.
CALL: dict[str, Any] = {
    "model": Job,
    "status_enum": Status,
    "queued_status": Status.Queued,
    "processing_status": Status.Processing,
    "completed_status": Status.Completed,
    "failed_status": Status.Failed,
    "batch_size": 10,
}


async def queue_job(database: Database, **values: Any) -> int:
    """A job that waits in the queue."""
    updated_at: datetime = values.pop("updated_at", ago(60))
    return await add_job(database, status=Status.Queued, updated_at=updated_at, **values)


async def queue_jobs(database: Database, number: int) -> list[int]:
    return [await queue_job(database) for _ in range(number)]


async def run(unstuck: Unstuck, function: Callable[..., Any], **named: Any) -> LoopResult:
    """One call of the loop."""
    return await unstuck.run_job_loop(**{**CALL, "processing_function": function, **named})


async def age_claims(database: Database, seconds: float = 2 * HOUR) -> None:
    """That long ago their workers gave the last sign of life."""
    then = ago(seconds)
    async with database.engine.begin() as connection:
        await connection.execute(
            update(claims).values(
                claimed_at=then,
                started_at=case((claims.c.started_at.is_not(None), then)),
                heartbeat_at=None,
            )
        )


async def read_claims(database: Database) -> list[Any]:
    async with database.engine.connect() as connection:
        return list(await connection.execute(select(claims).order_by(claims.c.record_id)))


async def read_ledger(database: Database) -> list[tuple[str | None, str, str | None, str | None]]:
    """(record, kind, cause, outcome) of every entry, oldest first."""
    async with database.engine.connect() as connection:
        wanted = select(events.c.record_id, events.c.kind, events.c.cause, events.c.outcome)
        rows = await connection.execute(wanted.order_by(events.c.id))
        return [tuple(row) for row in rows]
