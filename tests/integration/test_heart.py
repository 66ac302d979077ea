"""The heart and its lifeline in trouble: beats that hang, forks, engines that come and go, threads
that cannot be started, a database that is away."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from tests.database import Database, postgres_database
from tests.integration.test_heartbeat import BRISK, beaten_since, lose_claims
from tests.interleaving import until
from tests.jobs import Status, add_job, ago, get_job, start
from tests.looping import age_claims, queue_job, queue_jobs, read_claims, read_ledger, run
from tests.outages import impatient, nothing, outage
from tools.embedded_postgres import EmbeddedPostgres
from unstuck import Unstuck, app
from unstuck.db import Lifeline, Sessions
from unstuck.loop import workshop

ROOT = Path(__file__).parents[2]


@contextmanager
def at_each_beat(database: Database, act: Callable[[Connection], None]) -> Iterator[None]:
    """Acts before each beat is sent, in the thread and on the connection that sends it."""

    def on_execute(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        is_beat = "UPDATE zombie_claims SET heartbeat_at" in statement
        is_here = connection.engine.url == database.engine.url
        if is_beat and is_here and "started_at" not in statement:
            act(connection)

    event.listen(Engine, "before_cursor_execute", on_execute)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", on_execute)


def backend_of(connection: Connection) -> int:
    """The server process at the other end."""
    driver: Any = connection.connection.driver_connection
    return int(driver.get_server_pid())


async def until_beaten(database: Database) -> None:
    """All claims that there are have been beaten for once more."""
    earlier = await read_claims(database)
    assert earlier

    async def is_beaten() -> bool:
        return await beaten_since(database, earlier)

    await until(is_beaten)


async def until_ended(lifeline: Lifeline) -> None:
    """Nothing more is to be done, and so its thread is gone."""
    thread = lifeline._thread
    assert thread is not None

    async def has_ended() -> bool:
        return not thread.is_alive()

    await until(has_ended)


async def test_a_beat_that_hangs_is_left_behind_and_the_heart_beats_on_by_new_connections(
    own_postgres: EmbeddedPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    """The other end takes what is sent, and never answers."""
    backends: list[int] = []

    def freeze_the_first(connection: Connection) -> None:
        backends.append(backend_of(connection))
        if len(backends) == 1:
            os.kill(backends[0], signal.SIGSTOP)

    async def has_hung() -> bool:
        return "The heartbeat of 1 claims failed: no answer within 1 s" in caplog.text

    async def work(item_id: int, session: AsyncSession) -> None:
        await until(has_hung)
        await until_beaten(database)

    async with postgres_database(own_postgres.url(), own_postgres) as database:
        unstuck = await start(database, settings=BRISK)
        await queue_job(database)
        try:
            with at_each_beat(database, freeze_the_first):
                assert (await run(unstuck, work)).completed == 1
        finally:
            for backend in backends[:1]:
                os.kill(backend, signal.SIGCONT)
        assert backends[0] not in backends[1:]
        assert "The heartbeat goes on after 1 misses" in caplog.text
        ((lifeline, _),) = unstuck._hearts.values()
        await until_ended(lifeline)  # of the beat that hung, nothing is left either


FORK_AND_WAIT = """
import asyncio, os, sys, threading
from tests.database import Database
from tests.jobs import start
from tests.looping import run

async def main(url, other):
    unstuck = await start(Database(url), settings={"heartbeat_interval_seconds": 0.1})

    async def beat_for_another():
        async with unstuck.heartbeat("jobs", other):
            await asyncio.Event().wait()

    async def work(item_id, session):
        ((_, heart),) = unstuck._hearts.values()
        while heart.last_beat is None:
            await asyncio.sleep(0.01)
        child = os.fork()
        if child == 0:
            thread = threading.Thread(target=lambda: asyncio.run(beat_for_another()))
            thread.start()
            thread.join()
            os._exit(1)
        print(child, flush=True)
        await asyncio.Event().wait()

    await run(unstuck, work)

