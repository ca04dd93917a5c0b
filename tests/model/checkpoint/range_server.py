"""An HTTP server of a folder that answers ranges, and misbehaves as it is told."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path

from aiohttp import web


class RangeServer:
    """Serves `files` on loopback, in a thread. Use as a context manager.

    faults     by the number of the request for a file, from 0: "500", "short" (half of the range), "reset"
    redirects, sizes   by the name of a file: where a request is sent, and the size that is claimed
    refuses_ranges, etags   to be changed at any time
    """

    def __init__(self, folder: Path) -> None:
        self.files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.etags = {name: f'"{name}-1"' for name in self.files}
        self.faults: dict[str, dict[int, str]] = {}
        self.redirects: dict[str, str] = {}
        self.sizes: dict[str, str] = {}
        self.missing_status = 404
        self.queries: set[str] = set()
        self.refuses_ranges = False
        self.requests: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()  # sent
        self.in_flight = self.most_in_flight = 0
        self.url = ""

    def __enter__(self) -> RangeServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/models/m/{name:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/models/m"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer_range(request)
        finally:
            self.in_flight -= 1

    async def _answer_range(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.queries.add(request.query_string)
        if name in self.redirects:
            return web.Response(status=302, headers={"Location": self.redirects[name]})
        if name not in self.files:
            return web.Response(status=self.missing_status)
        number, content = self.requests[name], self.files[name]
        self.requests[name] += 1
        fault = self.faults.get(name, {}).get(number)
        if fault == "500":
            return web.Response(status=500)
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        if self.refuses_ranges:
            return web.Response(body=content)
        await asyncio.sleep(0.002)  # so that requests meet
        begin, end = (int(part) for part in request.headers["Range"].removeprefix("bytes=").split("-"))
        body = content[begin : end + 1]
        headers = {
            "ETag": self.etags[name],
            "Content-Range": f"bytes {begin}-{end}/{self.sizes.get(name, len(content))}",
        }
        if fault == "short":
            body = body[: len(body) // 2]
        self.num_bytes[name] += len(body)
        return web.Response(status=206, body=body, headers=headers)
