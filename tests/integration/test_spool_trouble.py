"""A spool that is corrupt, full or not there is told, and stops neither loop nor sweep."""

import logging
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.jobs import HOUR, Job, Status, ago, get_job, start
from tests.lookup import rewrite
from tests.looping import queue_job, queue_jobs, run
from tests.outages import (
    AT_ONCE,
    add_busy,
    alerts,
    failing_after_the_claim,
    make_entry,
    nothing,
    put_entry,
    read_spool,
    said_at,
    spool_end,
    spool_of,
    start_spooling,
    start_unreliable,
)
from unstuck import Unstuck
from unstuck.db import spool
from unstuck.db.spool import FolderSpool
from unstuck.tables import claims


async def test_an_end_that_the_database_refuses_is_told_and_holds_up_no_other(
    postgres: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start_spooling(postgres, tmp_path)
    await postgres.execute("ALTER TABLE jobs ADD CHECK (error <> 'poison')")
    jobs = [await add_busy(postgres) for _ in range(3)]
    await spool_end(postgres, unstuck, jobs[0], error="poison")
    for job in jobs[1:]:
        await spool_end(postgres, unstuck, job)
    await run(unstuck, nothing)
    assert (await get_job(postgres, jobs[0])).status is Status.Processing
    assert [(await get_job(postgres, job)).status for job in jobs[1:]] == [Status.Failed] * 2
    (said,) = said_at(caplog, logging.ERROR)
    assert said.startswith(f"The spooled end of jobs {jobs[0]} is refused: ")
    assert len(await read_spool(postgres, unstuck.settings)) == 1


@pytest.mark.parametrize(
    "values", [{"record_id": "seven"}, {"outcome": "exploded"}], ids=["no key", "no outcome"]
)
async def test_an_entry_that_makes_no_sense_is_told_and_holds_up_no_other(
    database: Database, tmp_path: Path, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start_spooling(database, tmp_path)
    job = await add_busy(database)
    await spool_end(database, unstuck, job)
    await put_entry(database, unstuck, make_entry(**{"record_id": "1", **values}))
    result = await run(unstuck, nothing)
    assert result.error is None
    assert (await get_job(database, job)).status is Status.Failed
    (said,) = said_at(caplog, logging.ERROR)
    assert "is refused" in said


async def test_a_record_that_is_locked_is_written_by_a_later_drain(
    postgres: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start_spooling(postgres, tmp_path, settings={"lock_timeout_seconds": 0.1})
    job = await add_busy(postgres)
    await spool_end(postgres, unstuck, job)
    async with postgres.engine.begin() as host:
        await host.exec_driver_sql("SELECT 1 FROM jobs FOR UPDATE")
        await run(unstuck, nothing)
        (said,) = said_at(caplog, logging.ERROR)
        assert "The spool could not be drained" in said
        assert "lock timeout" in said
    await run(unstuck, nothing)
    assert (await get_job(postgres, job)).status is Status.Failed


async def test_a_corrupt_entry_is_told_and_stops_neither_loop_nor_sweep(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start_spooling(database, tmp_path)
    stuck, queued = await add_busy(database), await queue_job(database)
    await spool_end(database, unstuck, stuck)
    found = spool_of(database, unstuck.settings)
    assert isinstance(found, FolderSpool)
    (found.folder / "broken.json").write_text('{"workflow": "jo')
    assert (await run(unstuck, nothing)).completed == 1
    (said,) = said_at(caplog, logging.ERROR)
    assert "broken.json cannot be read and is set aside" in said
    assert (await get_job(database, stuck)).status is Status.Failed
    assert (await get_job(database, queued)).status is Status.Completed
    await unstuck.sweep()
    assert len(said_at(caplog, logging.ERROR)) == 1


async def test_a_spool_that_cannot_be_written_is_told_and_the_loop_goes_on(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no folder")
    unstuck, source = await start_unreliable(database, in_the_way)
    first, second = await queue_jobs(database, 2)
    with failing_after_the_claim(database, source, times=4):
        result = await run(unstuck, nothing, order_by_column=Job.id)
    assert (result.stuck, result.completed) == (1, 1)
    said, why = alerts(caplog)
    assert said.startswith(f"ZOMBIE RECORD ALERT: Job ID {first} stuck in Processing")
    assert "cannot be written" in why
    assert why.endswith(f"Job ID {first} was failed: Failed to obtain processing session")
    assert (await get_job(database, second)).status is Status.Completed
    assert (await unstuck.sweep()).errors == []


async def test_a_record_that_could_be_neither_written_nor_spooled_is_found_by_the_sweep(
    database: Database, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no folder")
    unstuck, source = await start_unreliable(database, in_the_way)
    job = await queue_job(database)
    with failing_after_the_claim(database, source, times=4):
        assert (await run(unstuck, nothing)).stuck == 1
    await rewrite(database, claims, claimed_at=ago(2 * HOUR))
    assert (await unstuck.sweep()).left_processing == 1
    assert (await get_job(database, job)).status is Status.Queued


async def test_a_full_spool_is_told_and_the_loop_goes_on(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(spool, "MOST_ENTRIES", 1)
    unstuck, source = await start_unreliable(database, tmp_path)
    await queue_jobs(database, 3)
    with failing_after_the_claim(database, source, times=8):
        result = await run(unstuck, nothing, order_by_column=Job.id)
    assert (result.spooled, result.stuck, result.completed) == (1, 1, 1)
    assert "is full: it holds 1 entries" in alerts(caplog)[-1]


async def test_a_place_for_a_spool_that_does_not_exist_ends_no_loop(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", refuse)
    monkeypatch.delenv("ZOMBIE_SPOOL_URL", raising=False)
    prepared = await start(database, settings={**AT_ONCE, "_env_file": None})
    _, source = await start_unreliable(database, Path("unused"))
    unstuck = Unstuck(source, prepared.settings, prepared.registry)
    await queue_jobs(database, 2)
    with failing_after_the_claim(database, source, times=4):
        result = await run(unstuck, nothing)
    assert (result.stuck, result.completed) == (1, 1)
    assert "set ZOMBIE_SPOOL_URL" in alerts(caplog)[-1]


REFUSE = {
    "postgresql": [
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'nothing may fail here'; END $$",
        "CREATE TRIGGER refuse BEFORE UPDATE ON jobs FOR EACH ROW "
        "WHEN (NEW.status = 'Failed') EXECUTE FUNCTION refuse()",
    ],
    "sqlite": [
        "CREATE TRIGGER refuse BEFORE UPDATE ON jobs WHEN NEW.status = 'Failed' "
        "BEGIN SELECT RAISE(ABORT, 'nothing may fail here'); END",
    ],
}


async def test_an_end_that_a_trigger_of_the_host_refuses_is_an_alert_and_is_not_spooled_in_vain(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start_spooling(database, tmp_path)
    for statement in REFUSE[database.dialect]:
        await database.execute(statement)
    first, _ = await queue_jobs(database, 2)

    async def work(item_id: int, session: AsyncSession) -> None:
        if item_id == first:
            raise ValueError("no such page")

    result = await run(unstuck, work)
    assert (result.stuck, result.completed, result.spooled) == (1, 1, 0)
    assert alerts(caplog) == [
        f"ZOMBIE RECORD ALERT: Job ID {first} stuck in Processing - its end was refused"
    ]
    assert f"Job ID {first}: nothing may fail here; it was failed: no such page" in caplog.text
    assert await read_spool(database, unstuck.settings) == []
