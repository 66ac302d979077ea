"""The functions that need no object: they share one, made from what was said last."""

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database
from tests.jobs import Status, add_job, ago, get_job, start
from tests.scheduling import Reports
from unstuck import (
    Registry,
    Unstuck,
    ZombieSettings,
    cleanup_zombie_records,
    configure,
    defaults,
    setup_zombie_cleanup_scheduler,
)


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults._Default, "instance", None)
    monkeypatch.setattr(defaults._Default, "parameters", {})
    for name in ("DATABASE_URL", "ZOMBIE_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ZOMBIE_FIRST_SWEEP_SECONDS", "0")


@pytest.fixture
async def registry(database: Database) -> Registry:
    return (await start(database)).registry


async def test_configure_says_what_the_functions_work_with(
    database: Database, registry: Registry
) -> None:
    settings = ZombieSettings(stuck_threshold_minutes=90)
    unstuck = configure(database.sessions, settings, registry)
    assert isinstance(unstuck, Unstuck)
    assert defaults.default() is unstuck
    slow = await add_job(database, updated_at=ago(80 * 60))
    stuck = await add_job(database, updated_at=ago(100 * 60))
    assert await cleanup_zombie_records() == 1
    assert (await get_job(database, slow)).status is Status.Processing
    assert (await get_job(database, stuck)).status is Status.Queued


@pytest.mark.parametrize("variable", ["ZOMBIE_DATABASE_URL", "DATABASE_URL"])
async def test_no_argument_at_all_is_enough(
    database: Database, registry: Registry, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler and an engine of its own; the URL is as sync as other tools like it."""
    monkeypatch.setenv(variable, database.url.replace("+asyncpg", "").replace("+aiosqlite", ""))
    reports = Reports()
    configure(registry=registry, observers=[reports])
    await add_job(database)
    handle = setup_zombie_cleanup_scheduler()
    assert handle.scheduler is not None
    assert handle.scheduler.running
    assert (await reports.next()).left_processing == 1
    await handle.shutdown()


async def test_the_own_variable_goes_before_the_common_one(
    database: Database, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOMBIE_DATABASE_URL", database.url)
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nowhere")
    unstuck = configure(registry=registry)
    await add_job(database)
    assert await cleanup_zombie_records() == 1
    await unstuck.close()


async def test_what_is_set_up_is_what_the_functions_use(
    database: Database, registry: Registry
) -> None:
    settings = ZombieSettings(cleanup_enabled=False)
    setup_zombie_cleanup_scheduler(
        session_factory=database.sessions, settings=settings, registry=registry
    )
    assert defaults.default().settings is settings
    await add_job(database)
    assert await cleanup_zombie_records() == 1


async def test_set_up_keeps_the_observers_and_settings_that_were_configured(
    database: Database, registry: Registry
) -> None:
    def get_session() -> AsyncSession:
        return database.sessions()

    reports, settings = Reports(), ZombieSettings(cleanup_interval_minutes=7)
    configure(settings=settings, registry=registry, observers=[reports])
    handle = setup_zombie_cleanup_scheduler(session_factory=get_session)
    assert handle.settings is settings
    assert (await reports.next()).errors == []
    await handle.shutdown()
