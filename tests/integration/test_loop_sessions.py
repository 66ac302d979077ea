"""The job loop where sessions fail: no record is lost, and none stays in Processing."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from tests.database import Database
from tests.jobs import Job, Status, get_job, start
from tests.lookup import Witness
from tests.looping import queue_job, queue_jobs, read_claims, read_ledger, run
from tests.outages import (
    AT_ONCE,
    alert,
    alerts,
    failing_after_the_claim,
    give_none,
    nothing,
    read_files,
    read_spool,
    said_at,
    start_unreliable,
)
from unstuck import Unstuck

NO_SESSION = "Failed to obtain processing session"
GAVE_NONE = "No database session: the session source gave None instead of an AsyncSession"


async def forbidden(item_id: int, session: AsyncSession) -> None:
    raise AssertionError("there is no session to call it with")


async def check_failed(database: Database, job: int) -> None:
    """The true end of a record whose claim was made and never begun, written once."""
    done = await get_job(database, job)
    assert (done.status, done.error) == (Status.Failed, NO_SESSION)
    assert await read_claims(database) == []
    assert await read_ledger(database) == [(str(job), "attempt", "no_session", "failed")]


async def test_without_any_session_after_the_claim_the_record_is_an_alert_and_its_end_is_spooled(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck, source = await start_unreliable(database, tmp_path)
    job = await queue_job(database)
    with failing_after_the_claim(database, source):
        result = await run(unstuck, forbidden)
    assert (result.claimed, result.spooled, result.failed) == (1, 1, 0)
    assert alerts(caplog) == [alert(job)]
    assert (await get_job(database, job)).status is Status.Processing
    (claim,) = await read_claims(database)
    (entry,) = await read_spool(database, unstuck.settings)
    assert (entry.workflow, entry.record_id, entry.token) == ("jobs", str(job), claim.token)
    assert (entry.outcome, entry.cause, entry.error) == ("failed", "no_session", NO_SESSION)
    assert entry.worker_id == claim.worker_id
    assert entry.data["reason"] == GAVE_NONE


async def test_what_was_spooled_is_written_by_the_next_loop(
    database: Database, tmp_path: Path
) -> None:
    witness = Witness()
    unstuck, source = await start_unreliable(database, tmp_path, observers=[witness])
    job = await queue_job(database)
    with failing_after_the_claim(database, source):
        await run(unstuck, forbidden)
    source.mend()
    result = await run(unstuck, forbidden)
    assert (result.claimed, result.error) == (0, None)
    await check_failed(database, job)
    assert await read_spool(database, unstuck.settings) == []
    assert [ended.outcome for ended in witness.heard("on_attempt_ended")] == ["spooled", "failed"]
    (entry,) = await unstuck.history("jobs", job)
    assert entry.data["reason"] == GAVE_NONE
    assert entry.data["spooled"] is True


async def test_what_was_spooled_is_written_by_the_next_sweep(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_unreliable(database, tmp_path)
    job = await queue_job(database)
    with failing_after_the_claim(database, source):
        await run(unstuck, forbidden)
    sweeper = Unstuck(database.sessions, unstuck.settings, unstuck.registry)
    assert (await sweeper.sweep()).found == 0
    await check_failed(database, job)
    assert await read_spool(database, unstuck.settings) == []


async def test_a_dry_run_writes_nothing_from_the_spool(database: Database, tmp_path: Path) -> None:
    unstuck, source = await start_unreliable(database, tmp_path)
    job = await queue_job(database)
    with failing_after_the_claim(database, source):
        await run(unstuck, forbidden)
    source.mend()
    await unstuck.sweep(dry_run=True)
    assert (await get_job(database, job)).status is Status.Processing
    assert len(await read_spool(database, unstuck.settings)) == 1


async def test_each_record_of_a_batch_without_sessions_is_spooled_for_itself(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck, source = await start_unreliable(database, tmp_path)
    jobs = await queue_jobs(database, 3)
    with failing_after_the_claim(database, source):
        result = await run(unstuck, forbidden, concurrency=2)
    assert result.spooled == 3
    assert sorted(alerts(caplog)) == [alert(job) for job in jobs]
    source.mend()
    await run(unstuck, forbidden)
    assert [(await get_job(database, job)).status for job in jobs] == [Status.Failed] * 3


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_record_without_a_session_is_failed_in_an_error_session_within_three_tries(
    database: Database, tmp_path: Path, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first failure is of the session to process it in, the others of error sessions."""
    unstuck, source = await start_unreliable(database, tmp_path)
    job = await queue_job(database)
    with failing_after_the_claim(database, source, times=failures):
        result = await run(unstuck, forbidden)
    assert (result.failed, result.spooled) == (1, 0)
    await check_failed(database, job)
    assert alerts(caplog) == []
    assert said_at(caplog, logging.ERROR) == [f"jobs {job}: {NO_SESSION}: {GAVE_NONE}"]


