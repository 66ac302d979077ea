"""Waiting that a cancellation does not end: for what has to be written even so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


async def see_through(work: Awaitable[Answer], seconds: float) -> Answer:
    """The answer, though we may be cancelled meanwhile; from then on it has that many seconds.

    A cancellation is not passed on: whoever waits for us has been told as well, and raises it."""
    task = asyncio.ensure_future(work)
    await settle([task], seconds)
    if not task.done():
        task.cancel()
        raise TimeoutError(f"not done within {seconds:g} s of being cancelled")
    return task.result()


async def settle(
    tasks: Iterable[asyncio.Future[Any]], seconds: float, *, at_most: float | None = None
) -> bool:
    """Waits until they are done, or that long after we are cancelled; whether we were."""
    pending = set(tasks)
    was_cancelled = False
    loop = asyncio.get_running_loop()
    deadline = None if at_most is None else loop.time() + at_most
    while pending:
        left = None if deadline is None else deadline - loop.time()
        if left is not None and left <= 0:
            break
        try:
            _, pending = await asyncio.wait(pending, timeout=left)
        except asyncio.CancelledError:
            was_cancelled = True
            deadline = loop.time() + seconds if deadline is None else deadline
    return was_cancelled
