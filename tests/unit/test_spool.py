"""The spool in a folder: what is kept, who may read it, and what is said where it cannot be."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tests.outages import make_entry
from unstuck.db import Entry, spool
from unstuck.db.spool import FolderSpool
from unstuck.errors import NoSpool

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> FolderSpool:
    return FolderSpool(tmp_path / "spool" / "database")


class Reader:
    """Takes down the entries that it is given, and lets them go or not."""

    def __init__(self, *, settles: bool = True) -> None:
        self.entries: list[Entry] = []
        self.settles = settles

    async def __call__(self, entry: Entry) -> bool:
        self.entries.append(entry)
        return self.settles


async def test_what_was_put_is_what_is_drained_and_then_gone(folder: FolderSpool) -> None:
    entry = make_entry(
        "7,de\\,fault",
        cause="no_session",
        error="ünread\nable \ud800 'quoted'",
        data={"seconds": 1.5},
        keeps_error=True,
    )
    await folder.put(entry)
    assert await folder.depth() == 1
    reader = Reader()
    assert await folder.drain(reader) == []
    assert reader.entries == [entry]
    assert await folder.depth() == 0
    assert await folder.drain(reader) == []
    assert reader.entries == [entry]


async def test_what_is_not_settled_stays(folder: FolderSpool) -> None:
    await folder.put(make_entry(1))
    await folder.drain(Reader(settles=False))
    assert await folder.depth() == 1


async def test_a_spool_that_was_never_used_is_empty_and_makes_no_folder(
    folder: FolderSpool,
) -> None:
    reader = Reader()
    assert (await folder.drain(reader), reader.entries, await folder.depth()) == ([], [], 0)
    assert not folder.folder.parent.exists()


WHOLE = json.loads(make_entry(1).dump())
CORRUPT = {
    "empty": b"",
    "cut off": make_entry(1).dump().encode()[:-9],
    "not text": b"\x00\xff\xfe" * 50,
    "another kind of JSON": b"[1, 2, 3]",
    "nested beyond measure": b"[" * 100_000,
    "no token": json.dumps({**WHOLE, "token": None}).encode(),
    "a wrong token": json.dumps({**WHOLE, "token": "1"}).encode(),
    "a field too few": json.dumps({k: v for k, v in WHOLE.items() if k != "outcome"}).encode(),
    "a field too many": json.dumps({**WHOLE, "colour": "red"}).encode(),
    "a record that is no text": json.dumps({**WHOLE, "record_id": 1}).encode(),
    "an error that is no text": json.dumps({**WHOLE, "error": ["no"]}).encode(),
    "data that is none": json.dumps({**WHOLE, "data": None}).encode(),
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
async def test_a_corrupt_entry_is_told_once_and_set_aside_and_the_others_are_drained(
    folder: FolderSpool, content: bytes
) -> None:
    whole = make_entry(2)
    await folder.put(whole)
    (folder.folder / "broken.json").write_bytes(content)
    reader = Reader()
    (trouble,) = await folder.drain(reader)
    assert "broken.json cannot be read and is set aside" in str(trouble)
    assert reader.entries == [whole]
    assert (folder.folder / "broken.corrupt").read_bytes() == content
    assert await folder.drain(reader) == []


async def test_an_entry_of_an_earlier_version_is_read(folder: FolderSpool) -> None:
    entry = make_entry(1)
    await folder.put(entry)
    (file,) = folder.folder.iterdir()
    file.write_text(
        json.dumps({k: v for k, v in json.loads(entry.dump()).items() if k != "keeps_error"})
    )
    reader = Reader()
    assert await folder.drain(reader) == []
    assert reader.entries == [replace(entry, keeps_error=False)]


async def test_an_entry_that_cannot_be_opened_is_told_and_the_others_are_drained(
    folder: FolderSpool,
) -> None:
    whole = make_entry(2)
    await folder.put(whole)
    (folder.folder / "strange.json").mkdir()
    reader = Reader()
    (trouble,) = await folder.drain(reader)
    assert "strange.json cannot be read" in str(trouble)
    assert reader.entries == [whole]


async def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    unwritable = FolderSpool(tmp_path / "file" / "database")
    with pytest.raises(NoSpool, match=r"cannot be written: .*(Not a directory|File exists)"):
        await unwritable.put(make_entry(1))
    (trouble,) = await unwritable.drain(Reader())
    assert "cannot be read" in str(trouble)
    with pytest.raises(NoSpool, match="cannot be read"):
        await unwritable.depth()


async def test_a_full_disk_is_told_and_leaves_nothing_half_written(
    folder: FolderSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(NoSpool, match=r"cannot be written: .*No space left on device"):
        await folder.put(make_entry(1))
    assert list(folder.folder.iterdir()) == []


async def test_a_full_spool_takes_no_more_until_it_is_drained(
    folder: FolderSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MOST_ENTRIES", 2)
    for number in range(2):
        await folder.put(make_entry(number))
    with pytest.raises(NoSpool, match="is full: it holds 2 entries"):
        await folder.put(make_entry(2))
    reader = Reader()
    await folder.drain(reader)
    assert sorted(entry.record_id for entry in reader.entries) == ["0", "1"]
    await folder.put(make_entry(2))


async def test_two_drains_at_once_settle_an_entry_once(folder: FolderSpool) -> None:
    settled: list[UUID] = []
    writing, may_write = asyncio.Event(), asyncio.Event()

    async def write(entry: Entry) -> bool:
        settled.append(entry.token)
        writing.set()
        await may_write.wait()
        return True

    tokens = []
    for number in range(3):
        entry = make_entry(number)
        tokens.append(entry.token)
        await folder.put(entry)
    first = asyncio.create_task(folder.drain(write))
    await writing.wait()
    second = asyncio.create_task(folder.drain(write))
    may_write.set()
    assert [*await asyncio.gather(first, second)] == [[], []]
    assert sorted(settled) == sorted(tokens)
    assert await folder.depth() == 0


async def test_what_a_drain_could_not_write_ends_it_and_stays(folder: FolderSpool) -> None:
    for number in range(3):
        await folder.put(make_entry(number))
    tries = 0

    async def refuse(_entry: Entry) -> bool:
        nonlocal tries
        tries += 1
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        await folder.drain(refuse)
    assert (tries, await folder.depth()) == (1, 3)


async def test_one_entry_that_cannot_be_written_does_not_hold_up_the_same_others_for_ever(
    folder: FolderSpool,
) -> None:
    locked, other = (make_entry(number, token=UUID(int=number)) for number in (1, 2))
    for entry in (locked, other):
        await folder.put(entry)

    async def write(entry: Entry) -> bool:
        if entry == locked:
            raise TimeoutError
        return True

    for _ in range(100):  # each begins with another entry, by chance
        with pytest.raises(TimeoutError):
            await folder.drain(write)
    assert await folder.depth() == 1


def find_no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    "locks", [None, SimpleNamespace(flock=find_no_locks, LOCK_EX=2, LOCK_NB=4)]
)
async def test_where_there_are_no_locks_it_is_drained_all_the_same(
    folder: FolderSpool, locks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows, on some network drives: there the token guards alone."""
    monkeypatch.setattr(spool, "fcntl", locks)
    await folder.put(make_entry(1))
    reader = Reader()
    assert await folder.drain(reader) == []
    assert (len(reader.entries), await folder.depth()) == (1, 0)