async def test_a_fourth_failure_is_one_too_many(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck, source = await start_unreliable(database, tmp_path)
    job = await queue_job(database)
    with failing_after_the_claim(database, source, times=4):
        result = await run(unstuck, forbidden)
    assert (result.failed, result.spooled) == (0, 1)
    assert alerts(caplog) == [alert(job)]
    await check_failed(database, job)  # by the very same loop: the fifth session was there


async def test_the_settings_say_how_often_an_error_session_is_tried_for(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_unreliable(database, tmp_path, settings={"session_attempts": 1})
    await queue_job(database)
    with failing_after_the_claim(database, source, times=2):
        assert (await run(unstuck, forbidden)).spooled == 1


def raise_oops() -> AsyncSession:
    raise RuntimeError("out of sessions, postgresql://app:s3cret@db/app")


def raise_rubbish() -> AsyncSession:
    raise RuntimeError("out of \0 sessions \ud800")


async def hang() -> AsyncSession:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


TROUBLES: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (give_none, "the session source gave None instead of an AsyncSession"),
    "an error": (raise_oops, "out of sessions, postgresql://app:***@db/app"),
    "an error that no column takes": (raise_rubbish, "out of  sessions ?"),
    "a plain Session": (Session, "the session source gave Session instead of an AsyncSession"),
    "nothing for ever": (hang, "none within 0.3 s"),
}


@pytest.mark.parametrize(("trouble", "reason"), TROUBLES.values(), ids=TROUBLES)
async def test_a_record_is_failed_and_the_next_goes_on_where_the_source_gives(
    database: Database,
    tmp_path: Path,
    trouble: Callable[[], Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    witness = Witness()
    settings = {"session_timeout_seconds": 0.3}
    unstuck, source = await start_unreliable(
        database, tmp_path, settings=settings, observers=[witness]
    )
    first, second = await queue_jobs(database, 2)
    with failing_after_the_claim(database, source, times=1, trouble=trouble):
        result = await run(unstuck, nothing, order_by_column=Job.id)
    assert (result.failed, result.completed) == (1, 1)
    failed = await get_job(database, first)
    assert (failed.status, failed.error) == (Status.Failed, NO_SESSION)
    assert (await get_job(database, second)).status is Status.Completed
    (entry,) = await unstuck.history("jobs", first)
    assert entry.data["reason"] == f"No database session: {reason}"
    assert witness.heard("on_session_failed") == [("jobs", f"No database session: {reason}")]
    assert "s3cret" not in caplog.text


async def test_a_source_that_hangs_for_ever_keeps_neither_loop_nor_sweep(
    database: Database, tmp_path: Path
) -> None:
    settings = {"session_timeout_seconds": 0.1, "session_attempts": 1}
    unstuck, source = await start_unreliable(database, tmp_path, settings=settings)
    job = await queue_job(database)
    async with asyncio.timeout(20):
        with failing_after_the_claim(database, source, trouble=hang):
            assert (await run(unstuck, forbidden)).spooled == 1
        stuck = await run(unstuck, forbidden)
        assert stuck.error == "No database session: none within 0.1 s"
        (error,) = (await unstuck.sweep()).errors
        assert error == "jobs: No database session: none within 0.1 s"
    source.mend()
    await unstuck.sweep()
    await check_failed(database, job)


class TightPool:
    """Sessions from a pool of one connection, which somebody else takes after the claim, and gives
    back before the sessions that come after `until` were asked for."""

    def __init__(self, database: Database, until: int) -> None:
        self.engine = create_async_engine(
            database.url, pool_size=1, max_overflow=0, pool_timeout=0.05
        )
        self._sessions = async_sessionmaker(self.engine)
        self._somebody = self.engine.connect()
        self._until = until
        self._calls = 0

    async def __call__(self) -> AsyncSession:
        self._calls += 1
        if self._calls == 2:
            await self._somebody.start()
        if self._calls == self._until + 1:
            await self._somebody.close()
        return self._sessions()


@pytest.mark.parametrize("until", [2, 3], ids=["at once", "by the second try"])
async def test_a_pool_of_one_connection_that_somebody_holds_costs_one_record(
    database: Database, tmp_path: Path, until: int
) -> None:
    """async_sessionmaker() gives a session even so: what fails is the checkout."""
    pool = TightPool(database, until)
    said = {**AT_ONCE, "spool_url": str(tmp_path)}
    prepared = await start(database, settings=said)
    unstuck = Unstuck(pool, prepared.settings, prepared.registry)
    first, second = await queue_jobs(database, 2)
    result = await run(unstuck, nothing, order_by_column=Job.id)
    assert (result.failed, result.completed, result.spooled) == (1, 1, 0)
    failed = await get_job(database, first)
    assert (failed.status, failed.error) == (Status.Failed, NO_SESSION)
    (entry,) = await unstuck.history("jobs", first)
    assert "QueuePool limit of size 1 overflow 0 reached" in entry.data["reason"]
    assert (await get_job(database, second)).status is Status.Completed
    await pool.engine.dispose()


async def test_a_pool_that_stays_exhausted_is_spooled_and_written_when_it_is_free(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = TightPool(database, until=5)
    said = {**AT_ONCE, "spool_url": str(tmp_path)}
    prepared = await start(database, settings=said)
    unstuck = Unstuck(pool, prepared.settings, prepared.registry)
    job = await queue_job(database)
    result = await run(unstuck, forbidden)
    assert result.spooled == 1
    assert alerts(caplog) == [alert(job)]
    await check_failed(database, job)
    await pool.engine.dispose()


async def test_a_source_whose_session_cannot_be_closed_ends_no_loop(
    database: Database, tmp_path: Path
) -> None:
    """As a dependency that commits once more at its end, on a connection that is gone."""
    unstuck, source = await start_unreliable(database, tmp_path)
    jobs = await queue_jobs(database, 2)

    class Unclosable(AsyncSession):
        async def close(self) -> None:
            await super().close()
            raise ConnectionResetError("connection reset by peer")

    unclosable = async_sessionmaker(database.engine, class_=Unclosable)
    with failing_after_the_claim(database, source, trouble=unclosable):
        result = await run(unstuck, nothing)
    assert result.completed == 2
    assert [(await get_job(database, job)).status for job in jobs] == [Status.Completed] * 2


async def test_no_password_of_a_source_that_fails_is_in_the_spool_the_log_or_the_ledger(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "unstuck")
    unstuck, source = await start_unreliable(database, tmp_path)
    job = await queue_job(database)
    with failing_after_the_claim(database, source, trouble=raise_oops):
        await run(unstuck, forbidden)
    (kept,) = read_files(tmp_path)
    assert "postgresql://app:***@db/app" in kept
    assert "s3cret" not in kept
    await run(unstuck, forbidden)
    await unstuck.sweep()
    source.mend()
    await run(unstuck, forbidden)
    (entry,) = await unstuck.history("jobs", job)
    assert "postgresql://app:***@db/app" in str(entry)
    assert "s3cret" not in str(entry)
    assert "s3cret" not in caplog.text
