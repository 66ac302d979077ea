"""What is done to the application, act by act.

Nothing here waits for a guess of time: each act waits until the database says that the moment has
come, and the whole has a limit.
"""

import asyncio
import re
import signal
import time
from collections.abc import Callable

from sqlalchemy.ext.asyncio import AsyncEngine

from examples.demo.client import Client
from examples.demo.crew import Crew, Member
from examples.demo.screen import Screen
from examples.demo.sight import Sight, look

INVOICES = 15
# Seconds for everything, and between two looks at the database.
LIMIT, _TICK = 50.0, 0.1
# Halts at its second invoice of three, and so is found in mid-batch.
_HALTING = ("--batch-size=3", "--halts-after=1")
_LEAKING = ("--batch-size=4", "--leaks")
_USUAL = ("--batch-size=3",)
_HUMAN = "a human"


class TooLate(Exception):
    """What was waited for did not come within the limit."""


class Play:
    def __init__(self, crew: Crew, engine: AsyncEngine, screen: Screen) -> None:
        self._crew = crew
        self._engine = engine
        self._screen = screen
        self._deadline = time.monotonic() + LIMIT
        self._sight = Sight()
        self.ids: set[int] = set()

    async def begin(self) -> Client:
        """Starts the application, and sends it the invoices."""
        application = self._crew.start("application", "application")
        address = re.compile(r"Uvicorn running on (http://\S+)")
        await self._until(lambda _: address.search(application.log), "the application")
        found = address.search(application.log)
        assert found is not None
        client = Client(found[1])
        self.ids = set(await client.add_invoices(INVOICES))
        self._screen.announce(
            f"{len(self.ids)} invoices are queued at {client.address}, which sweeps as it serves"
        )
        return client

    async def perform(self, client: Client) -> None:
        first, third, fourth = [self._start(f"worker-{n}", _HALTING) for n in (1, 3, 4)]
        for worker in (first, third, fourth):
            await self._until(_mid_batch(worker.name), f"{worker.name} in mid-batch")
        await self._kill(first)
        await self._starve()
        await self._redeploy(third)
        await self._freeze(fourth)
        await self._clear_up(client)

    async def _kill(self, worker: Member) -> None:
        name = worker.name
        worker.send(signal.SIGKILL)
        self._screen.announce(f"1. {name} gets a SIGKILL in mid-batch, and can tell nobody")
        await self._until(lambda s: not s.owned_by(name), f"a sweep that takes them from {name}")

    async def _starve(self) -> None:
        """While the others are dead or halted, it is the only one that works."""
        name = "worker-2"
        self._start(name, _LEAKING)
        self._screen.announce(f"2. {name} starts; soon all connections of its pool are taken")
        await self._until(lambda s: s.completed_by(name) > 1, f"sessions for {name}")

    async def _redeploy(self, worker: Member) -> None:
        worker.send(signal.SIGTERM)
        self._screen.announce(f"3. {worker.name} gets a SIGTERM in mid-batch, as in a deploy")
        await self._until(lambda _: worker.is_gone, f"the end of {worker.name}")
        self._start("worker-5", _USUAL)
        self._screen.announce(
            f"   {worker.name} gave back what it had and is gone; worker-5 is the new one"
        )

    async def _freeze(self, worker: Member) -> None:
        """Right after a beat: else it might take a lock with it, and nobody could move."""
        name = worker.name
        before = self._sight.last_beat(name)
        await self._until(lambda s: s.last_beat(name) != before, f"a beat of {name}")
        worker.send(signal.SIGSTOP)
        self._screen.announce(f"4. {name} gets a SIGSTOP in mid-batch, and will not know it")
        mine = {one.id for one in self._sight.owned_by(name)}
        await self._until(lambda s: s.are_final(mine), f"others at the work of {name}")
        worker.send(signal.SIGCONT)
        worker.send(signal.SIGUSR1)
        self._screen.announce(f"   {name} goes on with what others have done meanwhile")
        await self._until(lambda s: s.has_refused(name), f"a late result of {name}")

    async def _clear_up(self, client: Client) -> None:
        """What failed for want of a session is retried by a human, who sees why it failed."""
        await self._until(lambda s: s.are_final(self.ids), "the end of every invoice")
        while failed := self._sight.failed:
            self._screen.announce(f"Every invoice has ended; {_HUMAN} retries {len(failed)}")
            for invoice_id in failed:
                await client.retry(invoice_id, by=_HUMAN, why="sessions can be had again")
            await self._until(lambda s: s.are_final(self.ids), "the end of every invoice")

    async def hold(self) -> None:
        """Keeps everything running for as long as it does."""
        while True:
            self._crew.check()
            await asyncio.sleep(_TICK)

    def _start(self, name: str, arguments: tuple[str, ...]) -> Member:
        return self._crew.start("worker", name, name, *arguments)

    async def _until(self, condition: Callable[[Sight], object], what: str) -> None:
        """Looks, and shows what it saw, until it is so."""
        while True:
            self._crew.check()
            if self.ids:
                self._sight = await look(self._engine)
                self._screen.show(self._sight)
            if condition(self._sight):
                return
            if time.monotonic() > self._deadline:
                raise TooLate(f"In {LIMIT:g} s there was no sign of {what}")
            await asyncio.sleep(_TICK)


def _mid_batch(worker: str) -> Callable[[Sight], bool]:
    return lambda sight: sight.is_in_mid_batch(worker)
