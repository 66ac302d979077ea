"""`python -m examples.demo`: exits with 0 if every promise was kept, and with 1 if one was not."""

import argparse
import asyncio
import signal
import sys
import time
from contextlib import suppress

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from examples.demo.crew import Crew, EndedByItself
from examples.demo.database import connect
from examples.demo.invoice import Delivery
from examples.demo.place import POSTGRES, SQLITE, Place, open_place
from examples.demo.play import Play, TooLate
from examples.demo.screen import Screen, open_screen
from examples.demo.verdict import judge

KEPT, BROKEN, INTERRUPTED = 0, 1, 130


async def run(arguments: argparse.Namespace, place: Place, crew: Crew, screen: Screen) -> int:
    began, engine = time.monotonic(), connect(place.url)
    play = Play(crew, engine, screen)
    try:
        client = await play.begin()
        await play.perform(client)
        if arguments.break_promise:
            await _deliver_twice(engine, min(play.ids))
        verdict = await judge(engine, play.ids)
        screen.conclude(verdict)
        kept = "Every promise was kept" if verdict.is_kept else "A promise was broken"
        print(f"{kept}, in {time.monotonic() - began:.0f} s on {place.database}.", flush=True)
        if arguments.serve:
            print(f"The application goes on at {client.address}/docs until Ctrl-C.", flush=True)
            with suppress(asyncio.CancelledError):
                await play.hold()
        return KEPT if verdict.is_kept else BROKEN
    except TooLate as late:
        screen.conclude(await judge(engine, play.ids))
        print(f"{late}.", flush=True)
        return BROKEN
    finally:
        await engine.dispose()


async def _deliver_twice(engine: AsyncEngine, invoice_id: int) -> None:
    """Past the fence: to see that the demo would notice."""
    async with engine.begin() as connection:
        await connection.execute(insert(Delivery).values(invoice_id=invoice_id, worker="nobody"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--database", choices=[SQLITE, POSTGRES], default=SQLITE)
    parser.add_argument("--serve", action="store_true", help="go on serving afterwards")
    parser.add_argument("--break-promise", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with open_place(arguments.database) as place, Crew(place) as crew, open_screen() as screen:
            return asyncio.run(run(arguments, place, crew, screen))
    except EndedByItself as ended:
        print(ended, file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
