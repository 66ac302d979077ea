"""A sweep may be cut off at any statement, by its limit or by a deploy."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.database import Database
from tests.jobs import Status, add_job, get_job, get_stuck_again, start
from tests.session_sources import checked_out
from unstuck import Unstuck

MOST_STATEMENTS = 40


@contextmanager
def at_each_statement(database: Database, act: Callable[[int], None]) -> Iterator[None]:
    """Calls `act` with the number of each statement, just before it goes to the database."""
    numbers = iter(range(1, 1000))

    def before(*_: Any) -> None:
        act(next(numbers))

    event.listen(database.engine.sync_engine, "before_cursor_execute", before)
    try:
        yield
    finally:
        event.remove(database.engine.sync_engine, "before_cursor_execute", before)


async def cut_off(database: Database, unstuck: Unstuck, at: int) -> asyncio.Task[Any]:
    """A sweep that is cancelled while its n-th statement is under way."""
    task = asyncio.create_task(unstuck.sweep())

    def cancel(number: int) -> None:
        if number == at:
            task.cancel()

    with at_each_statement(database, cancel):
        await asyncio.wait({task})
    return task


async def write(database: Database) -> None:
    """By somebody else, who does not wait for long."""
    patience = {"postgresql": {"command_timeout": 5}, "sqlite": {"timeout": 2}}
    engine = create_async_engine(database.url, connect_args=patience[database.dialect])
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE jobs SET idempotent = NULL"))
    await engine.dispose()


async def test_a_sweep_cut_off_at_any_statement_ends_and_leaves_no_lock(
    database: Database,
) -> None:
    unstuck = await start(database, settings={"backoff_base_seconds": 0, "max_resets": 1000})
    record = await add_job(database)
    sweeps = []  # kept, as a host may keep its tasks, with what they hold
    for at in range(1, MOST_STATEMENTS):
        await get_stuck_again(database, record)
        sweeps.append(await cut_off(database, unstuck, at))
        if not sweeps[-1].cancelled():
            break
        await write(database)
        assert checked_out(database.engine) == 0
    assert 3 < len(sweeps) < MOST_STATEMENTS, "the last one ran to its end"
    assert sweeps[-1].result().errors == []


async def test_a_sweep_cut_off_at_any_statement_did_all_of_it_or_nothing(
    database: Database,
) -> None:
    unstuck = await start(database, settings={"backoff_base_seconds": 0, "max_resets": 1000})
    record = await add_job(database)
    done = 0
    for at in range(1, MOST_STATEMENTS):
        await get_stuck_again(database, record)
        sweep = await cut_off(database, unstuck, at)
        done += (await get_job(database, record)).status is Status.Queued
        history = await unstuck.history("jobs", record)
        assert [entry.zombie_count for entry in history] == list(range(1, done + 1))
        if not sweep.cancelled():
            break
    assert done > 0


@pytest.mark.parametrize("at", [1, 2])
async def test_the_next_sweep_takes_what_a_cut_off_one_left(database: Database, at: int) -> None:
    unstuck = await start(database)
    await add_job(database)
    assert (await cut_off(database, unstuck, at)).cancelled()
    assert (await unstuck.sweep()).left_processing == 1
