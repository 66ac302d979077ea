"""The application's own tables: invoices, whose status column is the queue, and their deliveries.

A delivery is the effect of the work. Nothing in the table forbids a second one for the same
invoice: if there is never more than one, then because nobody could commit it.
"""

import enum
from datetime import datetime

from sqlalchemy import DateTime, ForeignKey, Text, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from unstuck import recoverable


class Base(DeclarativeBase):
    pass


class Status(enum.Enum):
    Queued = "Queued"
    Processing = "Processing"
    Completed = "Completed"
    Failed = "Failed"


@recoverable
class Invoice(Base):
    __tablename__ = "invoices"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Status] = mapped_column(default=Status.Queued)
    error: Mapped[str | None] = mapped_column(Text)
    updated_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), server_default=func.now(), onupdate=func.now()
    )


class Delivery(Base):
    __tablename__ = "deliveries"

    id: Mapped[int] = mapped_column(primary_key=True)
    invoice_id: Mapped[int] = mapped_column(ForeignKey("invoices.id"))
    worker: Mapped[str] = mapped_column(Text)
