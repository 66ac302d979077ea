"""The fence around sessions as hosts have them: one for all records, one connection for all, two
databases in one, AUTOCOMMIT by the way, neighbours on the same row."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tests.database import Database, sqlite_database
from tests.interleaving import until
from tests.jobs import Job, Status, get_job, start
from tests.looping import queue_job, queue_jobs, read_claims, run
from unstuck import Unstuck, UnstuckError, metadata
from unstuck.tables import claims


async def write(item_id: int, session: AsyncSession) -> None:
    await session.execute(update(Job).where(Job.id == item_id).values(zombie_count=7))


async def commit(item_id: int, session: AsyncSession) -> None:
    await write(item_id, session)
    await session.commit()


async def lose_claim(database: Database, item_id: int) -> None:
    """As a sweep or a human takes it away."""
    async with database.engine.begin() as connection:
        mine = claims.c.record_id == str(item_id)
        assert (await connection.execute(delete(claims).where(mine))).rowcount == 1


async def read_jobs(database: Database, records: list[int]) -> list[tuple[Status, int]]:
    found = [await get_job(database, record) for record in records]
    return [(job.status, job.zombie_count) for job in found]


async def test_one_session_may_serve_all_records(database: Database) -> None:
    prepared = await start(database)
    shared = AsyncSession(database.engine)
    unstuck = Unstuck(lambda: shared, prepared.settings, prepared.registry)
    jobs = await queue_jobs(database, 3)
    result = await run(unstuck, commit)
    await shared.close()
    assert (result.completed, result.lost) == (3, 0)
    assert await read_jobs(database, jobs) == [(Status.Completed, 7)] * 3
    assert await read_claims(database) == []


async def test_one_session_for_all_records_is_fenced_for_each(database: Database) -> None:
    prepared = await start(database)
    shared = AsyncSession(database.engine)
    unstuck = Unstuck(lambda: shared, prepared.settings, prepared.registry)
    first, robbed, last = await queue_jobs(database, 3)

    async def work(item_id: int, session: AsyncSession) -> None:
        if item_id == robbed:
            await lose_claim(database, item_id)
        await commit(item_id, session)

    result = await run(unstuck, work, order_by_column=Job.id)
    await shared.close()
    assert (result.completed, result.lost) == (2, 1)
    assert await read_jobs(database, [first, robbed, last]) == [
        (Status.Completed, 7),
        (Status.Processing, 0),
        (Status.Completed, 7),
    ]


async def test_one_connection_may_serve_all_records_and_its_owner_commits_them(
    database: Database,
) -> None:
    prepared = await start(database)
    jobs = await queue_jobs(database, 3)
    async with database.engine.connect() as connection:
        outer = await connection.begin()

        def get_session() -> AsyncSession:
            return AsyncSession(bind=connection, join_transaction_mode="create_savepoint")

        unstuck = Unstuck(get_session, prepared.settings, prepared.registry)
        result = await run(unstuck, commit)
        await outer.commit()
    assert (result.completed, result.lost) == (3, 0)
    assert await read_jobs(database, jobs) == [(Status.Completed, 7)] * 3
    assert await read_claims(database) == []


class Other(DeclarativeBase):
    pass


class Audit(Other):
    __tablename__ = "audits"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[Database]:
    """A second database of the host's, in which nothing is claimed."""
    folder = tmp_path / "other"
    folder.mkdir()
    async with sqlite_database(folder) as other:
        await other.create(Other.metadata)
        yield other


@pytest.mark.parametrize("has_tables", [False, True], ids=["bare", "with our tables"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["owned", "lost"])
async def test_only_the_database_of_the_claim_is_asked_for_it(
    database: Database, other: Database, is_lost: bool, has_tables: bool
) -> None:
    prepared = await start(database)
    if has_tables:
        await other.create(metadata)
    sessions = async_sessionmaker(database.engine, binds={Audit: other.engine})
    unstuck = Unstuck(sessions, prepared.settings, prepared.registry)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        if is_lost:
            await lose_claim(database, item_id)
        session.add(Audit(id=item_id))
        await commit(item_id, session)

    result = await run(unstuck, work)
    assert (result.completed, result.lost) == (int(not is_lost), int(is_lost))
    if is_lost:
        assert await read_jobs(database, [job]) == [(Status.Processing, 0)]
        return
    assert await read_jobs(database, [job]) == [(Status.Completed, 7)]
    async with other.sessions() as session:
        assert list(await session.scalars(select(Audit.id))) == [job]


async def ask_for_autocommit(session: AsyncSession) -> None:
    await session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})


@pytest.mark.parametrize("is_refusal_swallowed", [False, True], ids=["raised", "swallowed"])
async def test_autocommit_in_mid_work_is_refused(
    postgres: Database, is_refusal_swallowed: bool
) -> None:
    """Each statement would be a commit of its own, and none would pass the fence."""
    unstuck = await start(postgres)
    job = await queue_job(postgres)

    async def work(item_id: int, session: AsyncSession) -> None:
        await lose_claim(postgres, item_id)
        with suppress(UnstuckError) if is_refusal_swallowed else nullcontext():
            await ask_for_autocommit(session)
        await write(item_id, session)

    result = await run(unstuck, work)
    assert (result.completed, result.lost) == (0, 1)
    assert await read_jobs(postgres, [job]) == [(Status.Processing, 0)]


async def test_a_function_that_wants_autocommit_fails_with_the_reason(postgres: Database) -> None:
    unstuck = await start(postgres)
    first, second = await queue_jobs(postgres, 2)

    async def work(item_id: int, session: AsyncSession) -> None:
        if item_id == first:
            await ask_for_autocommit(session)
        await commit(item_id, session)

    result = await run(unstuck, work, order_by_column=Job.id)
    assert (result.completed, result.failed) == (1, 1)
    assert await read_jobs(postgres, [first, second]) == [
        (Status.Failed, 0),
        (Status.Completed, 7),
    ]
    error = (await get_job(postgres, first)).error
    assert error == f"jobs {first}: a session in AUTOCOMMIT cannot be fenced."


async def test_the_end_of_finished_work_waits_for_a_neighbour_on_the_row(
    postgres: Database,
) -> None:
    """However short our own transactions may wait: what is done is not thrown away for that."""
    unstuck = await start(postgres, settings={"lock_timeout_seconds": 0.001})
    job = await queue_job(postgres)
    has_locked = asyncio.Event()
    neighbours: list[asyncio.Task[None]] = []

    async def somebody_waits() -> bool:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
        return bool(await postgres.execute(f"{waiting} AND wait_event_type = 'Lock'"))

    async def be_a_neighbour() -> None:
        async with postgres.engine.begin() as connection:
            await connection.execute(update(Job).where(Job.id == job).values(idempotent=True))
            has_locked.set()
            await until(somebody_waits)

    async def work(item_id: int, session: AsyncSession) -> None:
        session.add(Job(status=Status.Completed, error="the work"))
        await session.flush()
        neighbours.append(asyncio.create_task(be_a_neighbour()))
        await has_locked.wait()

    result = await run(unstuck, work)
    await asyncio.gather(*neighbours)
    assert result.completed == 1
    done = await get_job(postgres, job)
    assert (done.status, done.idempotent) == (Status.Completed, True)
    async with postgres.sessions() as session:
        kept = list(await session.scalars(select(Job.error).where(Job.id != job)))
    assert kept == ["the work"]
