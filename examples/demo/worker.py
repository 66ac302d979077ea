"""A worker process: it runs the job loop over the invoices until it is told to end.

Some workers are told to come to a halt in the middle of an invoice, as at a mail server that does
not answer, so that they are in mid-batch for as long as it takes to kill them there.
"""

import argparse
import asyncio
import logging
import signal
from contextlib import suppress

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from examples.demo.database import connect
from examples.demo.invoice import Delivery, Invoice, Status
from examples.demo.leak import Leak
from examples.demo.parent import end_with_parent
from unstuck import configure, run_job_loop

# Seconds that an invoice takes, and that an empty queue is left alone for.
_WORK, _PAUSE = 0.4, 0.2


class Worker:
    def __init__(self, name: str, batch_size: int, halts_after: int | None) -> None:
        self.name = name
        self._batch_size = batch_size
        self._halts_after = halts_after
        self._delivered = 0
        self.answer = asyncio.Event()

    async def run(self) -> None:
        while True:
            result = await run_job_loop(
                model=Invoice,
                status_enum=Status,
                queued_status=Status.Queued,
                processing_status=Status.Processing,
                completed_status=Status.Completed,
                failed_status=Status.Failed,
                processing_function=self.deliver,
                batch_size=self._batch_size,
                order_by_column=Invoice.id,
                name=self.name,
            )
            if not result.claimed:
                await asyncio.sleep(_PAUSE)

    async def deliver(self, invoice_id: int, session: AsyncSession) -> None:
        """The delivery is committed by the loop, together with the status, or not at all."""
        if self._delivered == self._halts_after:
            await self.answer.wait()
        await asyncio.sleep(_WORK)
        session.add(Delivery(invoice_id=invoice_id, worker=self.name))
        self._delivered += 1


def prepare(*, leaks: bool) -> AsyncEngine:
    """Says once where the job loop has its sessions from."""
    if not leaks:
        engine = connect()
        configure(session_factory=async_sessionmaker(engine))
        return engine
    engine = connect(pool_size=1, pool_timeout=0.5)
    leak = Leak(engine)
    configure(session_factory=leak.get_session, observers=[leak])
    return engine


async def work(arguments: argparse.Namespace) -> None:
    engine = prepare(leaks=arguments.leaks)
    worker = Worker(arguments.name, arguments.batch_size, arguments.halts_after)
    task = asyncio.create_task(worker.run())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    loop.add_signal_handler(signal.SIGUSR1, worker.answer.set)
    with suppress(asyncio.CancelledError):
        await task
    await engine.dispose()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--halts-after", type=int, help="invoices; SIGUSR1 sets it going again")
    parser.add_argument("--leaks", action="store_true", help="loses connections for a while")
    logging.basicConfig(level=logging.INFO)
    end_with_parent()
    asyncio.run(work(parser.parse_args()))


if __name__ == "__main__":
    main()
