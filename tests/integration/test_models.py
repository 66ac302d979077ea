"""A sweep brings back records whatever kind of status their model has, and wherever it lies."""

from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import DateTime, Enum, Integer, String, Text
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, declared_attr, mapped_column

from tests.database import Database
from tests.integration.decorated_types import Letter
from tests.integration.models import State, prepare, read, sweep
from tests.jobs import ago


class Base(DeclarativeBase):
    @declared_attr.directive
    def __tablename__(cls) -> str:
        return cls.__name__.lower()


class Plain(Base):
    __abstract__ = True

    id: Mapped[int] = mapped_column(primary_key=True)
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


def values(members: Any) -> list[str]:
    return [member.value for member in members]


class ByName(Plain):
    status: Mapped[State] = mapped_column(Enum(State, name="by_name"))


class ByValue(Plain):
    status: Mapped[State] = mapped_column(Enum(State, name="by_value", values_callable=values))


class NotNative(Plain):
    status: Mapped[State] = mapped_column(Enum(State, native_enum=False, create_constraint=True))


class Decorated(Plain):
    status: Mapped[State] = mapped_column(Letter)


class Renamed(Plain):
    stage: Mapped[State] = mapped_column("status_code", Enum(State, name="renamed_state"))
    problem: Mapped[str | None] = mapped_column("error_text", Text)
    touched: Mapped[datetime | None] = mapped_column("touched_on", DateTime)


@pytest.mark.parametrize("model", [ByName, ByValue, NotNative, Decorated])
async def test_every_kind_of_enum(database: Database, model: Any) -> None:
    records = [model(id=n, status=status) for n, status in enumerate(State)]
    fresh = model(id=9, status=State.processing, updated_at=ago(300))
    await prepare(database, *records, fresh)
    report = await sweep(database, model, queued=State.queued, processing=State.processing)
    assert report.left_processing == 1
    left = [State.queued, State.queued, State.completed, State.failed, State.processing]
    assert [record.status for record in await read(database, model)] == left


async def test_attributes_that_are_named_unlike_their_columns(database: Database) -> None:
    await prepare(
        database, Renamed(id=1, stage=State.processing, touched=ago(7200).replace(tzinfo=None))
    )
    await sweep(database, Renamed, error="problem", updated_at=Renamed.touched)
    (record,) = await read(database, Renamed)
    assert record.stage is State.queued
    assert record.problem.startswith("Auto-reset")
    assert record.touched > ago(60).replace(tzinfo=None)


class WithText(Plain):
    status: Mapped[str] = mapped_column(String(20))


class WithCode(Plain):
    status: Mapped[int] = mapped_column(Integer)


class WithLabels(Plain):
    status: Mapped[str] = mapped_column(Enum("Queued", "Processing", "Failed", name="labels"))


@pytest.mark.parametrize(
    ("model", "queued", "processing"),
    [
        (WithText, "new", "it's 100% :busy"),
        (WithText, State.queued, State.processing),
        (WithCode, 0, 1),
        (WithLabels, "Queued", "Processing"),
    ],
)
async def test_statuses_that_are_no_members(
    database: Database, model: Any, queued: Any, processing: Any
) -> None:
    written = [getattr(status, "value", status) for status in (queued, processing)]
    await prepare(database, *(model(status=status) for status in written))
    report = await sweep(database, model, queued=queued, processing=processing)
    assert report.left_processing == 1
    assert [record.status for record in await read(database, model)] == [written[0]] * 2


async def test_several_statuses_that_mean_processing(database: Database) -> None:
    statuses = ["fetching", "parsing", "waiting for a human", "new"]
    await prepare(database, *(WithText(status=status) for status in statuses))
    await sweep(database, WithText, queued="new", processing=["fetching", "parsing"])
    left = [record.status for record in await read(database, WithText)]
    assert left == ["new", "new", "waiting for a human", "new"]


async def test_an_enum_type_that_the_host_created_itself(postgres: Database) -> None:
    class OwnBase(DeclarativeBase):
        pass

    class Foreign(OwnBase):
        __tablename__ = "foreign_enum"
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[State] = mapped_column(
            postgresql.ENUM(State, name="host_state", create_type=False)
        )
        updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))

    await postgres.execute(
        "CREATE TYPE host_state AS ENUM ('queued', 'processing', 'completed', 'failed')"
    )
    await prepare(postgres, Foreign(status=State.processing))
    await sweep(postgres, Foreign)
    assert [record.status for record in await read(postgres, Foreign)] == [State.queued]


async def test_a_model_with_a_schema(postgres: Database) -> None:
    class OwnBase(DeclarativeBase):
        pass

    class InSchema(OwnBase):
        __tablename__ = "work items"
        __table_args__ = {"schema": "Host"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[State] = mapped_column(Enum(State, schema="Host", name="State"))
        updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))

    await postgres.execute('CREATE SCHEMA "Host"')
    await prepare(postgres, *(InSchema(status=State.processing) for _ in range(3)))
    report = await sweep(postgres, InSchema, batch_size=1)
    assert report.left_processing == 3
    assert {record.status for record in await read(postgres, InSchema)} == {State.queued}
