"""`POST /admin/profiler/start` and `/stop`: profiles of the model's kernels by torch's profiler.

Off without `--profiler-dir`, the folder for the files. One profile at a time, of bounded length. The server chooses the
file names, so a request cannot write elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ...runtime.env.log import get_logger
from ...runtime.workers.thread_start import ThreadPool
from ..api.service import Service
from ..errors import ApiError
from ..http.query_params import whole_number
from ..http.responses import answer

if TYPE_CHECKING:
    from ...model.profiler import TorchProfiler

DEFAULT_S, MAX_S = 5, 60  # a second of a small model on a CPU makes about ten megabytes
WITH_TORCH = frozenset({"torch", "triton", "transformers"})  # attention backends whose steps are torch operators

log = get_logger("millrace.deploy")


class Profiler:
    """The handlers, and the state of the running profile. Used on the server's loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        folder = service.config.profiler_dir
        self._folder = None if folder is None else Path(folder)
        self._thread = ThreadPool(1, thread_name_prefix="millrace-profiler")  # start and stop on one thread
        self._open: tuple[TorchProfiler, Path] | None = None
        self._is_busy = False  # a profile starts, runs or is being written
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[dict[str, Any]] | None = None

    async def start(self, request: web.Request) -> web.Response:
        """`POST /admin/profiler/start?seconds=N`: starts a profile, which stops after that time."""
        seconds = whole_number(request, "seconds", DEFAULT_S, least=1, most=MAX_S)
        self._check()
        if self._is_busy:
            raise ApiError("profiler_busy", "a profile is running or being written; stop it, or wait for its end")
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
        """`POST /admin/profiler/stop`: stops the profile. Answers when the file is written."""
        self._check()
        if self._open is None and self._closing is None:
            raise ApiError("profiler_idle", "no profile is running; POST /admin/profiler/start starts one")
        return answer(await asyncio.shield(self._end()))

    async def close(self) -> None:
        """Stops and writes a running profile, at shutdown."""
        if self._open is not None or self._closing is not None:
            await self._end()
        self._thread.shutdown(wait=False)

    def _check(self) -> None:
        if self._folder is None:
            raise ApiError("no_profiler", "the profiler is off; start the server with --profiler-dir")
        engine = self._service.require_some_engine()
        if engine.mode == "split":
            single = " and --data-parallel-size 1" if engine.engines else ""
            message = f"steps run in another process; start the server with --mode inline{single}"
            raise ApiError("no_profiler", message)
        backend = engine.info.attention_backend
        if backend not in WITH_TORCH or "torch" not in sys.modules:
            message = f"attention backend {backend} runs steps without torch, so torch's profiler cannot"
            hint = "use GET /admin/trace for their times, or start with --attention-backend torch or triton"
            raise ApiError("no_profiler", f"{message} see them; {hint}")

    def _end(self) -> asyncio.Task[dict[str, Any]]:
        """The one task that stops and writes the profile."""
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
        from ...model.profiler import TorchProfiler  # torch is imported already; `_check` ensures it

        assert self._folder is not None
        path = _new_file(self._folder)
        profiler = TorchProfiler()
        profiler.start()
        return profiler, path


def _finish(profiler: TorchProfiler, path: Path) -> int:
    """Writes the profile and returns its size in bytes."""
    profiler.stop(path)
    path.chmod(0o600)  # torch replaces the file, and its permissions
    return path.stat().st_size


def _new_file(folder: Path) -> Path:
    """Creates an empty file with a new name, readable by its owner only."""
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
