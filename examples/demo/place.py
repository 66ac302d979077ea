"""Where the demo takes place: a folder and a database of its own, both gone at the end."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.embedded_postgres import EmbeddedPostgres

SQLITE, POSTGRES = "sqlite", "postgres"
SESSION_ATTEMPTS = 3

# Short times, so that a minute is enough; what is not said here is as it comes. A worker counts as
# dead after three seconds without a beat; after two sessions that it could not have it pauses.
SETTINGS = {
    "STUCK_THRESHOLD_MINUTES": 3 / 60,
    "CLEANUP_INTERVAL_MINUTES": 1.5 / 60,
    "CLEANUP_JITTER_SECONDS": 0,
    "FIRST_SWEEP_SECONDS": 1,
    "BACKOFF_BASE_SECONDS": 1,
    "BACKOFF_MAX_SECONDS": 2,
    "SESSION_ATTEMPTS": SESSION_ATTEMPTS,
    "SESSION_WAIT_SECONDS": 0.2,
    "SESSION_JITTER_SECONDS": 0.1,
    "BREAKER_FAILURES": 2,
    "BREAKER_RESET_SECONDS": 1,
}


@dataclass(frozen=True)
class Place:
    folder: Path
    database: str
    url: str

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the application is told."""
        said = {f"ZOMBIE_{name}": str(value) for name, value in SETTINGS.items()}
        return {**said, "DATABASE_URL": self.url, "ZOMBIE_SPOOL_URL": str(self.folder / "spool")}


@contextmanager
def open_place(database: str) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="unstuck-demo-") as name:
        folder = Path(name)
        if database == SQLITE:
            yield Place(folder, database, f"sqlite+aiosqlite:///{folder / 'invoices.db'}")
            return
        with EmbeddedPostgres() as server:
            yield Place(folder, database, server.url())
