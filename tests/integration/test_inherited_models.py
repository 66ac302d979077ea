"""Models that share a table, or are spread over several: only the registered class is touched."""

from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import DateTime, Enum, ForeignKey, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from tests.database import Database
from tests.integration.models import State, prepare, read, record_ids, sweep
from tests.jobs import ago


class Base(DeclarativeBase):
    pass


class Document(Base):
    """Status in the children, updated_at here."""

    __tablename__ = "documents"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "document"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class Invoice(Document):
    __tablename__ = "invoices"
    __mapper_args__ = {"polymorphic_identity": "invoice"}  # noqa: RUF012

    invoice_id: Mapped[int] = mapped_column(ForeignKey("documents.id"), primary_key=True)
    status: Mapped[State] = mapped_column(Enum(State, name="invoice_state"))
    error: Mapped[str | None] = mapped_column(Text)


class Letter(Document):
    __tablename__ = "letters"
    __mapper_args__ = {"polymorphic_identity": "letter"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(ForeignKey("documents.id"), primary_key=True)
    status: Mapped[State] = mapped_column(Enum(State, name="letter_state"))


class Task(Base):
    """Status here, one table per child besides."""

    __tablename__ = "tasks"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "task"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    status: Mapped[State] = mapped_column(Enum(State, name="task_state"))
    error: Mapped[str | None] = mapped_column(Text)
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class Fetch(Task):
    __tablename__ = "fetches"
    __mapper_args__ = {"polymorphic_identity": "fetch"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    address: Mapped[str] = mapped_column(default="")


class Mail(Task):
    __tablename__ = "mails"
    __mapper_args__ = {"polymorphic_identity": "mail"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(ForeignKey("tasks.id"), primary_key=True)


class Animal(Base):
    """All in one table."""

    __tablename__ = "animals"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    status: Mapped[State] = mapped_column(Enum(State, name="animal_state"))
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class Dog(Animal):
    __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012


class Poodle(Dog):
    __mapper_args__ = {"polymorphic_identity": "poodle"}  # noqa: RUF012


class Cat(Animal):
    __mapper_args__ = {"polymorphic_identity": "cat"}  # noqa: RUF012


def stuck(model: Any, key: int) -> Any:
    return model(id=key, status=State.processing)


async def statuses(database: Database, model: Any) -> dict[str, State]:
    return {f"{record.kind} {record.id}": record.status for record in await read(database, model)}


@pytest.mark.parametrize("batch_size", [1000, 1])
async def test_status_in_the_child_and_updated_at_in_the_parent(
    database: Database, batch_size: int
) -> None:
    fresh = Invoice(id=3, status=State.processing, updated_at=ago(300))
    records = [stuck(Invoice, 1), stuck(Invoice, 2), fresh, stuck(Letter, 4)]
    await prepare(database, *records)
    report = await sweep(database, Invoice, batch_size=batch_size)
    assert report.left_processing == 2
    one, two, three = await read(database, Invoice)
    assert (one.status, two.status) == (State.queued, State.queued)
    assert one.error.startswith("Auto-reset")
    assert one.updated_at.replace(tzinfo=None) > ago(60).replace(tzinfo=None)
    assert (three.status, three.error) == (State.processing, None)
    assert await statuses(database, Letter) == {"letter 4": State.processing}
    assert await record_ids(database) == ["1", "2"]


async def test_status_in_the_parent_and_one_child_registered(database: Database) -> None:
    await prepare(database, stuck(Fetch, 1), stuck(Mail, 2), stuck(Task, 3))
    report = await sweep(database, Fetch)
    assert report.left_processing == 1
    assert await statuses(database, Task) == {
        "fetch 1": State.queued,
        "mail 2": State.processing,
        "task 3": State.processing,
    }


async def test_a_registered_parent_takes_its_children_along(database: Database) -> None:
    await prepare(database, stuck(Fetch, 1), stuck(Mail, 2), stuck(Task, 3))
    report = await sweep(database, Task)
    assert report.left_processing == 3
    assert set((await statuses(database, Task)).values()) == {State.queued}


async def test_siblings_in_the_same_table_are_left_alone(database: Database) -> None:
    records = [stuck(Animal, 1), stuck(Dog, 2), stuck(Poodle, 3), stuck(Cat, 4)]
    await prepare(database, *records)
    report = await sweep(database, Dog)
    assert report.left_processing == 2
    assert await statuses(database, Animal) == {
        "animal 1": State.processing,
        "dog 2": State.queued,
        "poodle 3": State.queued,
        "cat 4": State.processing,
    }


async def test_reapable_may_be_said_of_a_column_in_the_parent_or_the_child(
    database: Database,
) -> None:
    rows = [Fetch(id=n, status=State.processing, address=a) for n, a in enumerate(["a", "b"])]
    await prepare(database, *rows)
    report = await sweep(database, Fetch, reapable=lambda model: model.address == "a")
    assert (report.total("requeued"), report.total("held")) == (1, 1)
    again = await sweep(database, Fetch, reapable=lambda model: model.kind == "fetch")
    assert again.left_processing == 0, "what is held stays so until it shows life"
    assert await statuses(database, Fetch) == {
        "fetch 0": State.queued,
        "fetch 1": State.processing,
    }


async def test_a_version_in_the_parent_counts_up_with_a_status_in_the_child(
    database: Database,
) -> None:
    class OwnBase(DeclarativeBase):
        pass

    class Parent(OwnBase):
        __tablename__ = "parents"
        id: Mapped[int] = mapped_column(primary_key=True)
        version: Mapped[int] = mapped_column()
        __mapper_args__ = {"version_id_col": version}  # noqa: RUF012

    class Child(Parent):
        __tablename__ = "children"
        id: Mapped[int] = mapped_column(ForeignKey("parents.id"), primary_key=True)
        status: Mapped[State] = mapped_column(Enum(State, name="child_state"))
        updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))

    await prepare(database, stuck(Child, 1))
    async with database.sessions() as session:
        late = await session.get_one(Child, 1)
        await session.commit()
        await sweep(database, Child)
        late.status = State.completed
        with pytest.raises(StaleDataError):
            await session.flush()
    assert [(c.status, c.version) for c in await read(database, Child)] == [(State.queued, 2)]
