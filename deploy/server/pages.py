"""The HTML pages and their static files, all part of this package."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import web

from ..errors import ApiError

# Only scripts, styles and sockets of this server: a browser runs no script that a model's text contains.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'"
)

# The API page's viewer sets styles on its elements, and has small pictures within its code.
DOCS_POLICY = POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'").replace(
    "img-src 'self'", "img-src 'self' data:"
)


@dataclass(frozen=True)
class PageFile:
    """A file of the pages as it is packaged: the largest one is compressed."""

    packaged: bytes
    is_compressed: bool

    @property
    def content(self) -> bytes:
        return gzip.decompress(self.packaged) if self.is_compressed else self.packaged

    @cached_property
    def etag(self) -> str:
        """Tells versions of the file apart."""
        return hashlib.sha256(self.packaged).hexdigest()[:32]


class Pages:
    """The handlers. They reveal nothing about the server, so they require no key."""

    def __init__(self) -> None:
        self._files = dict(_read(files(__package__.rpartition(".")[0]) / "static"))

    async def dashboard(self, request: web.Request) -> web.Response:
        """`GET /dashboard` and `GET /`: the live dashboard.

        The page gets its data from `/dashboard/feed`, which requires a key.
        """
        return self._answer(request, "dashboard.html")

    async def stream_demo(self, request: web.Request) -> web.Response:
        """`GET /stream-demo`: answers over one WebSocket, with buttons to pause and disconnect."""
        return self._answer(request, "stream.html")

    async def docs(self, request: web.Request) -> web.Response:
        """`GET /docs`: the API, to read and to try.

        The page gets the document from `/openapi.json`, which requires a key.
        """
        return self._answer(request, "docs.html", DOCS_POLICY)

    async def file(self, request: web.Request) -> web.Response:
        """`GET /static/{name}`: a file as read at the start, never from disk.

        `name` may contain folders.
        """
        name = request.match_info["name"]
        if name not in self._files:
            raise ApiError("not_found", "there is no such file")
        return self._answer(request, name)

    def _answer(self, request: web.Request, name: str, policy: str = POLICY) -> web.Response:
        """The file, or 304 if the browser has this version of it."""
        file = self._files[name]
        content_type = mimetypes.types_map.get("." + name.rpartition(".")[2], "application/octet-stream")
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
        headers |= {"ETag": f'"{file.etag}"', "Vary": "Accept-Encoding"}
        if file.etag in {known.value for known in request.if_none_match or ()}:
            return web.Response(status=304, headers=headers)
        if file.is_compressed and "gzip" in request.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = file.packaged, "gzip"
        else:
            body = file.content
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)


def _read(folder: Traversable, path: str = "") -> Iterator[tuple[str, PageFile]]:
    """Yields the path relative to `folder`, without `.gz`, and every file under it."""
    for entry in folder.iterdir():
        if entry.is_file():
            is_compressed = entry.name.endswith(".gz")
            yield path + entry.name.removesuffix(".gz"), PageFile(entry.read_bytes(), is_compressed)
        elif entry.is_dir():
            yield from _read(entry, f"{path}{entry.name}/")
