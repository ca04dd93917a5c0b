"""Helpers of plain routes: a JSON response, and `100 Continue`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import HttpVersion11, web


def answer(data: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Plain data as a JSON response."""
    return web.Response(status=status, body=orjson.dumps(data), content_type="application/json", headers=headers)


async def expect(request: web.Request) -> None:
    """Sends `100 Continue` to a client that waits before sending its body.

    HTTP/1.0 lacks this status.
    """
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
