"""However a processing function ends, its record ends in the right place and says why."""

import asyncio
import logging
from typing import Any

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.jobs import Job, Status, change, get_job, start
from tests.lookup import Witness, recall, remember
from tests.looping import queue_job, queue_jobs, read_claims, read_ledger, run

SECRET = "postgresql://ada:hunter2@db/prod"


async def set_status(item_id: int, session: AsyncSession, status: Status) -> None:
    await session.execute(update(Job).where(Job.id == item_id).values(status=status, error="mine"))


@pytest.mark.parametrize("status", [Status.Completed, Status.Failed, Status.Waiting, Status.Queued])
@pytest.mark.parametrize("end", ["returned", "returned False", "raised"])
async def test_a_status_that_the_function_committed_is_never_overwritten(
    database: Database, status: Status, end: str
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> bool:
        await set_status(item_id, session, status)
        await session.commit()
        if end == "raised":
            raise ValueError("afterwards")
        return end == "returned"

    await run(unstuck, work)
    done = await get_job(database, job)
    assert (done.status, done.error) == (status, "mine")
    assert await read_claims(database) == []
    outcome = {
        Status.Completed: "completed",
        Status.Failed: "failed",
        Status.Queued: "requeued",
    }.get(status, "moved")
    assert await read_ledger(database) == [(str(job), "attempt", None, outcome)]


@pytest.mark.parametrize("flushed", [True, False])
async def test_a_status_that_the_function_left_to_be_committed_stands(
    database: Database, flushed: bool
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        found = await session.get(Job, item_id)
        assert found is not None
        found.status = Status.Waiting
        if flushed:
            await session.flush()

    result = await run(unstuck, work)
    assert result.moved == 1
    assert (await get_job(database, job)).status is Status.Waiting


async def test_an_error_is_cut_to_its_column(database: Database) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        raise ValueError("x" * 100_000)

    await run(unstuck, work)
    assert (await get_job(database, job)).error == "x" * 500


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ValueError("no such page"), "no such page"),
        (ValueError(), "ValueError"),
        (ValueError("two\nlines"), "two\nlines"),
        (ValueError("a NUL \0 and half a \ud83d pair"), "a NUL  and half a ? pair"),
        (ValueError(f"cannot reach {SECRET}"), "cannot reach postgresql://ada:***@db/prod"),
        (TimeoutError("of its own"), "of its own"),
        (asyncio.CancelledError("of its own"), "of its own"),
        (KeyError("page"), "'page'"),
    ],
    ids=str,
)
async def test_what_was_raised_is_in_the_error_column(
    database: Database,
    raised: BaseException,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        raise raised

    await run(unstuck, work)
    done = await get_job(database, job)
    assert (done.status, done.error) == (Status.Failed, told)
    assert "hunter2" not in caplog.text


async def test_an_error_of_the_database_does_not_show_its_values(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        await session.execute(
            text("INSERT INTO jobs (id, status, error, zombie_count) VALUES (:i, 'Queued', :e, 0)"),
            {"i": item_id, "e": "confidential"},
        )

    await run(unstuck, work)
    done = await get_job(database, job)
    assert done.status is Status.Failed
    assert done.error is not None
    assert "unique" in done.error.lower()
    assert "confidential" not in done.error


async def test_a_function_that_swallows_an_error_of_its_flush_has_failed(
    database: Database,
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> bool:
        session.add(Job(id=item_id))
        with pytest.raises(IntegrityError):
            await session.flush()
        return True

    assert (await run(unstuck, work)).failed == 1
    assert (await get_job(database, job)).status is Status.Failed


async def test_what_cannot_be_flushed_at_the_end_fails_the_record(database: Database) -> None:
    unstuck = await start(database)
    job = await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> bool:
        session.add(Job(id=item_id))
        return True

    assert (await run(unstuck, work)).failed == 1
    done = await get_job(database, job)
    assert done.status is Status.Failed
    assert done.error is not None
    assert "unique" in done.error.lower()


async def test_what_cannot_be_committed_fails_the_record(postgres: Database) -> None:
    unstuck = await start(postgres)
    job = await queue_job(postgres)
    await postgres.execute("CREATE TABLE parents (id int PRIMARY KEY)")
    await postgres.execute(
        "CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"
    )

    async def work(item_id: int, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO children VALUES (1)"))

    assert (await run(unstuck, work)).failed == 1
    done = await get_job(postgres, job)
    assert done.status is Status.Failed
    assert done.error is not None
    assert "foreign key" in done.error


async def test_one_failure_does_not_stop_the_others(database: Database) -> None:
    unstuck = await start(database)
    first, *rest = await queue_jobs(database, 3)

    async def work(item_id: int, session: AsyncSession) -> None:
        if item_id == first:
            raise ValueError("bad record")

    result = await run(unstuck, work, order_by_column=Job.id)
    assert (result.failed, result.completed) == (1, 2)
    assert [(await get_job(database, job)).status for job in rest] == [Status.Completed] * 2


async def test_a_function_that_hangs_is_ended_by_its_timeout(database: Database) -> None:
    unstuck = await start(database)
    hung, well = await queue_jobs(database, 2)
    released = asyncio.Event()

    async def work(item_id: int, session: AsyncSession) -> None:
        if item_id == hung:
            await set_status(item_id, session, Status.Waiting)
            await released.wait()

    result = await run(unstuck, work, timeout=0.2, order_by_column=Job.id)
    assert (result.failed, result.completed) == (1, 1)
    done = await get_job(database, hung)
    assert (done.status, done.error) == (Status.Failed, "Timed out after 0.2 s")
    assert (str(hung), "attempt", "hung", "failed") in await read_ledger(database)
    assert (await get_job(database, well)).status is Status.Completed


async def test_a_clean_end_clears_the_strikes(database: Database) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    await remember(database, job, zombie_count=2)
    await run(unstuck, lambda item_id, session: None)
    assert await recall(database, job) is None
    assert [kind for _, kind, *_ in await read_ledger(database)] == ["attempt", "recovered"]


async def test_a_failure_keeps_the_strikes(database: Database) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    await remember(database, job, zombie_count=2)
    await run(unstuck, lambda item_id, session: False)
    left = await recall(database, job)
    assert left is not None
    assert left.zombie_count == 2


async def test_observers_are_told_how_each_record_ended(database: Database) -> None:
    witness = Witness()
    unstuck = await start(database, observers=[witness])
    good, bad = await queue_jobs(database, 2)
    await run(unstuck, lambda item_id, session: item_id == good)
    ends = {ended.record_id: ended.outcome for ended in witness.heard("on_attempt_ended")}
    assert ends == {str(good): "completed", str(bad): "failed"}


async def test_a_failing_observer_stops_nothing(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def on_attempt_ended(self, ended: Any) -> None:
            raise RuntimeError("observer down")

    unstuck = await start(database, observers=[Failing()])
    await queue_jobs(database, 2)
    with caplog.at_level(logging.ERROR):
        assert (await run(unstuck, lambda item_id, session: None)).completed == 2
    assert "observer down" in caplog.text


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_more_run_at_once_than_were_asked_for(
    database: Database, concurrency: int
) -> None:
    unstuck = await start(database)
    await queue_jobs(database, 6)
    running = most = 0
    full = asyncio.Event()

    async def work(item_id: int, session: AsyncSession) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == concurrency:
            full.set()
        await full.wait()  # else they might just happen to run one by one
        running -= 1

    await run(unstuck, work, concurrency=concurrency)
    assert most == concurrency


async def test_a_record_that_was_deleted_meanwhile_is_nobodys_business(database: Database) -> None:
    unstuck = await start(database)
    await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        await session.execute(text("DELETE FROM jobs"))

    assert (await run(unstuck, work)).moved == 1
    assert await read_claims(database) == []


async def test_a_trigger_that_keeps_a_record_queued_keeps_it_unclaimed(postgres: Database) -> None:
    unstuck = await start(postgres)
    kept, free = await queue_jobs(postgres, 2)
    await postgres.execute(
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF NEW.id = {kept} THEN RETURN NULL; END IF; RETURN NEW; END $$"
    )
    await postgres.execute(
        "CREATE TRIGGER keep BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION keep()"
    )
    result = await run(unstuck, lambda item_id, session: None)
    assert (result.claimed, result.completed) == (1, 1)
    assert (await get_job(postgres, kept)).status is Status.Queued
    assert (await get_job(postgres, free)).status is Status.Completed
    await change(postgres, free, status=Status.Queued)


@pytest.mark.parametrize("arrived", [True, False], ids=["committed", "not committed"])
async def test_a_commit_whose_answer_was_lost_is_looked_up(
    database: Database, arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection broke off after COMMIT was sent: it may or may not have arrived."""
    unstuck = await start(database)
    job = await queue_job(database)
    dialect = database.engine.sync_engine.dialect
    commit = dialect.do_commit

    async def work(item_id: int, session: AsyncSession) -> None:
        await session.execute(update(Job).where(Job.id == item_id).values(zombie_count=7))
        monkeypatch.setattr(dialect, "do_commit", break_off)

    def break_off(connection: Any) -> None:
        monkeypatch.setattr(dialect, "do_commit", commit)
        if arrived:
            commit(connection)
        raise ConnectionResetError("connection reset by peer")

    result = await run(unstuck, work)
    done = await get_job(database, job)
    if arrived:
        assert (result.completed, done.status, done.zombie_count) == (1, Status.Completed, 7)
    else:
        assert (result.failed, done.status, done.zombie_count) == (1, Status.Failed, 0)
        assert done.error == "connection reset by peer"
    kinds = [kind for _, kind, *_ in await read_ledger(database)]
    assert kinds == ["attempt"]
