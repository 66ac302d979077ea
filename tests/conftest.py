"""Fixtures that every test may use, and `--no-skips`."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.database import Database, Servers, postgres_database, sqlite_database
from tools.embedded_postgres import EmbeddedPostgres

# A SQLAlchemy URL (postgresql+asyncpg://…) of a server on which databases may be created. It then
# takes the place of the embedded ones; only loopback is reachable from a test.
SERVER_URL = os.environ.get("UNSTUCK_TEST_DATABASE_URL")
# Which of the embedded ones: each makes a test of the database run once more.
VERSIONS = os.environ.get("UNSTUCK_TEST_POSTGRES", "16 18").split()
POSTGRES = ["postgresql"] if SERVER_URL else [f"postgresql-{version}" for version in VERSIONS]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with Servers() as servers:
        yield servers


@pytest.fixture(autouse=True)
def _own_spool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What one test could not write is not for the next to drain."""
    monkeypatch.setenv("ZOMBIE_SPOOL_URL", str(tmp_path / "spool"))


@pytest.fixture(params=[*POSTGRES, "sqlite"])
async def database(
    request: pytest.FixtureRequest, servers: Servers, tmp_path: Path
) -> AsyncIterator[Database]:
    """An empty database of the test's own, once on each kind."""
    async with _open(request.param, servers, tmp_path) as database:
        yield database


@pytest.fixture(params=POSTGRES)
async def postgres(
    request: pytest.FixtureRequest, servers: Servers, tmp_path: Path
) -> AsyncIterator[Database]:
    """`database`, for what SQLite does not have."""
    async with _open(request.param, servers, tmp_path) as database:
        yield database


@pytest.fixture
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, to kill and start again."""
    with EmbeddedPostgres(18) as server:
        yield server


def _open(kind: str, servers: Servers, tmp_path: Path) -> AbstractAsyncContextManager[Database]:
    if kind == "sqlite":
        return sqlite_database(tmp_path)
    if SERVER_URL:
        return postgres_database(SERVER_URL)
    server = servers.get(16 if kind == "postgresql-16" else 18)
    return postgres_database(server.url(), server)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if any test was skipped")


def _skips(config: pytest.Config) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("skipped", []) if reporter else []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--no-skips") and _skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("--no-skips"):
        for report in _skips(config):
            terminalreporter.write_line(f"SKIPPED, and --no-skips: {report.nodeid}", red=True)
