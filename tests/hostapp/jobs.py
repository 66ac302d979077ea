"""What the application does in the background."""

import asyncio
import os
from uuid import UUID

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy.ext.asyncio import AsyncSession

from tests.hostapp.models import Page, PageStatus
from unstuck import run_job_loop

INTERVAL_SECONDS = os.environ.get("PAGE_INTERVAL_SECONDS")
FETCH_SECONDS = float(os.environ.get("PAGE_FETCH_SECONDS", "0"))


async def process_page(page_id: UUID, session: AsyncSession) -> None:
    page = await session.get_one(Page, page_id)
    await asyncio.sleep(FETCH_SECONDS)  # it is fetched
    page.content_status = PageStatus.Queued
    await session.commit()


async def process_pages() -> None:
    await run_job_loop(
        model=Page,
        status_enum=PageStatus,
        queued_status=PageStatus.Queued,
        processing_status=PageStatus.Processing,
        completed_status=PageStatus.Complete,
        failed_status=PageStatus.Error,
        processing_function=process_page,
        batch_size=10,
        order_by_column=Page.created_at,
        status_field_name="page_processing_status",
        error_field_name="page_processing_error",
    )


def schedule_jobs(scheduler: AsyncIOScheduler) -> None:
    """Some instances only answer requests: those are told no interval."""
    if INTERVAL_SECONDS is not None:
        scheduler.add_job(
            process_pages, "interval", seconds=float(INTERVAL_SECONDS), max_instances=1
        )