async def test_a_drain_that_is_cancelled_leaves_its_entry_to_the_next(folder: FolderSpool) -> None:
    await folder.put(make_entry(1))
    writing = asyncio.Event()

    async def hang(_entry: Entry) -> bool:
        writing.set()
        await asyncio.Event().wait()
        return True

    drain = asyncio.create_task(folder.drain(hang))
    await writing.wait()
    drain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drain
    reader = Reader()
    assert await folder.drain(reader) == []
    assert len(reader.entries) == 1


PUT_FOR_EVER = """
import asyncio, sys
from pathlib import Path
from tests.outages import make_entry
from unstuck.db.spool import FolderSpool

async def put_for_ever(folder):
    while True:
        entry = make_entry(1, error="x" * 300_000)
        await FolderSpool(folder).put(entry)
        print(entry.token, flush=True)

asyncio.run(put_for_ever(Path(sys.argv[1])))
"""


def put_until_killed(folder: Path, number: int) -> list[UUID]:
    """The entries that the process had put, by its own word, when it was killed."""
    putting = [sys.executable, "-c", PUT_FOR_EVER, str(folder)]
    with subprocess.Popen(putting, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        tokens = [process.stdout.readline() for _ in range(number)]
        process.send_signal(signal.SIGKILL)
        tokens += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    return [UUID(token.strip()) for token in tokens if token.endswith("\n")]


async def test_a_process_that_is_killed_while_it_puts_leaves_entries_whole_or_not_at_all(
    folder: FolderSpool,
) -> None:
    put: set[UUID] = set()
    for number in (1, 5, 20):
        put |= set(await asyncio.to_thread(put_until_killed, folder.folder, number))
    reader = Reader()
    assert await folder.drain(reader) == []
    assert {len(entry.error or "") for entry in reader.entries} == {300_000}
    found = {entry.token for entry in reader.entries}
    assert put <= found
    assert len(found) <= len(put) + 3  # one for each process that could not say so any more


LOCK_AND_WAIT = """
import asyncio, sys
from pathlib import Path
from unstuck.db.spool import FolderSpool

async def hang(entry):
    print("draining", flush=True)
    await asyncio.Event().wait()

asyncio.run(FolderSpool(Path(sys.argv[1])).drain(hang))
"""


def start_draining(folder: FolderSpool) -> subprocess.Popen[bytes]:
    draining = [sys.executable, "-c", LOCK_AND_WAIT, str(folder.folder)]
    return subprocess.Popen(draining, cwd=ROOT, stdout=subprocess.PIPE)


@pytest.fixture
async def drainer(folder: FolderSpool) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Another process, in the midst of draining an entry."""
    await folder.put(make_entry(1))
    with start_draining(folder) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"draining\n"
        yield process
        process.kill()


async def test_an_entry_that_another_process_drains_is_left_to_it_until_it_dies(
    folder: FolderSpool, drainer: subprocess.Popen[bytes]
) -> None:
    reader = Reader()
    assert await folder.drain(reader) == []
    assert (reader.entries, await folder.depth()) == ([], 1)
    drainer.kill()
    await asyncio.to_thread(drainer.wait)
    assert await folder.drain(reader) == []
    assert (len(reader.entries), await folder.depth()) == (1, 0)
