"""A sweep brings back records whatever their primary key, and finds them again by it."""

from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import BigInteger, DateTime, Enum, Index, SmallInteger, String, Text, Uuid, update
from sqlalchemy.orm import DeclarativeBase, Mapped, declared_attr, mapped_column

from tests.database import Database
from tests.integration.decorated_types import Guid, Ticket
from tests.integration.models import State, prepare, read, record_ids, sweep
from unstuck import Registry, Unstuck, ZombieSettings
from unstuck.errors import UnknownRecord


class Base(DeclarativeBase):
    @declared_attr.directive
    def __tablename__(cls) -> str:
        return cls.__name__.lower()


class Keyless:
    status: Mapped[State] = mapped_column(Enum(State), default=State.processing)
    error: Mapped[str | None] = mapped_column(Text)
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class WithInt(Keyless, Base):
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)


class WithUuid(Keyless, Base):
    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True)


class WithTextUuid(Keyless, Base):
    id: Mapped[UUID] = mapped_column(Uuid(native_uuid=False), primary_key=True)


class WithGuid(Keyless, Base):
    id: Mapped[UUID] = mapped_column(Guid, primary_key=True)


class WithString(Keyless, Base):
    id: Mapped[str] = mapped_column(String(50), primary_key=True)


class WithTicket(Keyless, Base):
    id: Mapped[str] = mapped_column(Ticket, primary_key=True)


class WithTwo(Keyless, Base):
    tenant: Mapped[str] = mapped_column(String(50), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)


def keys(*values: Any) -> list[dict[str, Any]]:
    return [{"id": value} for value in values]


UUIDS = sorted(uuid4() for _ in range(3))
UUID_TEXTS = [str(uuid) for uuid in UUIDS]
TENANTS = [
    {"tenant": "a,b", "number": 1},
    {"tenant": "a", "number": 2},
    {"tenant": "", "number": 3},
]


every_kind_of_key = pytest.mark.parametrize(
    ("model", "given", "texts"),
    [
        (WithInt, keys(1, -2, 2**40), ["-2", "1", "1099511627776"]),
        (WithUuid, keys(*UUIDS), UUID_TEXTS),
        (WithTextUuid, keys(*UUIDS), UUID_TEXTS),
        (WithGuid, keys(*UUIDS), UUID_TEXTS),
        (WithString, keys("a'b,%", "", "ü\\"), ["", "a'b,%", "ü\\"]),
        (WithTicket, keys("T-5", "T-6", "T-7"), ["5", "6", "7"]),
        (WithTwo, TENANTS, [",3", "a,2", "a\\,b,1"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)


@every_kind_of_key
@pytest.mark.parametrize("way", ["at once", "by keys", "walking"])
async def test_a_sweep_takes_every_one(
    database: Database, model: Any, given: list[dict[str, Any]], texts: list[str], way: str
) -> None:
    await prepare(database, *(model(**key) for key in given))
    if way == "walking":
        index = Index("for_walking", model.status, *model.__mapper__.primary_key)
        async with database.engine.begin() as connection:
            await connection.run_sync(index.create)
        model.__table__.indexes.discard(index)
    report = await sweep(database, model, batch_size=1000 if way == "at once" else 1)
    assert report.left_processing == 3
    assert [record.status for record in await read(database, model)] == [State.queued] * 3
    assert await record_ids(database) == texts


@every_kind_of_key
async def test_its_strikes_are_forgotten_once_it_completed(
    database: Database, model: Any, given: list[dict[str, Any]], texts: list[str]
) -> None:
    await prepare(database, *(model(**key) for key in given))
    await sweep(database, model)
    async with database.sessions.begin() as session:
        await session.execute(update(model).values(status=State.completed))
    await sweep(database, model)
    assert await database.execute("SELECT 1 FROM zombie_records") == []


@every_kind_of_key
async def test_a_human_names_it_by_the_text_of_its_key(
    database: Database, model: Any, given: list[dict[str, Any]], texts: list[str]
) -> None:
    await prepare(database, *(model(**key) for key in given))
    registry = Registry()
    registry.register(model, name="work")
    unstuck = Unstuck(database.sessions, ZombieSettings(_env_file=None), registry)
    await unstuck.cancel("work", texts[1], by="me", why="a test")
    assert len(await unstuck.history("work", texts[1])) == 1
    assert await unstuck.history("work", texts[0]) == []
    statuses = sorted(record.status.name for record in await read(database, model))
    assert statuses == ["failed", "processing", "processing"]


class WithSmall(Keyless, Base):
    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)


@pytest.mark.parametrize("wrong", [2**15, 2**40, 2**63, "six", ""])
async def test_a_key_that_its_column_cannot_hold_is_of_no_record(
    database: Database, wrong: Any
) -> None:
    await prepare(database, WithSmall(id=1))
    registry = Registry()
    registry.register(WithSmall, name="work")
    unstuck = Unstuck(database.sessions, ZombieSettings(_env_file=None), registry)
    with pytest.raises(UnknownRecord):
        await unstuck.cancel("work", wrong, by="me", why="a test")


@pytest.mark.parametrize("model", [WithUuid, WithTextUuid, WithGuid])
async def test_a_human_may_write_a_uuid_in_any_way(database: Database, model: Any) -> None:
    await prepare(database, *(model(id=uuid) for uuid in UUIDS))
    registry = Registry()
    registry.register(model, name="work")
    unstuck = Unstuck(database.sessions, ZombieSettings(_env_file=None), registry)
    for uuid, way in zip(UUIDS, (UUIDS[0], UUIDS[1].hex, str(UUIDS[2]).upper()), strict=True):
        await unstuck.cancel("work", way, by="me", why="a test")
        assert len(await unstuck.history("work", uuid)) == 1
