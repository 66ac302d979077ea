"""Where the spool is, whose it is, and for which database."""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from tests.outages import make_entry
from unstuck import ZombieSettings
from unstuck.db import Entry, make_spool
from unstuck.db.spool import FolderSpool
from unstuck.errors import NoSpool, SettingsError


@pytest.fixture
def folder(tmp_path: Path) -> FolderSpool:
    return FolderSpool(tmp_path / "spool" / "database")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_only_the_owner_may_read_it(folder: FolderSpool) -> None:
    before = os.umask(0)
    try:
        await folder.put(make_entry(1))
    finally:
        os.umask(before)
    (file,) = folder.folder.iterdir()
    assert mode_of(file) == 0o600
    assert mode_of(folder.folder) == 0o700
    assert mode_of(folder.folder.parent) == 0o700


async def test_a_folder_that_others_may_read_is_closed_to_them(folder: FolderSpool) -> None:
    folder.folder.mkdir(parents=True, mode=0o755)
    await folder.put(make_entry(1))
    assert mode_of(folder.folder) == 0o700


async def test_a_folder_of_somebody_else_is_not_written(
    folder: FolderSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.folder.mkdir(parents=True)
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(NoSpool, match="is somebody else's; set ZOMBIE_SPOOL_URL"):
        await folder.put(make_entry(1))
    assert list(folder.folder.iterdir()) == []


async def never(entry: Entry) -> bool:
    raise AssertionError(f"{entry} is not ours")


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderSpool:
    """The spool of an application that named none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("ZOMBIE_SPOOL_URL", raising=False)
    made = make_spool(ZombieSettings(_env_file=None), None)
    assert isinstance(made, FolderSpool)
    return made


async def test_by_default_it_is_a_folder_of_the_user_below_tmp(
    default: FolderSpool, tmp_path: Path
) -> None:
    await default.put(make_entry(1))
    assert default.folder == tmp_path / f"unstuck-spool-{os.getuid()}" / "database"
    assert mode_of(default.folder.parent) == 0o700


async def test_where_somebody_else_made_the_default_folder_first_it_is_neither_written_nor_read(
    default: FolderSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns the folder above may exchange what is in it."""
    await default.put(make_entry(1))
    stranger = os.getuid() + 1
    default.folder.parent.rename(tmp_path / f"unstuck-spool-{stranger}")
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    theirs = make_spool(ZombieSettings(_env_file=None), None)
    with pytest.raises(NoSpool, match="is somebody else's"):
        await theirs.put(make_entry(2))
    (trouble,) = await theirs.drain(never)
    assert "is somebody else's" in str(trouble)


async def test_without_any_place_for_temporary_files_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.delenv("ZOMBIE_SPOOL_URL", raising=False)
    with pytest.raises(NoSpool, match=r"no place for a spool.*set ZOMBIE_SPOOL_URL"):
        make_spool(ZombieSettings(_env_file=None), None)


def spool_at(url: str) -> Any:
    return make_spool(ZombieSettings(spool_url=url), None)


def test_a_folder_may_be_named_as_a_url(tmp_path: Path) -> None:
    assert spool_at(f"file://{tmp_path}").folder == tmp_path / "database"
    assert spool_at(str(tmp_path)).folder == tmp_path / "database"


def test_the_environment_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOMBIE_SPOOL_URL", str(tmp_path))
    made = make_spool(ZombieSettings(_env_file=None), None)
    assert isinstance(made, FolderSpool)
    assert made.folder == tmp_path / "database"


def test_a_url_of_another_kind_is_refused_without_showing_its_password() -> None:
    with pytest.raises(SettingsError, match="ZOMBIE_SPOOL_URL is refused") as refused:
        spool_at("valkey://:s3cret@cache:6379/0")
    assert "s3cret" not in str(refused.value)


async def folder_for(root: Path, url: str) -> Path:
    engine = create_async_engine(url)
    made = make_spool(ZombieSettings(spool_url=str(root)), engine.sync_engine)
    await engine.dispose()
    assert isinstance(made, FolderSpool)
    return made.folder


SAME = [
    "postgresql+asyncpg://app:one@db/app",
    "postgresql+asyncpg://other:two@db/app",
    "postgresql+asyncpg://db:5432/app",
]
DIFFERENT = [
    "postgresql+asyncpg://db/app",
    "postgresql+asyncpg://db/other",
    "postgresql+asyncpg://other/app",
    "postgresql+asyncpg://db:6432/app",
    "postgresql+asyncpg:///app?host=/run/one",
    "postgresql+asyncpg:///app?host=/run/two",
    "sqlite+aiosqlite:////one/app.db",
    "sqlite+aiosqlite:////two/app.db",
]


async def test_one_database_has_one_spool_whoever_connects_to_it(tmp_path: Path) -> None:
    assert len({await folder_for(tmp_path, url) for url in SAME}) == 1


async def test_different_databases_have_different_spools(tmp_path: Path) -> None:
    folders = {await folder_for(tmp_path, url) for url in DIFFERENT}
    assert len(folders) == len(DIFFERENT)


async def test_one_relative_path_is_two_databases_in_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        found.add(await folder_for(tmp_path, "sqlite+aiosqlite:///app.db"))
    assert len(found) == 2


async def test_no_password_is_in_the_name_of_a_spool(tmp_path: Path) -> None:
    assert "s3cret" not in str(await folder_for(tmp_path, "postgresql+asyncpg://app:s3cret@db/app"))