asyncio.run(main(*sys.argv[1:]))
"""


def launch(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


async def test_a_forked_child_does_not_beat_for_the_claims_of_its_parent(
    postgres: Database,
) -> None:
    await start(postgres)
    mine, childs = await queue_job(postgres), await add_job(postgres)

    async def heartbeat_of(job: int) -> Any:
        found = {claim.record_id: claim.heartbeat_at for claim in await read_claims(postgres)}
        return found.get(str(job))

    async def child_beats() -> None:
        last = await heartbeat_of(childs)

        async def has_beaten() -> bool:
            return await heartbeat_of(childs) not in (None, last)

        await until(has_beaten)

    with launch(FORK_AND_WAIT, postgres.url, str(childs)) as parent:
        assert parent.stdout is not None
        child = int(await asyncio.to_thread(parent.stdout.readline))
        try:
            await child_beats()
            parent.kill()
            await asyncio.to_thread(parent.wait)
            await child_beats()  # and what the parent had sent is written by now
            last = await heartbeat_of(mine)
            assert last is not None
            for _ in range(3):
                await child_beats()
            assert await heartbeat_of(mine) == last
        finally:
            parent.kill()
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


async def test_sessions_of_engines_with_options_share_the_heart_of_their_pool(
    database: Database,
) -> None:
    """A host with a schema for each tenant asks for an engine with options for each session."""
    prepared = await start(database, settings=BRISK)
    await queue_jobs(database, 2)

    def get_session() -> AsyncSession:
        options = {"schema_translate_map": {"tenant": None}}
        return AsyncSession(database.engine.execution_options(**options), expire_on_commit=False)

    unstuck = Unstuck(get_session, prepared.settings, prepared.registry)
    both, beaten = asyncio.Barrier(2), asyncio.Barrier(2)

    async def work(item_id: int, session: AsyncSession) -> None:
        await both.wait()
        ((_, heart),) = unstuck._hearts.values()
        assert len(heart) == 2
        await until_beaten(database)
        await beaten.wait()

    results = await asyncio.gather(*[run(unstuck, work, batch_size=1) for _ in range(2)])
    assert [result.completed for result in results] == [1, 1]
    ((lifeline, heart),) = unstuck._hearts.values()
    assert len(heart) == 0
    await until_ended(lifeline)


async def test_hearts_of_engines_that_come_and_go_are_let_go_but_none_that_beats(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each task of a queue has an event loop, and so an engine, of its own."""
    monkeypatch.setattr(workshop, "_MOST_HEARTS", 2)
    monkeypatch.setattr(app, "_MOST_WORKSHOPS", 2)
    unstuck = await start(database, settings=BRISK)
    await queue_job(database)
    engines: list[weakref.ref[Engine]] = []

    async def call_once() -> None:
        engine = create_async_engine(database.url, poolclass=NullPool)
        engines.append(weakref.ref(engine.sync_engine))
        await run(unstuck, nothing, session_factory=async_sessionmaker(engine))
        await engine.dispose()

    async def work(item_id: int, session: AsyncSession) -> None:
        for _ in range(10):
            await call_once()
        assert database.engine.sync_engine.pool in unstuck._hearts
        await until_beaten(database)

    assert (await run(unstuck, work)).completed == 1
    assert len(unstuck._hearts) <= 4
    gc.collect()
    assert sum(engine() is not None for engine in engines) <= 5


