"""Server-sent events, for clients that may read slowly or go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from paceline.serve.json_response import to_json
from paceline.serve.limits import Receive, Send


class EventStream(Response):
    """Sends each item as an event, then `[DONE]`. If the client goes away, or does not read for `timeout_s`, the items'
    generator is closed."""

    media_type = "text/event-stream"

    def __init__(self, items: AsyncGenerator[dict[str, Any]], timeout_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._items, self._timeout_s = items, timeout_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.wait((sending, leaving))
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._items) as items:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            if not await self._is_read(send, start):
                return
            async for item in items:
                if not await self._is_read(send, _event(to_json(item), more=True)):
                    return
            await self._is_read(send, _event(b"[DONE]", more=False))

    async def _is_read(self, send: Send, message: dict[str, Any]) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                await send(message)
        except (TimeoutError, OSError):
            return False
        return True


def _event(data: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more}


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
