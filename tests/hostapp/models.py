import enum
from datetime import UTC, datetime
from uuid import UUID, uuid4

from sqlalchemy import DateTime, Enum, ForeignKey, Text, func
from sqlalchemy.orm import Mapped, mapped_column

from tests.hostapp.database import Base
from unstuck import recoverable


class SitemapFileStatus(enum.Enum):
    Queued = "Queued"
    Processing = "Processing"
    Completed = "Completed"
    Error = "Error"


class PageStatus(enum.Enum):
    Queued = "Queued"
    Processing = "Processing"
    Complete = "Complete"
    Error = "Error"


def utc_now() -> datetime:
    """Naive, as so many applications have it."""
    return datetime.now(UTC).replace(tzinfo=None)


class Timestamps:
    created_at: Mapped[datetime] = mapped_column(DateTime, server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(DateTime, default=utc_now, onupdate=utc_now)


@recoverable
class SitemapFile(Timestamps, Base):
    __tablename__ = "sitemap_files"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    url: Mapped[str] = mapped_column(Text)
    status: Mapped[SitemapFileStatus] = mapped_column(
        Enum(SitemapFileStatus, name="sitemap_file_status"), default=SitemapFileStatus.Queued
    )
    error: Mapped[str | None] = mapped_column(Text)


page_status = Enum(PageStatus, name="page_status")


@recoverable(status="page_processing_status")
@recoverable(status="content_status", error="content_error", threshold=30 * 60)
@recoverable(
    status="index_status",
    queued=PageStatus.Queued,
    processing=PageStatus.Processing,
    failed=PageStatus.Error,
)
class Page(Timestamps, Base):
    __tablename__ = "pages"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    sitemap_file_id: Mapped[UUID | None] = mapped_column(ForeignKey("sitemap_files.id"))
    url: Mapped[str] = mapped_column(Text)
    page_processing_status: Mapped[PageStatus] = mapped_column(
        page_status, default=PageStatus.Queued
    )
    page_processing_error: Mapped[str | None] = mapped_column(Text)
    content_status: Mapped[PageStatus | None] = mapped_column(page_status)
    content_error: Mapped[str | None] = mapped_column(Text)
    index_status: Mapped[PageStatus | None] = mapped_column(page_status)
    index_error: Mapped[str | None] = mapped_column(Text)
