"""The text of a key is the same in SQL and in Python, on every database."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    Uuid,
    insert,
    select,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeEngine

from tests.database import Database
from tests.integration.decorated_types import Guid, Ticket
from unstuck.identity import Key, as_list, is_one_of, key_matches, read_key, record_id, write_key

UUIDS = [uuid4(), UUID(int=0), UUID("12345678901234567890123456789012"), UUID(int=2**128 - 1)]
AWKWARD = ["a,b", "\\", "\\,", "it's", '"q"', "100%", ":x", " ", "", "üß😀", "line\nline"]


async def check_same(
    database: Database,
    kinds: Sequence[TypeEngine[Any]],
    stored: Sequence[Any],
    keys: Sequence[Key] | None = None,
) -> None:
    """`stored` are values as the application writes them, `keys` the same as unstuck reads them."""
    keys = stored if keys is None else keys
    columns = [Column(f"k{n}", kind, primary_key=True) for n, kind in enumerate(kinds)]
    table = Table("things", MetaData(), *columns)
    await database.create(table.metadata)
    names = [column.name for column in columns]
    async with database.engine.begin() as connection:
        rows = [dict(zip(names, key, strict=True)) for key in stored]
        await connection.execute(insert(table), rows)
        found = set((await connection.scalars(select(record_id(columns)))).all())
        assert found == {write_key(columns, key) for key in keys}
        for key in keys:
            text = write_key(columns, key)
            assert read_key(columns, text) == key
            one = select(record_id(columns)).where(*key_matches(columns, read_key(columns, text)))
            assert (await connection.scalars(one)).all() == [text]
        some = as_list(keys[:-1])
        these = select(record_id(columns)).where(is_one_of(columns, some))
        wanted = {write_key(columns, key) for key in keys[:-1]}
        assert set((await connection.scalars(these)).all()) == wanted


@pytest.mark.parametrize(
    ("kind", "most"), [(SmallInteger(), 2**15), (Integer(), 2**31), (BigInteger(), 2**63)]
)
async def test_integers(database: Database, kind: TypeEngine[Any], most: int) -> None:
    await check_same(database, [kind], [(0,), (7,), (-1,), (most - 1,), (-most,)])


@pytest.mark.parametrize(
    "kind",
    [
        Uuid(),
        Uuid(native_uuid=False),
        postgresql.UUID(),
        Guid(36),
        Guid(32),
    ],
    ids=["native", "not native", "dialect's own", "recipe", "recipe with hex"],
)
async def test_uuids(database: Database, kind: TypeEngine[Any]) -> None:
    if isinstance(kind, postgresql.UUID) and database.dialect == "sqlite":
        uuids = UUIDS[:1]  # SQLite takes a type of this name for a number: all digits would be one
    else:
        uuids = UUIDS
    await check_same(database, [kind], [(uuid,) for uuid in uuids])


@pytest.mark.parametrize("native", [True, False])
async def test_uuids_that_the_application_reads_as_text(database: Database, native: bool) -> None:
    kind = Uuid(as_uuid=False, native_uuid=native)
    stored = [(str(uuid),) for uuid in UUIDS]
    await check_same(database, [kind], stored, [(uuid,) for uuid in UUIDS])


@pytest.mark.parametrize("kind", [String(), String(50), Text()], ids=repr)
async def test_strings(database: Database, kind: TypeEngine[Any]) -> None:
    await check_same(database, [kind], [(word,) for word in AWKWARD])


async def test_composite_keys(database: Database) -> None:
    kinds: list[TypeEngine[Any]] = [BigInteger(), String(50), Uuid(), Text()]
    keys = [(n, word, UUIDS[n % 4], word[::-1]) for n, word in enumerate(AWKWARD)]
    await check_same(database, kinds, keys)


async def test_composite_keys_that_differ_only_in_their_comma(database: Database) -> None:
    await check_same(database, [Text(), Text()], [("a,", "b"), ("a", ",b"), ("a\\", "b")])


async def test_decorated_keys_are_written_as_they_are_stored(database: Database) -> None:
    await check_same(database, [Ticket()], [("T-5",), ("T-12",)], [(5,), (12,)])
