"""What handlers of plain routes have in common: data as a JSON response, and the go-ahead for a client's body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import HttpVersion11, web


def answer(data: Mapping[str, Any], status: int = 200) -> web.Response:
    """Plain data as a JSON response."""
    return web.Response(status=status, body=orjson.dumps(data), content_type="application/json")


async def expect(request: web.Request) -> None:
    """Tells a client that waits with its body to send it. HTTP/1.0 knows no such answer."""
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