def fail_to_start_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next lifeline finds no more threads to be had."""
    start_thread, failures = threading.Thread.start, iter([True])

    def fail_once(thread: threading.Thread) -> None:
        if thread.name == "unstuck-lifeline" and next(failures, False):
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)


async def test_after_a_thread_that_could_not_be_started_the_next_call_beats(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    unstuck = await start(database, settings=BRISK)
    await queue_jobs(database, 2)
    fail_to_start_once(monkeypatch)
    with suppress(RuntimeError):
        await run(unstuck, nothing, batch_size=1)

    async def work(item_id: int, session: AsyncSession) -> None:
        async def is_beaten() -> bool:
            (mine,) = [c for c in await read_claims(database) if c.record_id == str(item_id)]
            return bool(mine.heartbeat_at > mine.started_at)

        await until(is_beaten)

    assert (await run(unstuck, work, batch_size=1)).completed == 1
    gc.collect()  # an event loop that was left open would be told of here


async def test_nobody_beats_for_a_claim_whose_call_found_no_thread(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nobody works on it, the sweep has to find it."""
    unstuck = await start(database, settings=BRISK)
    job = await queue_job(database)
    fail_to_start_once(monkeypatch)
    with suppress(RuntimeError):
        await run(unstuck, nothing)
    await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        await age_claims(database)

        async def is_beaten() -> bool:
            found = {c.record_id: c.heartbeat_at for c in await read_claims(database)}
            return found[str(item_id)] is not None

        await until(is_beaten)

    assert (await run(unstuck, work)).completed >= 1
    await unstuck.sweep()
    assert (await get_job(database, job)).status is not Status.Processing
    ((lifeline, heart),) = unstuck._hearts.values()
    assert len(heart) == 0
    await until_ended(lifeline)


def set_path_at_connect(engine: Engine) -> None:
    def on_connect(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("SET search_path TO app")
        cursor.close()
        connection.commit()

    event.listen(engine, "connect", on_connect)


def set_path_at_begin(engine: Engine) -> None:
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql("SET LOCAL search_path TO app")

    event.listen(engine, "begin", on_begin)


@pytest.mark.parametrize("listen", [set_path_at_connect, set_path_at_begin])
async def test_listeners_of_the_hosts_engine_hold_for_the_heart_as_well(
    postgres: Database, listen: Callable[[Engine], None], caplog: pytest.LogCaptureFixture
) -> None:
    """By the listener alone anybody knows where the tables are."""
    await postgres.execute("CREATE SCHEMA app")
    host = Database(postgres.url)
    listen(host.engine.sync_engine)
    unstuck = await start(host, settings=BRISK)
    await queue_job(host)

    async def work(item_id: int, session: AsyncSession) -> None:
        await until_beaten(host)
        await until_beaten(host)

    assert (await run(unstuck, work)).completed == 1
    assert "The heartbeat of" not in caplog.text
    await host.dispose()


async def until_heard(unstuck: Unstuck) -> None:
    """The heart has asked the database once, and had an answer."""
    ((_, heart),) = unstuck._hearts.values()

    async def has_heard() -> bool:
        return heart.last_beat is not None

    await until(has_heard)


async def test_the_heart_asks_for_its_claims_at_once(database: Database) -> None:
    """And not after an interval, which is a quarter of an hour here."""
    unstuck = await start(database, settings={"heartbeat_interval_seconds": 900})
    await queue_job(database)

    async def work(item_id: int, session: AsyncSession) -> None:
        await until_heard(unstuck)

    assert (await run(unstuck, work)).completed == 1


async def test_a_claim_that_is_taken_away_soon_after_it_was_made_is_told_by_the_next_beat(
    database: Database,
) -> None:
    unstuck = await start(database, settings={"heartbeat_interval_seconds": 0.5})
    job = await queue_job(database)
    was_stopped = False

    async def work(item_id: int, session: AsyncSession) -> None:
        nonlocal was_stopped
        await until_heard(unstuck)
        await unstuck.cancel("jobs", item_id, by="ada", why="not needed")
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 20)
        except asyncio.CancelledError:
            was_stopped = True
            raise

    assert (await run(unstuck, work)).lost == 1
    assert was_stopped
    kinds = [kind for record, kind, *_ in await read_ledger(database) if record == str(job)]
    assert kinds == ["cancelled", "late_beat", "late_finish"]


@contextmanager
def silent_until(moment: threading.Event) -> Iterator[None]:
    """Until then the lifeline sends nothing."""

    def on_execute(*_: Any) -> None:
        if threading.current_thread().name == "unstuck-lifeline":
            assert moment.wait(20)

    event.listen(Engine, "before_cursor_execute", on_execute)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", on_execute)


