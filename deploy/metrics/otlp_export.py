"""Exports the spans of ended requests to an OpenTelemetry collector in the background.

An ended request is put into a bounded queue. Once a second a thread builds the spans of queued requests from the trace,
and the loop posts them. If the collector is slow or unreachable, spans are dropped and counted; requests never wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections import deque
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import orjson

from ...runtime.env.log import get_logger
from ...runtime.trace.request_spans import OF_REQUESTS, request_spans
from ...runtime.trace.tracer import EventKind
from ..http.trace_context import CURRENT, TraceContext
from .otel_environment import TraceExport
from .otlp import EndedRequest, Json, export_request, spans_of

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.exit.outboxes import RequestOutbox
    from .otlp_sdk import SdkSender

MAX_QUEUED = 4_096  # requests
MAX_SENT = 512  # requests in one post
INTERVAL_S = 1.0
NUM_TRIES = 3
RETRIED = frozenset({429, 502, 503, 504})  # status codes that OTLP/HTTP defines as retryable

log = get_logger("millrace.deploy")


class OtlpExporter:
    """The span exporter of one engine.

    Call `watch` once the engine exists, on its loop; `stop` sends what is left.
    """

    def __init__(self, export: TraceExport, version: str, threads: Executor) -> None:
        self.num_sent = 0  # requests
        self.num_dropped = 0
        self._export = export
        self._sdk: SdkSender | None = None
        self._version = version
        self._threads = threads
        self._engine: Engine | None = None
        self._model = ""
        self._contexts: dict[str, TraceContext] = {}  # of running requests that are sampled
        self._ended: deque[EndedRequest] = deque()
        self._task: asyncio.Task[None] | None = None

    def watch(self, engine: Engine, model: str) -> None:
        """Starts to export the engine's requests, with `model` as the model's name."""
        self._engine, self._model = engine, model
        if self._export.protocol != "http/json":
            from .otlp_sdk import SdkSender  # takes half a second, and is an extra

            self._sdk = SdkSender(self._export, self._version)
        engine.exit.on_open.append(self._opened)
        engine.exit.on_end.append(self._request_ended)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="telemetry")

    async def stop(self) -> None:
        """Sends queued requests, for at most one second. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await self._send_rest()
        finally:
            if self._sdk is not None:
                with contextlib.suppress(TimeoutError):
                    closing = asyncio.get_running_loop().run_in_executor(self._threads, self._sdk.close)
                    await asyncio.wait_for(closing, 1.0)

    async def _send_rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0), aiohttp.ClientSession() as session:
                await self._send_all(session)

    # -- request events

    def _opened(self, outbox: RequestOutbox) -> None:
        context = CURRENT.get() or TraceContext()
        if outbox.request.parent_id is None and self._export.sampler.takes(context):
            self._contexts[outbox.request_id] = context

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        context = self._contexts.pop(outbox.request_id, None)
        if context is None:
            return
        if len(self._ended) >= MAX_QUEUED:
            self.num_dropped += 1
            return
        request = outbox.request
        is_chat = bool(request.prompts) and request.prompts[0].chat is not None
        operation = "embeddings" if request.pooling is not None else "chat" if is_chat else "text_completion"
        code = None if outbox.error is None else outbox.error.code
        first, count = request.first_sequence_id, request.num_sequences
        self._ended.append(EndedRequest(first, count, context, _request_attributes(outbox), operation, code))

    # -- sending

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._export.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await asyncio.sleep(INTERVAL_S)
                await self._send_all(session)

    async def _send_all(self, session: aiohttp.ClientSession) -> None:
        while self._ended:
            batch = [self._ended.popleft() for _ in range(min(MAX_SENT, len(self._ended)))]
            is_sent = False
            try:
                loop = asyncio.get_running_loop()
                spans = await loop.run_in_executor(self._threads, self._spans, batch)
                if self._sdk is not None:
                    is_sent = await loop.run_in_executor(self._threads, self._sdk.send, spans)
                else:
                    is_sent = await self._post(session, await loop.run_in_executor(self._threads, self._body, spans))
            finally:  # also on cancellation by `stop`
                self.num_sent += is_sent * len(batch)
                self.num_dropped += (not is_sent) * len(batch)

    def _spans(self, batch: list[EndedRequest]) -> list[Json]:
        """The spans of one post. Runs in a thread."""
        assert self._engine is not None
        pipeline = self._engine.pipeline
        records, readers = pipeline.tracer.read_all(), pipeline.tracer.readers()
        wanted = [number for ended in batch for number in range(ended.number, ended.number + ended.num_sequences)]
        kinds = (*OF_REQUESTS, EventKind.REQUEST_NAME)
        records = records[np.isin(records["kind"], kinds) & np.isin(records["a"], wanted)]
        found = {request.number: request for request in request_spans(records, readers[0].names() if readers else [])}
        to_unix_ns = int(pipeline.env.wall_time() * 1e9) - pipeline.env.now_ns()
        return [
            span
            for ended in batch
            if ended.number in found  # otherwise the trace ring was overwritten meanwhile
            for span in spans_of(ended, found[ended.number], self._model, to_unix_ns)
        ]

    def _body(self, spans: list[Json]) -> bytes:
        """The body of one post. Runs in a thread."""
        body = orjson.dumps(export_request(spans, self._export.resource, self._version))
        return gzip.compress(body, 6) if self._export.is_compressed else body

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> bool:
        """Posts one body, with retries. Whether the collector accepted it."""
        reason = ""
        headers = {**self._export.headers, "Content-Type": "application/json"}
        if self._export.is_compressed:
            headers["Content-Encoding"] = "gzip"
        for attempt in range(NUM_TRIES):
            await asyncio.sleep(attempt * INTERVAL_S)
            try:
                async with session.post(self._export.endpoint, data=body, headers=headers) as response:
                    if response.status < 300:
                        return True
                    reason = f"status {response.status}"
                    if response.status not in RETRIED:
                        break
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = type(error).__name__
        log.warning("telemetry.dropped", reason=reason, num_bytes=len(body))
        return False


def _request_attributes(outbox: RequestOutbox) -> dict[str, Any]:
    """The sampling parameters of a request and the finish reasons of its choices, as attributes."""
    request = outbox.request
    if request.pooling is not None:
        return {}
    reasons = sorted({choice.finish.reason.name.lower() for choice in outbox.choices if choice.finish is not None})
    return {
        "gen_ai.request.max_tokens": request.params.max_tokens,
        "gen_ai.request.temperature": float(request.params.temperature),
        "gen_ai.request.top_p": float(request.params.top_p),
        "gen_ai.request.choice.count": request.num_sequences,
        "gen_ai.response.finish_reasons": reasons,
    }
