"""The host application: it takes invoices, shows them, and sweeps its own table for zombies.

Nothing in it is made for the demo but `main`, which serves it on a free port.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from examples.demo.database import connect, create_tables
from examples.demo.invoice import Invoice, Status
from examples.demo.parent import end_with_parent
from unstuck import Unstuck, setup_zombie_cleanup_scheduler

engine = connect()
sessions = async_sessionmaker(engine, expire_on_commit=False)
unstuck = Unstuck(session_factory=sessions)


async def get_session() -> AsyncIterator[AsyncSession]:
    async with sessions() as session:
        yield session


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    await create_tables(engine)
    cleanup = setup_zombie_cleanup_scheduler(create_tables=True)
    await cleanup.run_now()  # so that the tables are there before the first request
    yield
    await cleanup.shutdown()
    await engine.dispose()


app = FastAPI(title="Invoices", lifespan=lifespan)
DatabaseSession = Annotated[AsyncSession, Depends(get_session)]


@app.get("/invoices")
async def list_invoices(session: DatabaseSession) -> list[dict[str, Any]]:
    invoices = await session.scalars(select(Invoice).order_by(Invoice.id))
    return [{"id": one.id, "status": one.status, "error": one.error} for one in invoices]


@app.post("/invoices", status_code=201)
async def add_invoices(session: DatabaseSession, number: int = 1) -> list[int]:
    invoices = [Invoice(status=Status.Queued) for _ in range(number)]
    session.add_all(invoices)
    await session.commit()
    return [invoice.id for invoice in invoices]


@app.get("/invoices/{invoice_id}/history")
async def read_history(invoice_id: int) -> list[dict[str, Any]]:
    """What happened to an invoice, oldest first."""
    entries = await unstuck.history(Invoice, invoice_id)
    return [
        {"at": e.at, "kind": e.kind, "cause": e.cause, "outcome": e.outcome, "by": e.worker_id}
        for e in entries
    ]


@app.post("/invoices/{invoice_id}/retry", status_code=204)
async def retry_invoice(invoice_id: int, by: str, why: str) -> None:
    """For a human who knows that a failed invoice may be tried once more."""
    await unstuck.retry(Invoice, invoice_id, by=by, why=why)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    end_with_parent()
    uvicorn.run(app, port=0, access_log=False)


if __name__ == "__main__":
    main()
