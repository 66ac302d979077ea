"""Every example of docs/loop.md, run."""

import ast
import enum
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from sqlalchemy import DateTime, asc, column, func, insert, select, table
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import unstuck as library
from tests.database import Database
from tests.jobs import start
from tests.looping import queue_job, run
from unstuck import Claim, Registry, configure, metadata
from unstuck.loop import LoopResult


class Base(DeclarativeBase):
    pass


class PageStatus(enum.Enum):
    Queued = "Queued"
    Processing = "Processing"
    Complete = "Complete"
    Error = "Error"


class Page(Base):
    __tablename__ = "pages"

    id: Mapped[int] = mapped_column(primary_key=True)
    url: Mapped[str]
    page_processing_status: Mapped[PageStatus] = mapped_column(default=PageStatus.Queued)
    page_processing_error: Mapped[str | None]
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=func.now())


DOCS = Path(__file__).parents[2] / "docs" / "loop.md"
CALL, IMPORT, CRAWL = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def compiled(example: str) -> CodeType:
    code: CodeType = compile(example, DOCS.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code


@pytest.fixture
async def pages(database: Database) -> dict[str, Any]:
    """What stands around the examples in an application."""
    await database.create(Base.metadata)
    await database.create(metadata)
    registry = Registry()
    registry.register(Page, status="page_processing_status")
    configure(database.sessions, registry=registry)
    return {
        "Page": Page,
        "PageStatus": PageStatus,
        "asc": asc,
        "run_job_loop": library.run_job_loop,
        "heartbeat": library.heartbeat,
        "async_session": database.sessions,
    }


async def test_the_call(
    database: Database, pages: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async with database.sessions.begin() as session:
        session.add_all([Page(url=f"page {n}") for n in range(12)])

    async def process_page(page_id: object, session: AsyncSession) -> bool:
        page = await session.get(Page, page_id)
        assert page is not None
        return page.url != "page 3"

    pages["process_page"] = process_page
    await eval(compiled(CALL), pages)
    assert isinstance(pages["result"], LoopResult)
    said = re.search(r"print\(result\)  # (.*)", CALL)
    assert said is not None
    assert capsys.readouterr().out.strip() == said[1]


async def test_checkpoints_and_side_effects(database: Database) -> None:
    unstuck = await start(database)
    rows = table("imported", column("n"))
    await database.execute("CREATE TABLE imported (n int)")
    sent: list[int] = []

    async def send_invoice(item_id: int) -> None:
        sent.append(item_id)

    module: dict[str, Any] = {
        "AsyncSession": AsyncSession,
        "Claim": Claim,
        "insert": insert,
        "Row": rows,
        "send_invoice": send_invoice,
    }
    exec(compiled(IMPORT), module)
    function: Callable[..., Any] = module["import_rows"]
    job = await queue_job(database)
    assert (await run(unstuck, function)).completed == 1
    assert sent == [job]
    async with database.engine.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(rows)) == 300


async def test_work_outside_of_the_loop(database: Database, pages: dict[str, Any]) -> None:
    async with database.sessions.begin() as session:
        page = Page(url="x", page_processing_status=PageStatus.Processing)
        session.add(page)
    seen: list[Any] = []
    pages["download"] = seen.append
    exec(compiled(CRAWL), pages)
    await pages["crawl"](page.id)
    assert seen == [page.id]
    assert await database.execute("SELECT 1 FROM zombie_claims") == []
