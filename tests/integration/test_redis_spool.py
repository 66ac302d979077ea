"""The spool in a real Redis: the same promises as the folder's."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from tests.database import Database, sqlite_database
from tests.jobs import Job, Status, get_job
from tests.lookup import Witness
from tests.looping import queue_job, queue_jobs, read_claims, read_ledger, run
from tests.outages import (
    add_busy,
    alert,
    alerts,
    failing_after_the_claim,
    impatient,
    make_entry,
    nothing,
    outage,
    put_entry,
    read_spool,
    said_at,
    spool_end,
    start_spooling,
    start_unreliable,
)
from tests.redis_server import PASSWORD, RedisServer, redis_server
from unstuck import Unstuck, ZombieSettings
from unstuck.db import Entry, make_spool, spool
from unstuck.errors import NoSpool


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
async def server(shared: RedisServer) -> RedisServer:
    """With nothing in it."""
    async with shared.client() as client:
        await client.flushall()
        await client.config_set("maxmemory", 0)
    return shared


@pytest.fixture
def mortal() -> Iterator[RedisServer]:
    """One of the test's own, to kill."""
    with redis_server() as server:
        yield server


async def keys_of(server: RedisServer) -> dict[str, dict[str, str]]:
    async with server.client() as client:
        return {key: await client.hgetall(key) for key in await client.keys()}


def spool_at(url: str) -> Any:
    return make_spool(ZombieSettings(spool_url=url), None)


async def settle(_entry: Entry) -> bool:
    return True


async def refuse(_entry: Entry) -> bool:
    return False


async def test_an_end_is_spooled_in_redis_and_written_by_the_next_loop(
    database: Database, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "unstuck")
    unstuck, source = await start_unreliable(database, Path(), settings={"spool_url": server.url})
    job = await queue_job(database)
    with failing_after_the_claim(database, source):
        assert (await run(unstuck, nothing)).spooled == 1
    assert alerts(caplog) == [alert(job)]
    (claim,) = await read_claims(database)
    ((key, kept),) = (await keys_of(server)).items()
    assert key.startswith("unstuck:spool:")
    assert json.loads(kept[str(claim.token)])["error"] == "Failed to obtain processing session"
    source.mend()
    await run(unstuck, nothing)
    done = await get_job(database, job)
    assert (done.status, done.error) == (Status.Failed, "Failed to obtain processing session")
    assert await keys_of(server) == {}
    assert PASSWORD not in caplog.text


async def test_what_was_spooled_in_redis_is_written_by_the_next_sweep(
    database: Database, server: RedisServer
) -> None:
    unstuck = await start_spooling(database, Path(), settings={"spool_url": server.url})
    job = await add_busy(database)
    await spool_end(database, unstuck, job)
    await unstuck.sweep()
    assert (await get_job(database, job)).error == "no such page"
    assert await keys_of(server) == {}


async def test_claims_that_cannot_be_given_back_are_spooled_from_the_lifeline_as_well(
    database: Database, server: RedisServer
) -> None:
    """That is another thread, with an event loop of its own."""
    settings = {"spool_url": server.url, "breaker_failures": 1, "breaker_reset_seconds": 0}
    unstuck, _ = await start_unreliable(impatient(database), Path(), settings=settings)
    jobs = await queue_jobs(database, 4)
    async with outage(database) as begin:

        async def work(item_id: int, session: AsyncSession) -> None:
            await begin()

        assert (await run(unstuck, work, order_by_column=Job.id)).spooled == 4
    await run(unstuck, nothing)
    statuses = [(await get_job(database, job)).status for job in jobs]
    assert statuses == [Status.Completed, Status.Failed, Status.Queued, Status.Queued]


async def test_two_drains_at_once_settle_each_entry_once(
    database: Database, server: RedisServer
) -> None:
    witness = Witness()
    settings = {"spool_url": server.url}
    unstuck = await start_spooling(database, Path(), settings=settings, observers=[witness])
    jobs = [await add_busy(database) for _ in range(10)]
    for job in jobs:
        await spool_end(database, unstuck, job)
    await asyncio.gather(unstuck.sweep(), run(unstuck, nothing), unstuck.sweep())
    assert [(await get_job(database, job)).status for job in jobs] == [Status.Failed] * 10
    assert sorted(e.record_id for e in witness.heard("on_attempt_ended")) == sorted(map(str, jobs))
    assert [kind for _, kind, _, _ in await read_ledger(database)] == ["attempt"] * 10


async def test_a_drain_that_comes_second_takes_no_entry_for_a_late_one(
    database: Database, server: RedisServer
) -> None:
    """It had read the entry when another wrote and removed it."""
    fast = await start_spooling(database, Path(), settings={"spool_url": server.url})
    job = await add_busy(database)
    await spool_end(database, fast, job)
    asked = 0

    async def get_session() -> AsyncSession:
        nonlocal asked
        asked += 1
        if asked == 2:  # the first is to find out which database it is
            await fast.sweep()
            assert await keys_of(server) == {}
        return database.sessions()

    witness = Witness()
    slow = Unstuck(get_session, fast.settings, fast.registry, [witness])
    await slow.sweep()
    assert [kind for _, kind, _, _ in await read_ledger(database)] == ["attempt"]
    assert witness.heard("on_attempt_ended") == []


