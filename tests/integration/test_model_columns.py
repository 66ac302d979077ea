"""Columns as they are found: odd names, short texts, versions, and a say in what may be redone."""

from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Boolean, DateTime, Enum, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from tests.database import Database
from tests.integration.models import State, prepare, read, record_ids, sweep


class Base(DeclarativeBase):
    pass


class Plain(Base):
    __abstract__ = True

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[State] = mapped_column(Enum(State), default=State.processing)
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class Odd(Base):
    """Every name needs its quotes."""

    __tablename__ = 'the "order" of 100%'

    key: Mapped[int] = mapped_column("primary", primary_key=True)
    status: Mapped[State] = mapped_column("100%", Enum(State, name="odd state"))
    error: Mapped[str | None] = mapped_column('the "error"', String(200))
    updated_at: Mapped[datetime] = mapped_column("order", DateTime(timezone=True))
    lease: Mapped[datetime | None] = mapped_column("Lease Until", DateTime(timezone=True))
    strikes: Mapped[int] = mapped_column("50% of s", default=0)
    again: Mapped[datetime | None] = mapped_column("a:b", DateTime(timezone=True))
    safe: Mapped[bool] = mapped_column("select", Boolean, default=True)


@pytest.mark.parametrize("batch_size", [1000, 1])
async def test_names_that_need_their_quotes(database: Database, batch_size: int) -> None:
    await prepare(database, *(Odd(key=n, status=State.processing) for n in (1, 2)))
    await sweep(
        database,
        Odd,
        batch_size=batch_size,
        lease="Lease Until",
        zombie_count="strikes",
        retry_at="a:b",
        reapable="select",
    )
    records = await read(database, Odd)
    assert [(record.status, record.strikes) for record in records] == [(State.queued, 1)] * 2
    assert records[0].error.startswith("Auto-reset from stuck Processing state: strike 1 of 3")
    assert await record_ids(database) == ["1", "2"]


class Short(Plain):
    __tablename__ = "short_errors"
    error: Mapped[str | None] = mapped_column(String(12))


class Long(Plain):
    __tablename__ = "long_errors"
    error: Mapped[str | None] = mapped_column(Text)


class Silent(Plain):
    __tablename__ = "no_errors"


async def test_an_error_is_cut_to_the_length_of_its_column(database: Database) -> None:
    await prepare(database, Short())
    await sweep(database, Short)
    assert [record.error for record in await read(database, Short)] == ["Auto-reset f"]


async def test_an_error_without_a_limit_is_written_in_full(database: Database) -> None:
    await prepare(database, Long())
    await sweep(database, Long)
    (record,) = await read(database, Long)
    assert record.error.startswith("Auto-reset from stuck Processing state: strike 1 of 3, no ")
    assert record.error.endswith(" s, cause aged")


async def test_a_model_without_an_error_column_comes_back_as_well(database: Database) -> None:
    await prepare(database, Silent())
    await sweep(database, Silent)
    assert [record.status for record in await read(database, Silent)] == [State.queued]


class Versioned(Base):
    __tablename__ = "versioned"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[State] = mapped_column(Enum(State), default=State.processing)
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    version: Mapped[int] = mapped_column("ver")
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


async def test_an_object_that_was_loaded_before_the_sweep_cannot_be_written_after_it(
    database: Database,
) -> None:
    await prepare(database, Versioned(id=1))
    async with database.sessions() as session:
        late = await session.get_one(Versioned, 1)
        await session.commit()
        await sweep(database, Versioned)
        late.status = State.completed
        with pytest.raises(StaleDataError):
            await session.flush()
    (record,) = await read(database, Versioned)
    assert (record.status, record.version) == (State.queued, 2)


class Choosy(Plain):
    __tablename__ = "choosy"
    kind: Mapped[str | None] = mapped_column(String(10))
    safe: Mapped[bool | None] = mapped_column("is_safe")


async def held_ids(database: Database) -> set[int]:
    rows = await database.execute("SELECT record_id FROM zombie_records WHERE held_at IS NOT NULL")
    return {int(row.record_id) for row in rows}


@pytest.mark.parametrize(
    "reapable",
    ["safe", "is_safe", Choosy.safe, lambda model: model.kind == "x"],
    ids=["attribute's name", "column's name", "attribute", "callable"],
)
async def test_a_record_itself_may_say_whether_it_may_run_again(
    database: Database, reapable: Any
) -> None:
    records = [
        Choosy(id=1, kind="x", safe=True),
        Choosy(id=2, kind="y", safe=False),
        Choosy(id=3, kind=None, safe=None),
    ]
    await prepare(database, *records)
    report = await sweep(database, Choosy, reapable=reapable)
    assert (report.total("requeued"), report.total("held")) == (1, 2)
    left = [record.status for record in await read(database, Choosy)]
    assert left == [State.queued, State.processing, State.processing]
    assert await held_ids(database) == {2, 3}


async def test_a_workflow_that_may_not_be_repeated_holds_every_record(database: Database) -> None:
    await prepare(database, Choosy(id=1), Choosy(id=2))
    report = await sweep(database, Choosy, reapable=False)
    assert (report.left_processing, report.total("held")) == (0, 2)
    assert await held_ids(database) == {1, 2}
