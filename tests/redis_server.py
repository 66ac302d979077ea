"""A Redis of the tests' own: Debian's redis-server on loopback, with a password, gone with them."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from tools.embedded_postgres import _free_port

PASSWORD = "s3cret"

# Its pipe closes without a word when the tests are killed: then the server must not stay.
_JANITOR = 'read -r _ || kill -KILL "$1"'


@dataclass
class RedisServer:
    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def client(self) -> Any:
        return import_module("redis.asyncio").from_url(self.url, decode_responses=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Empty, and ready to answer."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="unstuck-redis-") as folder:
        server = _start(program, folder)
        janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "janitor", str(server.process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests
        )
        try:
            yield server
        finally:
            server.kill()
            assert server.process.stdout is not None
            server.process.stdout.close()
            janitor.communicate(b"all is well\n")


def _start(program: str, folder: str) -> RedisServer:
    said = ""
    for _ in range(5):  # someone else may take the port
        port = _free_port()
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--save", "", "--appendonly", "no", "--requirepass", PASSWORD]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if "Ready to accept connections" in line:
                return RedisServer(port, process)
        process.wait()
        process.stdout.close()
    raise RuntimeError(f"redis-server does not start:\n{said}")
