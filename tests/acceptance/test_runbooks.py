"""Every SQL block of the runbooks, run by hand on a real PostgreSQL, with its effect."""

import re
import uuid
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import make_url

from tests.database import Database
from unstuck import metadata

RUNBOOK = Path(__file__).parents[2] / "runbooks" / "README.md"
IDENTIFY, VERIFY, ACT, WATCH, STORY, YESTERDAY, HELD = re.findall(
    r"```sql\n(.*?)```", RUNBOOK.read_text(), re.DOTALL
)
TABLE = """
    CREATE TYPE pagestatus AS ENUM ('Queued', 'Processing', 'Complete', 'Error');
    CREATE TABLE pages (id uuid PRIMARY KEY, page_processing_status pagestatus,
                        page_processing_error text, updated_at timestamptz)
"""
STUCK, FRESH, DONE = (uuid.UUID(int=n) for n in (1, 2, 3))


@pytest.fixture
async def psql(postgres: Database) -> Any:
    await postgres.create(metadata)
    url = make_url(postgres.url).set(drivername="postgresql")
    connection = await asyncpg.connect(url.render_as_string(hide_password=False))
    await connection.execute(TABLE)
    await connection.executemany(
        "INSERT INTO pages VALUES ($1, $2, NULL, now() - $3 * interval '1 minute')",
        [(STUCK, "Processing", 120), (FRESH, "Processing", 5), (DONE, "Complete", 120)],
    )
    yield connection
    await connection.close()


async def test_only_the_stuck_record_is_found(psql: Any) -> None:
    assert [row["id"] for row in await psql.fetch(IDENTIFY)] == [STUCK]


async def test_a_record_that_somebody_works_on_is_not_free(psql: Any, postgres: Database) -> None:
    free = VERIFY.split("BEGIN;")[1].split("ROLLBACK;")[0]
    assert [row["id"] for row in await psql.fetch(free)] == [STUCK]
    async with postgres.engine.begin() as worker:
        await worker.exec_driver_sql("SELECT id FROM pages FOR UPDATE")
        assert await psql.fetch(free) == []
    await psql.execute(VERIFY)


async def test_a_reset_by_hand_takes_the_claim_and_leaves_a_ledger_row(psql: Any) -> None:
    await psql.execute(
        "INSERT INTO zombie_claims (workflow, record_id, token, worker_id) VALUES "
        f"('Page.page_processing_status', '{STUCK}', gen_random_uuid(), 'w')"
    )
    await psql.execute(ACT)
    status = dict(await psql.fetch("SELECT id, page_processing_status::text FROM pages"))
    assert status == {STUCK: "Queued", FRESH: "Processing", DONE: "Complete"}
    assert await psql.fetchval("SELECT count(*) FROM zombie_claims") == 0
    story = await psql.fetch(STORY.replace(str(uuid.UUID(int=0)), str(STUCK)))
    assert [row["kind"] for row in story] == ["reset_by_hand"]
    assert dict(await psql.fetch(WATCH.replace(", min(updated_at) AS oldest", "")))["Queued"] == 1


async def test_yesterday_and_the_held_are_listed(psql: Any) -> None:
    await psql.execute(
        "INSERT INTO zombie_events (at, workflow, record_id, kind, cause, outcome) VALUES "
        "(date_trunc('day', now()) - interval '1 hour', 'w', '1', 'zombie', 'aged', 'held'),"
        "(date_trunc('day', now()), 'w', '2', 'zombie', 'aged', 'held');"
        "INSERT INTO zombie_records (workflow, record_id, held_at, held_reason) VALUES "
        "('w', '1', now(), 'not reapable'), ('w', '2', NULL, NULL)"
    )
    assert [tuple(row) for row in await psql.fetch(YESTERDAY)] == [("w", "aged", "held", 1)]
    assert [row["record_id"] for row in await psql.fetch(HELD)] == ["1"]
