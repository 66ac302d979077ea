"""A worker: the job loop in a process, as applications run it."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy import asc
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from tests.jobs import Job
from tests.looping import CALL
from tests.workers.functions import FUNCTIONS
from tests.workers.orders import CLOSING, Act, Orders
from tests.workers.steps import Watch, halt
from tests.workers.wire import connect, say
from unstuck import Registry, Unstuck, ZombieSettings


def work(orders: Orders, to_test: Connection, folder: Path) -> None:
    """The whole life of the process; it logs and spools into the folder."""
    connect(to_test)
    with (folder / f"{os.getpid()}.log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO)
    for name in [name for name in os.environ if name.startswith(("ZOMBIE_", "DATABASE_URL"))]:
        del os.environ[name]
    os.environ["ZOMBIE_SPOOL_URL"] = str(folder / "spool")
    asyncio.run(main(orders))


async def main(orders: Orders) -> None:
    engine = create_async_engine(orders.url, **orders.engine)
    if orders.life in ("scheduler", "application"):
        await run_on_a_scheduler(orders, engine)
        return
    task = asyncio.create_task(run(orders, engine))
    arrange(orders, engine, task)
    with suppress(asyncio.CancelledError):
        say(result=await task)
    await engine.dispose()


async def run(orders: Orders, engine: AsyncEngine) -> dict[str, object]:
    """One call of the loop."""
    registry = Registry()
    registry.register(Job, name="jobs", **orders.policy)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    unstuck = Unstuck(sessions, ZombieSettings(), registry)
    function = FUNCTIONS[orders.function]
    call = {**CALL, "order_by_column": asc(Job.id), **orders.call}
    return asdict(await unstuck.run_job_loop(**call, processing_function=function))


def arrange(orders: Orders, engine: AsyncEngine, task: asyncio.Task[Any]) -> None:
    loop = asyncio.get_running_loop()
    if orders.life == "task":
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if orders.step is not None:
        acts: dict[Act, Callable[[], object]] = {
            "halt": halt,
            "freeze": halt,
            "cancel": task.cancel,
            "cancel all": cancel_all,
        }
        Watch(engine, orders.step, acts[orders.act], waits=orders.act == "freeze")


def cancel_all() -> None:
    """As `asyncio.run` does at its end."""
    for task in asyncio.all_tasks():
        task.cancel()


async def run_on_a_scheduler(orders: Orders, engine: AsyncEngine) -> None:
    """At its end `asyncio.run` cancels whatever still runs."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    scheduler = AsyncIOScheduler(timezone="UTC")
    job = partial(run, orders, engine)
    scheduler.add_job(job, "interval", hours=1, next_run_time=datetime.now(UTC), max_instances=1)
    scheduler.start()
    await told.wait()
    scheduler.shutdown(wait=False)
    if orders.life == "application":
        await engine.dispose()
        await asyncio.sleep(CLOSING)