async def test_a_claim_that_is_taken_away_before_the_heart_could_see_it_is_told_as_well(
    postgres: Database,
) -> None:
    unstuck = await start(postgres, settings=BRISK)
    await queue_job(postgres)
    gone = threading.Event()
    was_stopped = False

    async def work(item_id: int, session: AsyncSession) -> None:
        nonlocal was_stopped
        await unstuck.cancel("jobs", item_id, by="ada", why="not needed")
        gone.set()
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 20)
        except asyncio.CancelledError:
            was_stopped = True
            raise

    with silent_until(gone):
        assert (await run(unstuck, work)).lost == 1
    assert was_stopped


async def test_a_heart_that_sees_no_claim_beats_no_faster_for_it(postgres: Database) -> None:
    """The claim was taken away before the first beat could see it."""
    unstuck = await start(postgres, settings={"heartbeat_interval_seconds": 0.3})
    await queue_job(postgres)
    sent: list[float] = []
    gone = threading.Event()

    def wait_until_gone(_connection: Connection) -> None:
        assert gone.wait(20)
        sent.append(time.monotonic())

    async def work(item_id: int, session: AsyncSession) -> None:
        await lose_claims(postgres)
        gone.set()

        async def enough() -> bool:
            return len(sent) >= 4

        await until(enough)

    with at_each_beat(postgres, wait_until_gone):
        assert (await run(unstuck, work)).lost == 1
    assert sent
    assert all(later - earlier > 0.25 for earlier, later in pairwise(sent))


async def test_leaving_a_heartbeat_while_the_database_is_away_is_logged_and_raises_nothing(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unstuck = await start(impatient(database))
    job = await add_job(database)

    async def work() -> str:
        async with unstuck.heartbeat("jobs", job):
            await begin()
            return "done"

    async with outage(database) as begin:
        assert await work() == "done"
    await database.engine.dispose()  # of connections that are dead
    assert f"The claim to jobs {job} could not be ended: " in caplog.text
    assert len(await read_claims(database)) == 1
    await age_claims(database)
    async with unstuck.heartbeat("jobs", job):
        (kept,) = await read_claims(database)
        assert kept.heartbeat_at > ago(60)
    assert await read_claims(database) == []


def lifeline_of(database: Database) -> Lifeline:
    return Lifeline(Sessions(database.sessions), database.engine.sync_engine)


async def ask(sessions: Sessions) -> tuple[int, threading.Thread]:
    """An answer of the database, and the thread that heard it."""
    async with sessions.open() as session:
        answer = await session.scalar(text("SELECT 17"))
        return int(answer or 0), threading.current_thread()


async def test_the_thread_of_a_lifeline_ends_when_idle_and_starts_again_when_needed(
    database: Database,
) -> None:
    lifeline = lifeline_of(database)
    threads: list[threading.Thread] = []
    for _ in range(2):
        answer, thread = await lifeline.run(ask)
        assert (answer, thread.name) == (17, "unstuck-lifeline")
        assert (await lifeline.run(ask))[1] is thread  # which is still there
        threads.append(thread)
        await until_ended(lifeline)
    assert threads[0] is not threads[1]
    if database.dialect == "postgresql":
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        assert await database.execute(f"SELECT pid FROM pg_stat_activity WHERE {others}") == []


async def test_work_that_was_cancelled_before_it_began_does_not_keep_the_thread_alive(
    database: Database,
) -> None:
    lifeline = lifeline_of(database)
    blocked, free = threading.Event(), threading.Event()

    async def block(_sessions: Sessions) -> None:
        blocked.set()
        assert free.wait(20)

    async def go_on_for_ever(_sessions: Sessions) -> None:
        await asyncio.Event().wait()

    first = lifeline.submit(block)
    assert await asyncio.to_thread(blocked.wait, 20)
    second = lifeline.submit(go_on_for_ever)
    assert second.cancel()
    free.set()
    await asyncio.wrap_future(first)
    await until_ended(lifeline)
    assert (await lifeline.run(ask))[0] == 17
