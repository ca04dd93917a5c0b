"""`POST /admin/profiler/start` and `/stop`: a window of torch's profiler, for who looks at kernels and not at stages.

Off unless there is a folder for what it writes (`--profiler-dir`). One window at a time, of bounded length; files have
names of ours, so a request can write nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ...runtime.env.log import get_logger
from ..api.service import Service
from ..errors import ApiError
from ..http.query_params import whole_number
from ..http.responses import answer

if TYPE_CHECKING:
    from ...model.profiler import TorchProfiler

DEFAULT_S, MAX_S = 5, 60  # a second of a small model on a CPU makes some ten megabytes
WITH_TORCH = frozenset({"torch", "triton", "transformers"})  # attention backends whose steps are torch operators

log = get_logger("millrace.deploy")


class Profiler:
    """The handlers, and the window that is open. Used on the server's loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        folder = service.config.profiler_dir
        self._folder = None if folder is None else Path(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millrace-profiler")  # torch wants one for both ends
        self._open: tuple[TorchProfiler, Path] | None = None
        self._is_busy = False  # a window begins, is open, or is written
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[dict[str, Any]] | None = None

    async def start(self, request: web.Request) -> web.Response:
        """`POST /admin/profiler/start?seconds=N`: opens a window, which closes by itself after so many seconds."""
        seconds = whole_number(request, "seconds", DEFAULT_S, least=1, most=MAX_S)
        self._check()
        if self._is_busy:
            raise ApiError("profiler_busy", "a window is open or being written: stop it, or wait until it is done")
        self._is_busy = True
        loop = asyncio.get_running_loop()
        try:
            self._open = await loop.run_in_executor(self._thread, self._begin)
        except BaseException:
            self._is_busy = False
            raise
        self._timer = loop.call_later(seconds, self._end)
        log.info("profiler.started", seconds=seconds)
        return answer({"file": str(self._open[1]), "seconds": seconds})

    async def stop(self, request: web.Request) -> web.Response:
        """`POST /admin/profiler/stop`: closes the window. Answers once the file is written."""
        self._check()
        if self._open is None and self._closing is None:
            raise ApiError("profiler_idle", "no window is open: POST /admin/profiler/start opens one")
        return answer(await asyncio.shield(self._end()))

    async def close(self) -> None:
        """Before the server goes: writes what is open."""
        if self._open is not None or self._closing is not None:
            await self._end()
        self._thread.shutdown(wait=False)

    def _check(self) -> None:
        if self._folder is None:
            raise ApiError("no_profiler", "there is no folder for profiles: start the server with --profiler-dir")
        engine = self._service.require_some_engine()
        if engine.mode == "split":
            raise ApiError("no_profiler", "the steps run in a process of their own: start with --mode inline")
        backend = engine.info.attention_backend
        if backend not in WITH_TORCH or "torch" not in sys.modules:
            message = f"the steps of this engine (attention backend {backend}) run without torch, so its profiler sees"
            hint = "GET /admin/trace has their times, --attention-backend torch or triton makes steps that it sees"
            raise ApiError("no_profiler", f"{message} nothing of them; {hint}")

    def _end(self) -> asyncio.Task[dict[str, Any]]:
        """The one task that closes the window."""
        if self._timer is not None:
            self._timer.cancel()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._write())
        return self._closing

    async def _write(self) -> dict[str, Any]:
        assert self._open is not None
        profiler, path = self._open
        try:
            num_bytes = await asyncio.get_running_loop().run_in_executor(self._thread, _finish, profiler, path)
            log.info("profiler.written", path=str(path), num_bytes=num_bytes)
            return {"file": str(path), "num_bytes": num_bytes}
        finally:
            self._open = self._closing = None
            self._is_busy = False

    # -- on the thread

    def _begin(self) -> tuple[TorchProfiler, Path]:
        from ...model.profiler import TorchProfiler  # the server has imported torch, or this is not asked for

        assert self._folder is not None
        path = _new_file(self._folder)
        profiler = TorchProfiler()
        profiler.start()
        return profiler, path


def _finish(profiler: TorchProfiler, path: Path) -> int:
    """Writes what was seen. Its size in bytes."""
    profiler.stop(path)
    path.chmod(0o600)  # torch puts a file of its own in the place of ours
    return path.stat().st_size


def _new_file(folder: Path) -> Path:
    """An empty file of a name that was not there, for its owner only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stamp, number = time.strftime("%Y%m%d-%H%M%S", time.gmtime()), 0
    while True:
        path = folder / f"profile-{stamp}-{os.getpid()}{f'-{number}' if number else ''}.json"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        except FileExistsError:
            number += 1
            continue
        return path
