"""`millrace run-batch`: answers a file of requests, one JSON line each, in OpenAI's batch format.

A bounded number of requests runs at once, so memory does not grow with the file. Answers are written in order of
completion, not of the input: `custom_id` names the request.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import aiohttp
import orjson
from tqdm import tqdm

from ...runtime.env.log import configure
from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ..config import ServerConfig
from ..server_url import server_url, why_no_answer
from .batch_file import BadBatchLine, BatchItem, BatchLine, LineReader, answered, failed, parse

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

OF_THE_ANSWERS = (
    "served_model_name",
    "strict_fields",
    "enable_request_metrics",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "reasoning_parser",
    "max_body_bytes",
)  # server settings that shape answers
PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # between attempts to reach a server

MakeEngine = Callable[[EngineConfig], "AbstractAsyncContextManager[Engine]"]
Target = tuple[aiohttp.ClientSession, str]  # the session, and the URL before each path


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 1 if a line failed; after an interrupt the written answers stay."""
    configure(server_config.log_format, server_config.log_level)
    if options.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {options.max_concurrency}: must be at least 1")
    source, sink = _open_files(options.input_file, options.output_file)
    if options.url is not None:
        target = at_server(server_url("--url", options.url), server_config.api_key)
    else:
        target = in_process(engine_config, server_config, _make_engine)
    return asyncio.run(answer_lines(target, source, sink, options.max_concurrency, server_config.max_body_bytes))


async def answer_lines(
    target: AbstractAsyncContextManager[Target], source: BinaryIO, sink: BinaryIO, window: int, max_bytes: int
) -> int:
    """Answers the lines of `source` into `sink`, `window` at a time, and closes both.

    The exit code: 1 if a line or a file failed.
    """
    has_broken = False
    async with target as (session, url):
        batch = BatchRun(session, url, sink, max_bytes)
        try:
            with sink:
                _empty(sink)  # only now: without a model, or with a wrong setting, the file stays as it was
                await batch.run(LineReader(source, max_bytes), window)
        except* OSError as group:
            has_broken = True
            print(f"millrace: a file failed: {group.exceptions[0]}", file=sys.stderr)
        finally:
            batch.report()
    return 1 if has_broken or batch.num_failed else 0


