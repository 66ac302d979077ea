"""What was spooled is written once, soon, and never over somebody else's work."""

import asyncio
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.database import Database, sqlite_database
from tests.integration.models import State, prepare, read
from tests.integration.test_model_keys import every_kind_of_key
from tests.interleaving import before_statement
from tests.jobs import HOUR, Job, Status, add_job, ago, change, get_job
from tests.lookup import Witness, recall, remember, rewrite
from tests.looping import queue_job, read_claims, read_ledger, run
from tests.outages import (
    AT_ONCE,
    Unreliable,
    add_busy,
    failing_after_the_claim,
    nothing,
    put_entry,
    read_spool,
    said_at,
    spool_end,
    start_spooling,
    start_unreliable,
)
from unstuck import Registry, Unstuck, ZombieSettings
from unstuck.tables import claims

ROOT = Path(__file__).parent.parent.parent


async def test_the_true_error_is_in_the_row_before_the_sweep_looks_for_zombies(
    database: Database, tmp_path: Path
) -> None:
    witness = Witness()
    unstuck = await start_spooling(database, tmp_path, observers=[witness])
    job = await add_job(database)
    entry = await spool_end(database, unstuck, job)
    await rewrite(database, claims, claimed_at=ago(2 * HOUR), started_at=ago(2 * HOUR))
    report = await unstuck.sweep()
    assert (report.found, report.errors) == (0, [])
    done = await get_job(database, job)
    assert (done.status, done.error) == (Status.Failed, "no such page")
    (ended,) = witness.heard("on_attempt_ended")
    assert (ended.record_id, ended.outcome, ended.error) == (str(job), "failed", entry.error)


async def test_a_completed_end_clears_the_strikes_of_its_record(
    database: Database, tmp_path: Path
) -> None:
    unstuck = await start_spooling(database, tmp_path)
    job = await add_busy(database)
    await remember(database, job, zombie_count=2)
    await spool_end(database, unstuck, job, outcome="completed", error=None)
    await unstuck.sweep()
    assert (await get_job(database, job)).status is Status.Completed
    assert await recall(database, job) is None


async def test_a_stopped_end_queues_its_record_again_or_holds_it(
    database: Database, tmp_path: Path
) -> None:
    unstuck = await start_spooling(database, tmp_path, reapable="idempotent", held=Status.Held)
    harmless = await add_job(database, updated_at=ago(60), idempotent=True)
    harmful = await add_job(database, updated_at=ago(60), idempotent=False)
    for job in (harmless, harmful):
        await spool_end(database, unstuck, job, outcome="stopped", error="Stopped by a shutdown")
    await unstuck.sweep()
    assert (await get_job(database, harmless)).status is Status.Queued
    assert (await get_job(database, harmful)).status is Status.Held


LATE = {"failed": "late_failure", "completed": "late_finish", "returned": "late_start"}


