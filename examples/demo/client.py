"""What a user of the application does: send invoices, and retry the ones that failed."""

import asyncio
import json
from typing import Any
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

_PATIENCE = 15.0


class Client:
    def __init__(self, address: str) -> None:
        self.address = address
        self._opener = build_opener(ProxyHandler({}))  # the application is on this machine

    async def add_invoices(self, number: int) -> list[int]:
        ids: list[int] = await self._post("/invoices", number=number)
        return ids

    async def retry(self, invoice_id: int, *, by: str, why: str) -> None:
        await self._post(f"/invoices/{invoice_id}/retry", by=by, why=why)

    async def _post(self, path: str, **query: object) -> Any:
        request = Request(f"{self.address}{path}?{urlencode(query)}", method="POST")
        return await asyncio.to_thread(self._send, request)

    def _send(self, request: Request) -> Any:
        with self._opener.open(request, timeout=_PATIENCE) as answer:
            body = answer.read()
        return json.loads(body) if body else None