async def test_two_databases_with_one_redis_keep_their_entries_apart(
    database: Database, server: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    async with sqlite_database(tmp_path / "other") as other:
        here = await start_spooling(database, Path(), settings={"spool_url": server.url})
        there = await start_spooling(other, Path(), settings={"spool_url": server.url})
        mine, theirs = await add_busy(database), await add_busy(other)
        await spool_end(database, here, mine, error="of here")
        await spool_end(other, there, theirs, error="of there")
        await here.sweep()
        assert (await get_job(database, mine)).error == "of here"
        assert (await get_job(other, theirs)).status is Status.Processing
        assert [entry.error for entry in await read_spool(other, there.settings)] == ["of there"]


async def test_an_entry_of_an_unknown_workflow_stays(
    database: Database, server: RedisServer
) -> None:
    unstuck = await start_spooling(database, Path(), settings={"spool_url": server.url})
    strange = make_entry(1, workflow="pages")
    await put_entry(database, unstuck, strange)
    await unstuck.sweep()
    assert await read_spool(database, unstuck.settings) == [strange]


async def test_what_is_put_is_what_is_drained(server: RedisServer) -> None:
    kept = spool_at(server.url)
    entry = make_entry(
        "ü,\\", error="no\nsuch \ud800 page", data={"seconds": 1.5}, keeps_error=True
    )
    await kept.put(entry)
    found: list[Entry] = []

    async def write(entry: Entry) -> bool:
        found.append(entry)
        return len(found) > 1

    for depth in (1, 0, 0):
        assert await kept.drain(write) == []
        assert await kept.depth() == depth
    assert found == [entry, entry]


@pytest.mark.parametrize("content", [b"", b'{"workflow": "jo', b"\xff\xfe\x00", b"[]"])
async def test_a_corrupt_entry_is_told_once_and_set_aside_and_the_others_are_drained(
    server: RedisServer, content: bytes
) -> None:
    kept = spool_at(server.url)
    await kept.put(make_entry(1))
    async with server.client() as client:
        await client.hset("unstuck:spool:database", "broken", content)
    (trouble,) = await kept.drain(settle)
    assert "broken cannot be read and is set aside" in str(trouble)
    assert await kept.depth() == 0
    assert [*await keys_of(server)] == ["unstuck:spool:database:corrupt"]
    assert await kept.drain(settle) == []


async def test_a_full_spool_takes_no_more(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MOST_ENTRIES", 1)
    kept = spool_at(server.url)
    await kept.put(make_entry(1))
    with pytest.raises(NoSpool, match="in Redis is full: it holds 1 entries"):
        await kept.put(make_entry(2))
    assert await kept.drain(settle) == []
    await kept.put(make_entry(2))


async def test_a_redis_without_memory_is_told_and_the_loop_goes_on(
    database: Database, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with server.client() as client:
        await client.config_set("maxmemory", 1)
    unstuck, source = await start_unreliable(database, Path(), settings={"spool_url": server.url})
    await queue_jobs(database, 2)
    with failing_after_the_claim(database, source, times=4):
        result = await run(unstuck, nothing)
    assert (result.stuck, result.completed) == (1, 1)
    assert "command not allowed when used memory" in alerts(caplog)[-1]


async def test_a_redis_that_is_gone_is_told_and_stops_neither_loop_nor_sweep(
    database: Database, mortal: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "unstuck")
    unstuck, source = await start_unreliable(database, Path(), settings={"spool_url": mortal.url})
    first, second = await queue_jobs(database, 2)
    mortal.kill()
    with failing_after_the_claim(database, source, times=4):
        result = await run(unstuck, nothing, order_by_column=Job.id)
    assert (result.stuck, result.completed) == (1, 1)
    assert (await get_job(database, second)).status is Status.Completed
    said, why = alerts(caplog)
    assert said == alert(first)
    assert why.startswith("The spool in Redis cannot be reached: ")
    assert why.endswith(f"Job ID {first} was failed: Failed to obtain processing session")
    assert (await unstuck.sweep()).errors == []
    assert any("The spool in Redis cannot be reached" in s for s in said_at(caplog, logging.ERROR))
    assert PASSWORD not in caplog.text


async def test_a_wrong_password_is_told_without_showing_it(server: RedisServer) -> None:
    wrong = spool_at(server.url.replace(PASSWORD, "wr0ng"))
    with pytest.raises(NoSpool, match="cannot be reached") as refused:
        await wrong.put(make_entry(1))
    (trouble,) = await wrong.drain(settle)
    assert "wr0ng" not in f"{refused.value} {trouble}"


@pytest.mark.parametrize("url", ["redis://:s3/cret@cache:6379/0", "redis://:s3cret@cache:port/0"])
async def test_a_url_that_cannot_be_read_is_told_without_its_password(url: str) -> None:
    kept = spool_at(url)
    with pytest.raises(NoSpool) as refused:
        await kept.put(make_entry(1))
    (trouble,) = await kept.drain(settle)
    for said in (str(refused.value), str(trouble)):
        assert "s3" not in said
        assert "cret" not in said


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """The URL of a server that takes connections and never says a word."""
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
    server.close()
    for writer in held:
        writer.close()
    await server.wait_closed()


async def test_a_redis_that_does_not_answer_is_not_waited_for(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "_PATIENCE", 0.2)
    kept = spool_at(silent)
    async with asyncio.timeout(10):
        with pytest.raises(NoSpool, match="cannot be reached"):
            await kept.put(make_entry(1))
        (trouble,) = await kept.drain(refuse)
    assert "cannot be reached" in str(trouble)


async def test_without_the_library_it_says_what_to_install(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    settings = {"spool_url": f"redis://:{PASSWORD}@127.0.0.1:1/0"}
    unstuck, source = await start_unreliable(database, Path(), settings=settings)
    await queue_jobs(database, 2)
    with failing_after_the_claim(database, source, times=4):
        result = await run(unstuck, nothing)
    assert (result.stuck, result.completed) == (1, 1)
    assert "pip install 'unstuck[redis]'" in alerts(caplog)[-1]
    assert PASSWORD not in caplog.text
