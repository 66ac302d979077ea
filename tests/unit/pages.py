"""A model with three status columns, and models made to measure, for tests of the registry."""

import enum
from datetime import datetime
from typing import Any

from sqlalchemy import Boolean, DateTime, Enum, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from unstuck import Registry
from unstuck.registry import Workflow


class Base(DeclarativeBase):
    pass


class Shouted(enum.Enum):
    QUEUED = 1
    PROCESSING = 2
    COMPLETE = 3
    FAILED = 4


class Quiet(enum.StrEnum):
    queued = "q"
    processing = "p"
    completed = "c"
    error = "e"


class Page(Base):
    __tablename__ = "pages"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Shouted] = mapped_column(Enum(Shouted))
    error: Mapped[str | None] = mapped_column(String(100))
    page_status: Mapped[Quiet] = mapped_column(Enum(Quiet))
    page_error: Mapped[str | None] = mapped_column(Text)
    sitemap_status: Mapped[Quiet] = mapped_column("sitemap_state", Enum(Quiet))
    updated_at: Mapped[datetime] = mapped_column(DateTime)
    lease_until: Mapped[datetime | None] = mapped_column("leased", DateTime(timezone=True))
    retry_at: Mapped[datetime | None] = mapped_column(DateTime)
    strikes: Mapped[int] = mapped_column(Integer)
    idempotent: Mapped[bool] = mapped_column(Boolean)


def register(**given: Any) -> Workflow:
    return Registry().register(Page, **given)


def model_with(**columns: Any) -> type[Any]:
    """A model of the test's own, called Job, with an id, updated_at and these columns."""

    class OwnBase(DeclarativeBase):
        pass

    usual = {
        "id": mapped_column(Integer, primary_key=True),
        "updated_at": mapped_column(DateTime),
    }
    return type("Job", (OwnBase,), {"__tablename__": "jobs", **usual, **columns})