@pytest.mark.parametrize(("outcome", "kind"), LATE.items())
async def test_a_record_that_another_has_claimed_meanwhile_is_left_to_it(
    database: Database, tmp_path: Path, outcome: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Witness()
    unstuck = await start_spooling(database, tmp_path, observers=[witness])
    job = await add_busy(database)
    entry = await spool_end(database, unstuck, job, outcome=outcome)
    theirs = uuid4()
    await rewrite(database, claims, token=theirs, worker_id="worker-2")
    before = await get_job(database, job)
    await unstuck.sweep()
    after = await get_job(database, job)
    assert (after.status, after.error, after.updated_at) == (
        Status.Processing,
        None,
        before.updated_at,
    )
    assert [claim.token for claim in await read_claims(database)] == [theirs]
    (late,) = await unstuck.history("jobs", job)
    assert (late.kind, late.worker_id) == (kind, "worker-1")
    assert late.data["token"] == str(entry.token)
    assert late.data["error"] == "no such page"
    assert [ended.outcome for ended in witness.heard("on_attempt_ended")] == ["lost"]
    assert "is refused" in caplog.text
    await unstuck.sweep()
    assert len(await unstuck.history("jobs", job)) == 1


async def test_a_record_that_another_claims_in_that_very_moment_is_left_to_it(
    postgres: Database, tmp_path: Path
) -> None:
    unstuck = await start_spooling(postgres, tmp_path)
    job = await add_busy(postgres)
    await spool_end(postgres, unstuck, job)
    theirs, other = uuid4(), Database(postgres.url)

    async def take() -> None:
        await rewrite(other, claims, token=theirs)

    with before_statement(postgres, "DELETE FROM zombie_claims WHERE", take):
        await unstuck.sweep()
    await other.dispose()
    assert (await get_job(postgres, job)).status is Status.Processing
    assert [claim.token for claim in await read_claims(postgres)] == [theirs]
    assert [kind for _, kind, _, _ in await read_ledger(postgres)] == ["late_failure"]


async def test_a_refusal_that_cannot_be_written_down_is_left_to_the_next_drain(
    database: Database, tmp_path: Path
) -> None:
    unstuck, source = await start_unreliable(database, tmp_path)
    job = await add_busy(database)
    await spool_end(database, unstuck, job)
    await rewrite(database, claims, token=uuid4())

    async def fail() -> None:
        source.fail()

    with before_statement(database, "DELETE FROM zombie_claims", fail):
        await unstuck.sweep()
    assert await read_ledger(database) == []
    source.mend()
    await unstuck.sweep()
    assert [kind for _, kind, _, _ in await read_ledger(database)] == ["late_failure"]
    assert await read_spool(database, unstuck.settings) == []


async def test_a_record_that_a_human_has_moved_meanwhile_stays_where_it_is(
    database: Database, tmp_path: Path
) -> None:
    unstuck = await start_spooling(database, tmp_path)
    job = await add_busy(database)
    await spool_end(database, unstuck, job)
    await change(database, job, status=Status.Waiting, error="somebody looks into it")
    await unstuck.sweep()
    after = await get_job(database, job)
    assert (after.status, after.error) == (Status.Waiting, "somebody looks into it")
    assert await read_claims(database) == []
    assert await read_spool(database, unstuck.settings) == []


async def test_a_record_that_is_deleted_meanwhile_leaves_nothing_behind(
    database: Database, tmp_path: Path
) -> None:
    unstuck = await start_spooling(database, tmp_path)
    job = await add_busy(database)
    await spool_end(database, unstuck, job)
    await database.execute("DELETE FROM jobs")
    await unstuck.sweep()
    assert await read_claims(database) == []
    assert await read_spool(database, unstuck.settings) == []


@pytest.mark.parametrize("outcome", ["failed", "completed", "returned"])
async def test_an_entry_that_was_written_but_not_removed_is_not_taken_for_a_late_one(
    database: Database, tmp_path: Path, outcome: str
) -> None:
    """As by a process that is killed after the commit."""
    witness = Witness()
    unstuck = await start_spooling(database, tmp_path, observers=[witness])
    job = await add_busy(database)
    entry = await spool_end(database, unstuck, job, outcome=outcome)
    await unstuck.sweep()
    told = await read_ledger(database)
    await put_entry(database, unstuck, entry)
    await unstuck.sweep()
    assert await read_ledger(database) == told
    assert await read_spool(database, unstuck.settings) == []
    assert len(witness.heard("on_attempt_ended")) == 1


async def test_two_drains_at_once_settle_each_entry_once(
    database: Database, tmp_path: Path
) -> None:
    witness = Witness()
    unstuck = await start_spooling(database, tmp_path, observers=[witness])
    jobs = [await add_busy(database) for _ in range(10)]
    for job in jobs:
        await spool_end(database, unstuck, job)
    await asyncio.gather(unstuck.sweep(), run(unstuck, nothing), unstuck.sweep())
    assert [(await get_job(database, job)).status for job in jobs] == [Status.Failed] * 10
    assert sorted(e.record_id for e in witness.heard("on_attempt_ended")) == sorted(map(str, jobs))
    assert {kind for _, kind, _, _ in await read_ledger(database)} == {"attempt"}
    assert len(await read_ledger(database)) == 10


async def test_two_databases_with_one_spool_keep_their_entries_apart(
    database: Database, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    async with sqlite_database(tmp_path / "other") as other:
        here = await start_spooling(database, tmp_path / "spool")
        there = await start_spooling(other, tmp_path / "spool")
        mine, theirs = await add_busy(database), await add_busy(other)
        await spool_end(database, here, mine, error="of here")
        await spool_end(other, there, theirs, error="of there")
        await here.sweep()
        await run(here, nothing)
        assert (await get_job(database, mine)).error == "of here"
        assert (await get_job(other, theirs)).status is Status.Processing
        assert [entry.error for entry in await read_spool(other, there.settings)] == ["of there"]
        await there.sweep()
        assert (await get_job(other, theirs)).error == "of there"


async def test_an_entry_of_a_workflow_that_is_not_known_here_waits_for_who_knows_it(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start_spooling(database, tmp_path)
    job = await add_busy(database)
    await spool_end(database, unstuck, job)
    stranger = Unstuck(database.sessions, unstuck.settings, Registry())
    namesake = Registry()
    namesake.register(Job, name="others")  # of the same model and table
    for registry in (stranger.registry, namesake):
        await Unstuck(database.sessions, unstuck.settings, registry).sweep()
    assert (await get_job(database, job)).status is Status.Processing
    assert len(await read_spool(database, unstuck.settings)) == 1
    assert said_at(caplog, logging.ERROR) == []
    await unstuck.sweep()
    assert (await get_job(database, job)).status is Status.Failed


async def test_an_end_whose_status_is_not_known_here_waits_for_who_knows_it(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sweep may have been told less than the loop: `completed` is only for the latter."""
    unstuck = await start_spooling(database, tmp_path)
    job = await add_busy(database)
    await spool_end(database, unstuck, job, outcome="completed", error=None)
    knows_less = Registry()
    knows_less.register(Job, name="jobs", completed=None)
    await Unstuck(database.sessions, unstuck.settings, knows_less).sweep()
    assert (await get_job(database, job)).status is Status.Processing
    assert said_at(caplog, logging.ERROR) == []  # it was not tried with no status at all
    await unstuck.sweep()
    assert (await get_job(database, job)).status is Status.Completed


@every_kind_of_key
async def test_a_record_is_found_again_whatever_its_key(
    database: Database, tmp_path: Path, model: Any, given: list[dict[str, Any]], texts: list[str]
) -> None:
    await prepare(database, *(model(status=State.queued, **key) for key in given))
    source = Unreliable(database.sessions)
    settings = ZombieSettings(spool_url=str(tmp_path), **AT_ONCE)
    unstuck = Unstuck(source, settings, Registry())
    with failing_after_the_claim(database, source):
        result = await unstuck.run_job_loop(
            model, State, "queued", "processing", "completed", "failed", nothing, 10
        )
    assert result.spooled == 3
    assert [entry.record_id for entry in await read_spool(database, settings)] == texts
    source.mend()
    await unstuck.sweep()
    assert [record.status for record in await read(database, model)] == [State.failed] * 3
    assert await read_claims(database) == []


SPOOL_AND_WAIT = """
import asyncio, sys
from pathlib import Path
from tests.database import Database
from tests.looping import run
from tests.outages import failing_after_the_claim, nothing, start_unreliable

async def main(url, spool):
    database = Database(url)
    unstuck, source = await start_unreliable(database, Path(spool))
    with failing_after_the_claim(database, source):
        result = await run(unstuck, nothing)
    print(result.spooled, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


def spool_and_be_killed(database: Database, root: Path) -> None:
    worker = [sys.executable, "-c", SPOOL_AND_WAIT, database.url, str(root)]
    with subprocess.Popen(worker, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        process.send_signal(signal.SIGKILL)


async def test_what_was_spooled_outlives_the_process_that_is_killed(
    database: Database, tmp_path: Path
) -> None:
    unstuck = await start_spooling(database, tmp_path / "spool")
    job = await queue_job(database)
    await asyncio.to_thread(spool_and_be_killed, database, tmp_path / "spool")
    assert (await get_job(database, job)).status is Status.Processing
    await unstuck.sweep()
    done = await get_job(database, job)
    assert (done.status, done.error) == (Status.Failed, "Failed to obtain processing session")
    assert await read_claims(database) == []
