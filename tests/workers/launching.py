"""The test's end of a worker: starts it, hears of it, kills it, freezes it, and lets none stay.

Workers are forked off a server that has imported everything they need: there are many of them.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.interleaving import until
from tests.serving import PATIENCE, watch
from tests.workers.orders import Orders
from tests.workers.process import work

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.workers.process"])


@dataclass
class Worker:
    process: BaseProcess
    wire: Connection
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def log(self) -> str:
        file = self.folder / f"{self.pid}.log"
        return file.read_text() if file.exists() else ""

    async def hear(self) -> dict[str, Any]:
        """Its next words."""
        assert await asyncio.to_thread(self.wire.poll, PATIENCE), "The worker says nothing"
        words: dict[str, Any] = self.wire.recv()
        return words

    async def until_frozen(self) -> None:
        """It has come to its step, whatever it has said on the way, and does not move."""
        while await self.hear() != {"at": "step"}:
            pass
        await until(self._is_stopped)

    async def _is_stopped(self) -> bool:
        return _state_of(self.pid) == "T"

    def kill(self) -> None:
        """Nothing of it can be written any more when this returns."""
        assert self.process.is_alive(), "The worker has ended before it could be killed"
        self.process.kill()
        self.process.join()

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def result(self) -> dict[str, Any]:
        """Of the loop that it ran to its end, whatever it has said on the way."""
        while "result" not in (words := await self.hear()):
            pass
        assert await self.exit() == 0
        result: dict[str, Any] = words["result"]
        return result

    def tell_to_end(self) -> None:
        """As a deploy would."""
        os.kill(self.pid, signal.SIGTERM)

    async def end(self) -> int | None:
        """As a deploy would; the exit code."""
        self.tell_to_end()
        return await self.exit()

    async def ends_within(self, seconds: float) -> bool:
        await asyncio.to_thread(self.process.join, seconds)
        return not self.process.is_alive()

    async def exit(self) -> int | None:
        """Its exit code, once it has ended."""
        assert await self.ends_within(PATIENCE), "The worker does not end"
        return self.process.exitcode


@asynccontextmanager
async def launch(orders: Orders, folder: Path) -> AsyncIterator[Worker]:
    """A worker, which logs and spools into the folder."""
    async with AsyncExitStack() as stack:
        here, there = _FORKS.Pipe(duplex=False)
        process = _FORKS.Process(target=work, args=(orders, there, folder))
        process.start()
        there.close()  # so that the death of the worker ends the wait for its words
        stack.callback(_bury, process, here)
        worker = Worker(process, here, folder)
        watch(worker.pid, stack)
        try:
            yield worker
        except BaseException as error:
            error.add_note(f"The worker said last:\n{worker.log[-5000:]}")
            raise


async def run_to_step(orders: Orders, folder: Path) -> None:
    """A worker that comes to its step and is killed there."""
    async with launch(orders, folder) as worker:
        await worker.until_frozen()
        worker.kill()


def _bury(process: BaseProcess, wire: Connection) -> None:
    process.kill()
    process.join()
    process.close()
    wire.close()


def _state_of(process_id: int) -> str:
    """As Linux has it: T is for a process that was stopped."""
    stat = Path(f"/proc/{process_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]
