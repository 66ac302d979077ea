import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, FastAPI
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from tests.hostapp.database import Base, engine, get_session
from tests.hostapp.jobs import schedule_jobs
from tests.hostapp.models import Page
from tests.hostapp.scheduler_instance import scheduler
from unstuck import setup_zombie_cleanup_scheduler

logging.basicConfig(level=logging.INFO)

DatabaseSession = Annotated[AsyncSession, Depends(get_session)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    cleanup = setup_zombie_cleanup_scheduler(
        scheduler, session_factory=get_session, create_tables=True
    )
    schedule_jobs(scheduler)
    scheduler.start()
    yield
    await cleanup.shutdown()
    scheduler.shutdown()
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@app.get("/pages")
async def list_pages(session: DatabaseSession) -> list[dict[str, Any]]:
    pages = await session.scalars(select(Page).order_by(Page.created_at))
    return [
        {
            "id": page.id,
            "url": page.url,
            "page_processing_status": page.page_processing_status,
            "content_status": page.content_status,
            "index_status": page.index_status,
        }
        for page in pages
    ]


@app.post("/pages", status_code=201)
async def add_page(url: str, session: DatabaseSession) -> dict[str, UUID]:
    page = Page(url=url)
    session.add(page)
    await session.commit()
    return {"id": page.id}
