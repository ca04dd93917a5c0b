"""`GET /admin/files` and `/admin/files/{name}`: recordings, flight files and profiles that the server has written.

Only files that the listing names can be fetched, so that a request cannot read elsewhere.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ..api.service import Service
from ..errors import ApiError, shorten
from ..http.responses import answer

if TYPE_CHECKING:
    from ...stages.config import EngineConfig

MAX_FILES = 200  # listed: the newest ones


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file for operators."""

    path: Path
    kind: str  # "recording", "flight", "profile"
    num_bytes: int
    modified_s: float

    def to_json(self) -> dict[str, Any]:
        """As the listing has it."""
        size = {"num_bytes": self.num_bytes, "modified_s": round(self.modified_s, 3)}
        return {"name": self.path.name, "kind": self.kind} | size


class FileRoutes:
    """The handlers of one server."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self._service = service
        self._threads = threads

    async def files(self, request: web.Request) -> web.Response:
        """Names, sizes and times of the files, newest first."""
        return answer({"object": "list", "data": [file.to_json() for file in await self._found()]})

    async def file(self, request: web.Request) -> web.StreamResponse:
        """The content of a file. What is still written is sent as far as it is."""
        name = request.match_info["name"]
        for file in await self._found():
            if file.path.name == name:
                headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
                return web.FileResponse(file.path, headers=headers)
        raise ApiError("not_found", f"there is no file {shorten(repr(name), 128)}; GET /admin/files lists them")

    async def _found(self) -> list[WrittenFile]:
        engine = self._service.engine
        config = None if engine is None else engine.config
        server = self._service.config
        folders = (server.flight_recorder_dir, server.profiler_dir)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _newest, config, *folders)


def written_files(
    engine: EngineConfig | None, flight_dir: str | None, profiler_dir: str | None
) -> Iterator[WrittenFile]:
    """The files in these folders, and the recordings that `--record` names: FILE, FILE.1, FILE.2, ..."""
    if engine is not None and engine.record is not None:
        path = Path(engine.record)
        yield from _matching(path.parent, rf"{re.escape(path.name)}(\.\d+)?", "recording")
    if flight_dir is not None:
        yield from _matching(Path(flight_dir), r"flight-[\w.-]+\.jsonl", "flight")
    if profiler_dir is not None:
        yield from _matching(Path(profiler_dir), r"profile-[\w.-]+\.json", "profile")


def _newest(engine: EngineConfig | None, flight_dir: str | None, profiler_dir: str | None) -> list[WrittenFile]:
    found = sorted(written_files(engine, flight_dir, profiler_dir), key=lambda file: -file.modified_s)
    return found[:MAX_FILES]


def _matching(folder: Path, pattern: str, kind: str) -> Iterator[WrittenFile]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if re.fullmatch(pattern, path.name):
            stat = path.lstat()  # a link is no file of ours
            if S_ISREG(stat.st_mode):
                yield WrittenFile(path, kind, stat.st_size, stat.st_mtime)
