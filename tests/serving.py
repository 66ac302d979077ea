"""The host application in a process of its own, served by uvicorn, and gone when its test is."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import httpx

ROOT = Path(__file__).parent.parent
PATIENCE = 30.0  # seconds for what happens in another process
PROMPT = 10.0  # seconds for an application to end when it is told to
SERVE = [sys.executable, "-m", "uvicorn", "tests.hostapp.main:app", "--port=0", "--no-access-log"]

# Its pipe closes without a word when the tests are killed: then the application must not stay.
JANITOR = 'read -r _ || kill -KILL "$1"'

Answer = TypeVar("Answer")


async def eventually(probe: Callable[[], Awaitable[Answer | None]]) -> Answer:
    """The first true answer. Another process gives no signal, so its effects are asked for."""
    answer = None
    try:
        async with asyncio.timeout(PATIENCE):
            while not (answer := await probe()):  # noqa: ASYNC110 - no Event crosses processes
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"The last answer in {PATIENCE:g} s was {answer!r}") from None
    return answer


@dataclass
class App:
    process: subprocess.Popen[bytes]
    log_file: Path
    client: httpx.AsyncClient

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    async def count_logged(self, words: str) -> int:
        return self.log.count(words)

    async def address(self) -> str | None:
        """Where it listens; uvicorn says so once the lifespan has begun."""
        assert self.process.poll() is None, "The application did not start"
        found = re.search(r"Uvicorn running on (http://\S+)", self.log)
        return found[1] if found else None

    async def terminate(self) -> int:
        """As a deploy would; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, PROMPT)


@asynccontextmanager
async def serve(
    database_url: str,
    log_file: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    /,
    **settings: object,
) -> AsyncIterator[App]:
    """Ready to answer; sweeping every second unless told otherwise."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient())
        process = _launch({**environment, "DATABASE_URL": database_url}, log_file, settings)
        stack.callback(_bury, process)
        watch(process.pid, stack)
        app = App(process, log_file, client)
        try:
            client.base_url = httpx.URL(await eventually(app.address))
            yield app
            if process.poll() is None:
                await app.terminate()
        except BaseException as error:
            error.add_note(f"The application said last:\n{app.log[-5000:]}")
            raise


def _launch(
    environment: dict[str, str], log_file: Path, settings: dict[str, object]
) -> subprocess.Popen[bytes]:
    said = {"CLEANUP_INTERVAL_MINUTES": 1 / 60, "FIRST_SWEEP_SECONDS": 0, **settings}
    told = {f"ZOMBIE_{name}": str(value) for name, value in said.items()}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ZOMBIE_")}
    everything = {**inherited, **told, **environment}
    with log_file.open("wb") as log:
        return subprocess.Popen(
            SERVE, cwd=ROOT, env=everything, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _bury(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def watch(process_id: int, stack: AsyncExitStack) -> None:
    """Should the tests be killed, the process is as well."""
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", JANITOR, "janitor", str(process_id)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the tests
    )
    stack.callback(janitor.communicate, b"all is well\n")