class BatchRun:
    """Sends the requests of a file to a server and writes the answers."""

    def __init__(self, session: aiohttp.ClientSession, url: str, sink: BinaryIO, max_bytes: int) -> None:
        self.num_answered = self.num_failed = 0
        self._session = session
        self._url = url
        self._sink = sink
        self._max_bytes = max_bytes
        every_s = 0.2 if sys.stderr.isatty() else 10.0  # in a log each update is a new line
        self._bar = tqdm(desc="answers", unit="request", file=sys.stderr, mininterval=every_s, dynamic_ncols=True)

    async def run(self, lines: LineReader, window: int) -> None:
        """Answers all lines, `window` at a time, and closes the reader.

        Raises an `ExceptionGroup` of `OSError` if a file fails.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(window):
                    group.create_task(self._work(lines))
        finally:
            lines.close()

    def report(self) -> None:
        """Prints the totals to stderr."""
        self._bar.close()
        print(f"{self.num_answered} answered, {self.num_failed} failed", file=sys.stderr)

    async def _work(self, lines: LineReader) -> None:
        async for line in lines:
            is_good, answer = await self._answer(line)
            self._sink.write(answer)
            self._sink.flush()  # answers stay if the process is killed
            self.num_answered += is_good
            self.num_failed += not is_good
            self._bar.set_postfix(failed=self.num_failed, refresh=False)
            self._bar.update()

    async def _answer(self, line: BatchLine) -> tuple[bool, bytes]:
        """(whether the request succeeded, the line to write)."""
        try:
            item = parse(line, self._max_bytes)
        except BadBatchLine as error:
            return False, failed(error.custom_id, error.code, str(error))
        try:
            return await self._send(item)
        except (TimeoutError, aiohttp.ClientError) as error:
            reason = f"{self._url} does not answer: {why_no_answer(error)}"
            return False, failed(item.custom_id, "server_unreachable", reason)

    async def _send(self, item: BatchItem) -> tuple[bool, bytes]:
        """Sends one request. Retries 429 without limit, and an unreachable server for the seconds of `PAUSES_S`."""
        data, pauses = orjson.dumps(item.body), iter(PAUSES_S)
        while True:
            try:
                async with self._session.post(self._url + item.url, data=data) as response:
                    body, status, headers = await response.read(), response.status, response.headers
            except (TimeoutError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                if (pause_s := next(pauses, None)) is None:
                    raise
            else:
                pause_s = _pause(status, headers.get("Retry-After"), pauses)
                if pause_s is None:
                    return status == 200, answered(item.custom_id, status, headers.get("X-Request-Id", ""), _json(body))
            await asyncio.sleep(pause_s)


def _pause(status: int, retry_after: str | None, pauses: Any) -> float | None:
    """Seconds to wait before a retry; None if this is the final answer."""
    retry_after_s = float(retry_after) if retry_after is not None and retry_after.isdecimal() else 1.0
    if status == 429:
        return retry_after_s
    pause_s: float | None = next(pauses, None) if status == 503 else None
    return None if pause_s is None else max(pause_s, retry_after_s)


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace")


# -- targets


@asynccontextmanager
async def at_server(url: str, api_key: tuple[str, ...]) -> AsyncIterator[Target]:
    """A running server at `url`."""
    headers = {"Authorization": f"Bearer {api_key[0]}"} if api_key else {}
    async with _session(aiohttp.TCPConnector(limit=0), headers) as session:
        yield session, url


@asynccontextmanager
async def in_process(
    engine_config: EngineConfig, server_config: ServerConfig, make_engine: MakeEngine
) -> AsyncIterator[Target]:
    """A server in this process, so that answers equal those of `serve`.

    It listens on a Unix socket in a folder that only this user can access.
    """
    from ..server.server import Server

    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        config = ServerConfig(
            uds=os.path.join(folder, "s"),
            response_store_bytes=0,  # no client can retrieve a response later
            **{name: getattr(server_config, name) for name in OF_THE_ANSWERS},
        )
        async with make_engine(engine_config) as engine, Server(config) as server:
            server.attach(engine)
            async with _session(aiohttp.UnixConnector(str(config.uds), limit=0), {}) as session:
                yield session, "http://localhost"


def _session(connector: aiohttp.BaseConnector, headers: dict[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        headers={"Content-Type": "application/json"} | headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
    )


def _make_engine(config: EngineConfig) -> AbstractAsyncContextManager[Engine]:
    if config.executor == "ray":
        from ..ray.ray_engine import RayEngine

        return RayEngine(config.for_whole_answers())
    if config.data_parallel_size > 1:
        from ...stages.fleet.fleet_engine import FleetEngine

        return FleetEngine(config.for_whole_answers())
    from ...stages.engine.engine import Engine  # imports torch

    return Engine(config.for_whole_answers())


# -- files


def _open_files(source: str, sink: str) -> tuple[BinaryIO, BinaryIO]:
    """Opens both files; `-` is stdin or stdout. Raises `ConfigError`."""
    if "-" not in (source, sink) and os.path.exists(sink) and os.path.samefile(source, sink):
        raise ConfigError(f"{sink} is also the input file, which the answers would overwrite; name another output file")
    return _open(source, 0, "rb"), _open(sink, 1, "ab")


def _empty(sink: BinaryIO) -> None:
    """Empties a regular file that was opened here: not what standard output goes to."""
    if isinstance(sink, io.BufferedWriter) and sink.fileno() != 1 and stat.S_ISREG(os.fstat(sink.fileno()).st_mode):
        sink.truncate(0)


def _open(path: str, standard: int, mode: str) -> Any:
    try:
        return open(standard if path == "-" else path, mode, closefd=path != "-")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: --input-file and --output-file must name files, or -") from None
