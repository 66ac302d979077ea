"""The host application, started for real: nobody calls anything, and stuck records come back."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.conftest import POSTGRES
from tests.database import Database
from tests.serving import App, eventually, serve
from tools.embedded_postgres import EmbeddedPostgres

COLUMNS = ("page_processing", "content", "index")
SWEPT = "executed successfully"
CLEAN_EXITS = (0, -15)  # newer versions of uvicorn pass the signal on after an orderly end
NAIVE_UTC = {
    "postgresql": "now() AT TIME ZONE 'UTC' - make_interval(mins => {minutes})",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now', '-{minutes} minutes')",
}
everywhere = pytest.mark.parametrize("database", [POSTGRES[-1], "sqlite"], indirect=True)


async def add_page(app: App, url: str) -> None:
    (await app.client.post("/pages", params={"url": url})).raise_for_status()


async def get_stuck(
    database: Database, like: str, *columns: str, minutes: int = 120, table: str = "pages"
) -> None:
    """A worker took these up and died that long ago."""
    changes = [f"{column} = 'Processing'" for column in columns]
    changes.append(f"updated_at = {NAIVE_UTC[database.dialect].format(minutes=minutes)}")
    await database.execute(f"UPDATE {table} SET {', '.join(changes)} WHERE url LIKE '{like}'")


async def statuses(app: App, column: str) -> dict[str, str | None]:
    pages = (await app.client.get("/pages")).raise_for_status().json()
    return {page["url"]: page[column] for page in pages}


async def until_queued(app: App, url: str, column: str = "page_processing_status") -> None:
    async def is_queued() -> bool | None:
        return (await statuses(app, column))[url] == "Queued"

    await eventually(is_queued)


async def sweep_again(app: App) -> None:
    """A whole sweep that began after now: the second to end from now on."""
    before = await app.count_logged(SWEPT)

    async def two_more() -> bool | None:
        return await app.count_logged(SWEPT) >= before + 2

    await eventually(two_more)


@everywhere
async def test_a_stuck_page_comes_back_and_a_fresh_one_is_not_touched(
    database: Database, tmp_path: Path
) -> None:
    async with serve(database.url, tmp_path / "log") as app:
        await add_page(app, "stuck")
        await add_page(app, "fresh")
        await get_stuck(database, "fresh", "page_processing_status", minutes=5)
        read = "SELECT page_processing_status, page_processing_error, updated_at FROM pages"
        fresh = await database.execute(f"{read} WHERE url = 'fresh'")
        await get_stuck(database, "stuck", "page_processing_status")
        await until_queued(app, "stuck")
        await sweep_again(app)
        assert await database.execute(f"{read} WHERE url = 'fresh'") == fresh
        (stuck,) = await database.execute(f"{read} WHERE url = 'stuck'")
        assert stuck.page_processing_status == "Queued"
        assert stuck.page_processing_error.startswith(
            "Auto-reset from stuck Processing state: strike 1 of 3"
        )
        ledger = await database.execute("SELECT workflow, outcome, cause FROM zombie_events")
        assert ledger == [("Page.page_processing_status", "requeued", "aged")]


@everywhere
async def test_each_of_three_status_columns_recovers_by_itself(
    database: Database, tmp_path: Path
) -> None:
    async with serve(database.url, tmp_path / "log") as app:
        for column in COLUMNS:
            await add_page(app, column)
        for column in COLUMNS:
            await get_stuck(database, column, f"{column}_status")
        for column in COLUMNS:
            await until_queued(app, column, f"{column}_status")
        errors = ", ".join(f"{column}_error IS NOT NULL" for column in COLUMNS)
        for n, column in enumerate(COLUMNS):
            (row,) = await database.execute(f"SELECT {errors} FROM pages WHERE url = '{column}'")
            assert [bool(cell) for cell in row] == [at == n for at in range(3)]


@everywhere
async def test_three_status_columns_stuck_in_one_page_all_recover(
    database: Database, tmp_path: Path
) -> None:
    """They share one updated_at: the reset of one must not make the others look alive."""
    async with serve(database.url, tmp_path / "log") as app:
        await add_page(app, "all")
        await get_stuck(database, "all", *(f"{column}_status" for column in COLUMNS))
        await sweep_again(app)
        assert [(await statuses(app, f"{c}_status"))["all"] for c in COLUMNS] == ["Queued"] * 3
        assert len(await database.execute("SELECT id FROM zombie_events")) == 3


@everywhere
async def test_a_stuck_sitemap_file_comes_back(database: Database, tmp_path: Path) -> None:
    async with serve(database.url, tmp_path / "log"):
        await database.execute(
            "INSERT INTO sitemap_files (id, url, status, updated_at) VALUES "
            "('1f0e4b62c1b14bd9a3cf2c1d63b7b0aa', 'sitemap.xml', 'Queued', CURRENT_TIMESTAMP)"
        )
        await get_stuck(database, "sitemap.xml", "status", table="sitemap_files")

        async def error() -> Any:
            (row,) = await database.execute("SELECT status, error FROM sitemap_files")
            return row.error if row.status == "Queued" else None

        assert (await eventually(error)).startswith("Auto-reset")


@everywhere
async def test_two_replicas_double_nothing(database: Database, tmp_path: Path) -> None:
    pages = [f"page {n}" for n in range(20)]
    async with (
        serve(database.url, tmp_path / "one.log") as one,
        serve(database.url, tmp_path / "two.log") as two,
    ):
        for page in pages:
            await add_page(one, page)
        await get_stuck(database, "page %", "page_processing_status")
        for page in pages:
            await until_queued(two, page)
        await sweep_again(one)
        await sweep_again(two)
    rows = await database.execute(
        "SELECT count(*), count(DISTINCT record_id), sum(zombie_count) FROM zombie_events"
    )
    assert rows == [(20, 20, 20)]


async def test_the_application_answers_through_an_outage_and_the_sweep_resumes(
    own_postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    database = Database(own_postgres.url())
    async with serve(database.url, tmp_path / "log") as app:
        await add_page(app, "stuck")
        own_postgres.kill()
        await eventually(lambda: app.count_logged("Zombie sweep of Page.index_status failed: "))
        assert (await app.client.get("/health")).json() == {"status": "ok"}
        assert (await app.client.get("/pages")).status_code == 500
        assert "postgres@" not in app.log
        own_postgres.start()
        await database.dispose()
        await get_stuck(database, "stuck", "page_processing_status")
        await until_queued(app, "stuck")
    await database.dispose()


async def test_sigterm_ends_the_application_during_an_outage(
    own_postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    async with serve(own_postgres.url(), tmp_path / "log") as app:
        own_postgres.kill()
        await eventually(lambda: app.count_logged("Zombie sweep of Page.index_status failed: "))
        assert await app.terminate() in CLEAN_EXITS
        assert "Application shutdown complete." in app.log


@everywhere
async def test_sigterm_ends_the_application_promptly_and_cleanly(
    database: Database, tmp_path: Path
) -> None:
    async with serve(database.url, tmp_path / "log", CLEANUP_INTERVAL_MINUTES=1) as app:
        await eventually(lambda: app.count_logged(SWEPT))
        assert await app.terminate() in CLEAN_EXITS
        assert "Application shutdown complete." in app.log
        for word in ("Traceback", "ERROR", "WARNING", "was never"):
            assert word not in app.log


@pytest.mark.parametrize("postgres", POSTGRES[-1:], indirect=True)
async def test_sigterm_ends_a_sweep_that_waits_for_a_lock(
    postgres: Database, tmp_path: Path
) -> None:
    patient = {"CLEANUP_INTERVAL_MINUTES": 2, "LOCK_TIMEOUT_SECONDS": 60, "FIRST_SWEEP_SECONDS": 1}

    async def somebody_waits() -> int:
        ((waiting,),) = await postgres.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return int(waiting)

    async with (
        serve(postgres.url, tmp_path / "log", **patient) as app,
        postgres.engine.begin() as connection,
    ):
        await connection.execute(text("LOCK TABLE pages IN ACCESS EXCLUSIVE MODE"))
        await eventually(somebody_waits)
        assert await app.terminate() in CLEAN_EXITS
        assert "Application shutdown complete." in app.log
        assert "Traceback" not in app.log
