"""What a test does and looks up once a worker is gone."""

from typing import Any

from sqlalchemy import select

from tests.database import Database
from tests.jobs import HOUR, Job, Status, ago, start
from tests.lookup import jobs, rewrite
from tests.workers import functions
from tests.workers.functions import effects
from unstuck import Unstuck
from unstuck.tables import claims, events, records


async def prepare(database: Database, number: int, **policy: Any) -> Unstuck:
    """Jobs 1 to `number` in the queue, of which every other one is idempotent, and an `Unstuck`
    with the worker's policy."""
    unstuck = await start(database, **policy)
    await database.create(functions.metadata)
    async with database.sessions.begin() as session:
        session.add_all(
            Job(id=n, status=Status.Queued, updated_at=ago(60), idempotent=n % 2 == 1)
            for n in range(1, number + 1)
        )
    return unstuck


async def age(database: Database) -> None:
    """Two hours go by in which nothing shows life."""
    past = ago(2 * HOUR)
    for column in (claims.c.claimed_at, claims.c.started_at, claims.c.heartbeat_at):
        await rewrite(database, claims, column.is_not(None), **{column.name: past})
    await rewrite(database, jobs, updated_at=past)


async def read_statuses(database: Database) -> dict[int, Status]:
    async with database.sessions() as session:
        return {job.id: job.status for job in await session.scalars(select(Job))}


async def read_strikes(database: Database) -> dict[int, int]:
    """Of the jobs that anything is remembered of."""
    async with database.engine.connect() as connection:
        rows = await connection.execute(select(records.c.record_id, records.c.zombie_count))
        return {int(record_id): strikes for record_id, strikes in rows}


async def read_effects(database: Database) -> list[int]:
    """The jobs that left an effect, each as often as it did."""
    async with database.engine.connect() as connection:
        return list(await connection.scalars(select(effects.c.job_id).order_by(effects.c.job_id)))


async def read_story(database: Database, job_id: int) -> list[tuple[str, str | None, str | None]]:
    """(kind, cause, outcome) of every entry on a job, oldest first."""
    async with database.engine.connect() as connection:
        query = select(events.c.kind, events.c.cause, events.c.outcome)
        query = query.where(events.c.record_id == str(job_id)).order_by(events.c.id)
        return [tuple(row) for row in await connection.execute(query)]
