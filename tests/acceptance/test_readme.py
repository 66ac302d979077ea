"""The README's own code, run as a user would run it."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import text

from tests.database import Database
from unstuck import Unstuck, configure, registry
from unstuck.events import SweepReport

README = Path(__file__).parents[2] / "README.md"
QUICKSTART, LOOP, ON_CALL = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


class Watch:
    def __init__(self) -> None:
        self.first: asyncio.Future[SweepReport] = asyncio.get_running_loop().create_future()

    def on_sweep_finished(self, report: SweepReport) -> None:
        if not self.first.done():
            self.first.set_result(report)


@pytest.fixture
def quickstart(database: Database, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The module that a user would write, on this database."""
    monkeypatch.setenv("DATABASE_URL", database.url)
    monkeypatch.setenv("ZOMBIE_FIRST_SWEEP_SECONDS", "0")
    monkeypatch.setattr(registry, "_workflows", {})
    module: dict[str, Any] = {"__name__": "quickstart"}
    exec(compile(QUICKSTART, "README.md", "exec"), module)
    return module


async def test_the_quickstart_brings_a_stuck_page_back(
    database: Database, quickstart: dict[str, Any]
) -> None:
    await database.create(quickstart["Base"].metadata)
    page, status = quickstart["Page"], quickstart["PageStatus"]
    async with database.sessions.begin() as session:
        session.add(page(page_processing_status=status.Processing))
    past = (
        "datetime('now', '-2 hours')" if database.dialect == "sqlite" else "now() - interval '2h'"
    )
    await database.execute(f"UPDATE pages SET updated_at = {past}")
    watch = Watch()
    configure(observers=[watch])
    app: FastAPI = quickstart["app"]
    async with app.router.lifespan_context(app):
        report = await asyncio.wait_for(watch.first, timeout=30)
    assert report.errors == []
    [(error,)] = await database.execute(
        "SELECT page_processing_error FROM pages WHERE page_processing_status = 'Queued'"
    )
    assert error.startswith("Auto-reset from stuck Processing state: strike 1 of 3")


async def test_the_example_for_the_person_on_call_runs(
    database: Database, quickstart: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    page, status = quickstart["Page"], quickstart["PageStatus"]
    registry.get(page)  # the name that the example uses is the one that it was given
    await database.create(quickstart["Base"].metadata)
    unstuck = Unstuck(database.sessions)
    await unstuck.create_tables()
    async with database.sessions.begin() as session:
        held = page(page_processing_status=status.Processing)
        session.add(held)
        await session.flush()
        record_id = str(held.id)
    async with database.engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO zombie_records (workflow, record_id, held_at) "
                "VALUES ('Page.page_processing_status', :id, CURRENT_TIMESTAMP)"
            ),
            {"id": record_id},
        )
    module: dict[str, Any] = {}
    exec(compile(ON_CALL.replace("0b9…", record_id), "README.md", "exec"), module)
    await module["on_call"](unstuck)
    assert "released" in capsys.readouterr().out


async def test_the_loop_of_the_readme_completes_a_page(
    database: Database, quickstart: dict[str, Any]
) -> None:
    await database.create(quickstart["Base"].metadata)
    exec(compile(LOOP, "README.md", "exec"), quickstart)
    page, status = quickstart["Page"], quickstart["PageStatus"]
    await configure(database.sessions).create_tables()
    async with database.sessions.begin() as session:
        session.add(page(page_processing_status=status.Queued))
    await quickstart["process_pages"]()
    [(done,)] = await database.execute("SELECT page_processing_status FROM pages")
    assert done == "Complete"
