"""Keeps what could not be written to the database until it can be.

By default a folder with one file an entry: written aside, synced, renamed, so that a kill at any
moment leaves an entry whole or not at all. A Redis takes its place where one is named. Entries
belong to one database each, and are readable by their owner only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import UUID

from sqlalchemy import Engine

from unstuck.errors import NoSpool, describe
from unstuck.settings import ZombieSettings

try:
    import fcntl
except ImportError:  # Windows has no such locks; two drains at once are refused by the token
    fcntl = None  # type: ignore[assignment]

Kept = TypeVar("Kept")

# More than that is no longer a spool but a second database.
MOST_ENTRIES = 10_000
_PATIENCE = 5.0
_REDIS = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True)
class Entry:
    """How a claim ended, which nobody could be told."""

    workflow: str
    record_id: str
    token: UUID
    worker_id: str
    outcome: str
    cause: str | None
    error: str | None
    data: dict[str, Any]
    keeps_error: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def load(text: str) -> Entry:
        values = json.loads(text)
        entry = Entry(**{**values, "token": UUID(values["token"])})
        words = (entry.workflow, entry.record_id, entry.worker_id, entry.outcome)
        maybe = (entry.cause or "", entry.error or "")
        if not (all(isinstance(w, str) for w in (*words, *maybe)) and isinstance(entry.data, dict)):
            raise ValueError("it is not an entry")
        return entry


# Whether the entry is settled, and can go.
Write = Callable[[Entry], Awaitable[bool]]


class Spool(Protocol):
    """Every failure is a `NoSpool` that says what and where."""

    async def put(self, entry: Entry) -> None: ...

    async def drain(self, write: Write) -> list[NoSpool]:
        """Has each entry written, and removes it if it was. What `write` raises ends the draining;
        what cannot be read is set aside and told."""

    async def depth(self) -> int: ...


def make_spool(settings: ZombieSettings, engine: Engine | None) -> Spool:
    """The spool for one database; `NoSpool` if there cannot be one."""
    said = None if settings.spool_url is None else settings.spool_url.get_secret_value()
    name = _fingerprint(engine)
    if said is None:
        root = _default_root()
        return FolderSpool(root / name, root)
    if said.startswith(_REDIS):
        return RedisSpool(said, name)
    return FolderSpool(Path(said.removeprefix("file://")) / name)


class FolderSpool:
    def __init__(self, folder: Path, root: Path | None = None) -> None:
        """`root`: a folder above it that has to be ours as well, where anybody could have made
        it first."""
        self.folder = folder
        self._roots = () if root is None else (root,)

    async def put(self, entry: Entry) -> None:
        """At once and without awaiting: this is what is left when everything else failed."""
        try:
            self._prepare()
            if len(self._paths()) >= MOST_ENTRIES:
                raise NoSpool(f"The spool {self.folder} is full: it holds {MOST_ENTRIES} entries.")
            self._write(entry)
        except OSError as error:
            raise NoSpool(f"The spool {self.folder} cannot be written: {error}.") from error

    async def drain(self, write: Write) -> list[NoSpool]:
        troubles = []
        try:
            paths = self._paths()
        except NoSpool as error:
            return [error]
        for path in _shuffled(paths):
            with ExitStack() as stack:
                entry = self._take(path, stack)
                if isinstance(entry, NoSpool):
                    troubles.append(entry)
                elif entry is not None and await write(entry):
                    path.unlink()
        return troubles

    async def depth(self) -> int:
        return len(self._paths())

    def _take(self, path: Path, stack: ExitStack) -> Entry | NoSpool | None:
        """Locked until the stack is left; None if another drain has it, or had it."""
        try:
            file = stack.enter_context(path.open("r+", encoding="utf-8", errors="replace"))
            if not _lock(file) or not path.exists():
                return None
            entry = _read(file.read(), path)
            if isinstance(entry, NoSpool):
                path.rename(path.with_suffix(".corrupt"))
        except FileNotFoundError:
            return None
        except OSError as error:
            return NoSpool(f"The spool entry {path} cannot be read: {error}.")
        return entry

    def _write(self, entry: Entry) -> None:
        aside = self.folder / f".{entry.token}.tmp"
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(entry.dump())
                file.flush()
                os.fsync(file.fileno())
            aside.rename(self.folder / f"{entry.token}.json")
        except OSError:
            aside.unlink(missing_ok=True)  # of a full disk, it would take the rest
            raise
        _sync(self.folder)

    def _paths(self) -> list[Path]:
        try:
            _refuse_strangers(self._roots)
            return [path for path in self.folder.iterdir() if path.suffix == ".json"]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise NoSpool(f"The spool {self.folder} cannot be read: {error}.") from error

    def _prepare(self) -> None:
        for folder in (self.folder.parent, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_strangers((*self._roots, self.folder))
        self.folder.chmod(0o700)


class RedisSpool:
    """One hash a database: the token, and the entry as JSON."""

    def __init__(self, url: str, name: str) -> None:
        try:
            self._redis = import_module("redis.asyncio")
        except ImportError:
            raise NoSpool("ZOMBIE_SPOOL_URL names a Redis: pip install 'unstuck[redis]'.") from None
        self._url = url
        self._key = f"unstuck:spool:{name}"

    async def put(self, entry: Entry) -> None:
        async with self._client() as client:
            if await client.hlen(self._key) >= MOST_ENTRIES:
                raise NoSpool(f"The spool in Redis is full: it holds {MOST_ENTRIES} entries.")
            await client.hset(self._key, str(entry.token), entry.dump())

    async def drain(self, write: Write) -> list[NoSpool]:
        try:
            async with self._client() as client:
                kept = await client.hgetall(self._key)
        except NoSpool as error:
            return [error]
        troubles = []
        for token, text in _shuffled(kept.items()):
            entry = _read(text, f"{self._key} {token}")
            if isinstance(entry, NoSpool):
                troubles.append(entry)
            elif not await write(entry):
                continue
            async with self._client() as client:
                if isinstance(entry, NoSpool):
                    await client.hset(f"{self._key}:corrupt", token, text)
                await client.hdel(self._key, token)
        return troubles

    async def depth(self) -> int:
        async with self._client() as client:
            return int(await client.hlen(self._key))

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        """A client for each use: it belongs to one event loop, and is hardly ever needed."""
        how = {"decode_responses": True, "encoding_errors": "replace"}
        try:
            client = self._redis.from_url(self._url, **how)
        except ValueError:  # in words that may quote the password
            raise NoSpool("ZOMBIE_SPOOL_URL names a Redis, but cannot be read.") from None
        try:
            async with asyncio.timeout(_PATIENCE), client:
                yield client
        except (self._redis.RedisError, OSError) as error:
            reason = describe(error)
            raise NoSpool(f"The spool in Redis cannot be reached: {reason}.") from error


def _read(text: str, where: object) -> Entry | NoSpool:
    try:
        return Entry.load(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return NoSpool(f"The spool entry {where} cannot be read and is set aside: {error}.")


def _shuffled(entries: Iterable[Kept]) -> list[Kept]:
    """One that cannot be written for now ends a draining: not before the same others each time."""
    several = list(entries)
    return random.sample(several, len(several))


def _lock(file: Any) -> bool:
    """Held until the file is closed, and so never by a process that is dead. Where there are no
    such locks the token guards alone."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _refuse_strangers(folders: Iterable[Path]) -> None:
    for folder in folders:
        if hasattr(os, "getuid") and folder.lstat().st_uid != os.getuid():
            raise NoSpool(f"The spool {folder} is somebody else's; set ZOMBIE_SPOOL_URL.")


def _sync(folder: Path) -> None:
    """That a rename lasts is up to the folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _default_root() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    try:
        return Path(tempfile.gettempdir()) / f"unstuck-spool-{user}"
    except OSError as error:
        raise NoSpool(f"There is no place for a spool: {error}; set ZOMBIE_SPOOL_URL.") from error


def _fingerprint(engine: Engine | None) -> str:
    """Tells databases apart, whatever driver or password one comes with."""
    if engine is None:
        return "database"
    url = engine.url
    if url.get_backend_name() == "sqlite":
        words = f"sqlite {Path(url.database or '').resolve()}"
    else:
        host, port = url.host or url.query.get("host"), url.port or url.query.get("port", 5432)
        words = f"{url.get_backend_name()} {host} {port} {url.database}"
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
