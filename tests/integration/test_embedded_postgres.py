"""The tests' own ground: if these fail, believe no other."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import asyncpg
import psutil
import pytest

from tests.database import Database
from tools.embedded_postgres import EmbeddedPostgres
from tools.postgres_binaries import Account, binaries

ROOT = Path(__file__).parents[2]

# Starts a server, says which, and waits to be ended.
START_AND_WAIT = """
from tools.embedded_postgres import EmbeddedPostgres
with EmbeddedPostgres(18) as server:
    print(server.pid, server._home, flush=True)
    input()
"""


async def ask(server: EmbeddedPostgres, sql: str, database: str = "postgres") -> object:
    connection = await asyncpg.connect(server.url(database, driver="postgresql"))
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_each_kind_of_database_serves_and_keeps_what_is_committed(database: Database) -> None:
    await database.execute("CREATE TABLE pages (id integer)")
    await database.execute("INSERT INTO pages VALUES (:id)", id=7)

    assert [row.id for row in await database.execute("SELECT id FROM pages")] == [7]


async def test_a_test_starts_with_an_empty_database(database: Database) -> None:
    # The test above made a table of this name, on the same server.
    await database.execute("CREATE TABLE pages (id integer)")

    assert await database.execute("SELECT id FROM pages") == []


async def test_the_server_is_the_version_that_was_asked_for(postgres: Database) -> None:
    [[version]] = await postgres.execute("SHOW server_version_num")

    assert postgres.server is None or int(version) // 10000 == postgres.server.version


async def test_what_was_committed_survives_a_kill(own_postgres: EmbeddedPostgres) -> None:
    port, pid = own_postgres.port, own_postgres.pid
    await ask(own_postgres, "CREATE TABLE pages AS SELECT 7 AS id")

    own_postgres.kill()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await ask(own_postgres, "SELECT 1")
    own_postgres.start()

    assert (own_postgres.port, own_postgres.pid != pid) == (port, True)
    assert await ask(own_postgres, "SELECT id FROM pages") == 7


async def test_a_kill_takes_every_process_of_the_server(own_postgres: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(own_postgres.url(driver="postgresql"))
    backend = await connection.fetchval("SELECT pg_backend_pid()")

    own_postgres.kill()

    assert not is_alive(backend)
    connection.terminate()


async def test_a_stale_pid_file_that_says_ready_does_not_fool_a_start(
    own_postgres: EmbeddedPostgres,
) -> None:
    dead = own_postgres.pid
    own_postgres.kill()
    stale = (own_postgres._data / "postmaster.pid").read_text().splitlines()
    assert (stale[0], stale[7].strip()) == (str(dead), "ready")

    own_postgres.start()

    # It returned for the new server's word, so the very first connection is served.
    assert await ask(own_postgres, "SELECT 1") == 1
    assert own_postgres.pid != dead


async def test_a_start_waits_for_its_port_to_become_free(own_postgres: EmbeddedPostgres) -> None:
    own_postgres.kill()
    squatter = await asyncio.start_server(lambda *_: None, "127.0.0.1", own_postgres.port)
    starting = asyncio.create_task(asyncio.to_thread(own_postgres.start))
    with pytest.raises(TimeoutError):  # while the port is taken it does not come up
        await asyncio.wait_for(asyncio.shield(starting), timeout=0.3)

    squatter.close()
    await starting

    assert await ask(own_postgres, "SELECT 1") == 1


async def test_two_servers_run_side_by_side(own_postgres: EmbeddedPostgres) -> None:
    with EmbeddedPostgres(16) as other:
        assert other.port != own_postgres.port
        assert await ask(other, "SELECT 1") == await ask(own_postgres, "SELECT 1") == 1


async def test_a_database_is_cloned_from_a_template(own_postgres: EmbeddedPostgres) -> None:
    own_postgres.create_database("original")
    await ask(own_postgres, "CREATE TABLE pages AS SELECT 7 AS id", database="original")

    own_postgres.create_database('the "copy"', template="original")
    own_postgres.create_database("copy", template="original")

    assert await ask(own_postgres, "SELECT id FROM pages", database="copy") == 7
    own_postgres.drop_database("copy")
    own_postgres.drop_database('the "copy"')
    assert await ask(own_postgres, "SELECT count(*) FROM pg_database WHERE datname ~ 'copy'") == 0


async def test_settings_reach_the_server() -> None:
    with EmbeddedPostgres(18, settings={"max_connections": "17"}, fsync=True) as server:
        assert await ask(server, "SHOW max_connections") == "17"
        assert await ask(server, "SHOW fsync") == "on"


def test_a_stop_leaves_nothing_behind() -> None:
    with EmbeddedPostgres(18) as server:
        pid, data = server.pid, server._data

    assert not psutil.pid_exists(pid)
    assert not data.parent.exists()


def test_a_data_dir_that_was_given_is_kept_and_used_again(tmp_path: Path) -> None:
    if os.geteuid() == 0:  # pytest's directories are closed to the account that the server runs as
        for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
            parent.chmod(0o755)
    data = tmp_path / "data"
    with EmbeddedPostgres(18, data_dir=data) as server:
        server.create_database("kept")

    with EmbeddedPostgres(18, data_dir=data) as server:
        server.drop_database("kept")


def test_the_server_does_not_outlive_a_killed_test_process() -> None:
    tests = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tests.stdout is not None
    pid, home = tests.stdout.readline().split()
    assert is_alive(int(pid))

    tests.kill()
    tests.communicate()

    deadline = time.monotonic() + 10
    while Path(home).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(home).exists()
    assert not is_alive(int(pid))


def test_the_server_never_runs_as_root(own_postgres: EmbeddedPostgres) -> None:
    assert psutil.Process(own_postgres.pid).uids().real != 0


def test_binaries_that_the_account_may_not_read_are_copied_to_where_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Account, "may_read", lambda *_: False)

    first = binaries(18, Account())
    second = binaries(18, Account())

    assert first == second
    assert first.is_relative_to(tmp_path)
    assert [place.stat().st_mode & 0o777 for place in tmp_path.iterdir()] == [0o755]
    answer = subprocess.run([first / "psql", "--version"], capture_output=True, text=True)
    assert "18" in answer.stdout, answer.stderr
