"""The encode stage: runs an encoder model on batches of prompts.

It replaces the stages from schedule to detokenize: an encoder has no steps, no KV cache and no generated tokens. The
stage runs on the event loop; the runner on a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from ...runtime.env.log import get_logger
from ...runtime.stage import Context, Crash, Outlet, Stage
from ...runtime.workers.worker import Worker
from ..device.device_guard import PROBE_S, DeviceGuard, DeviceLost
from ..device.step_watch import StepWatch
from ..errors import Failed
from ..messages import Pooled, StepText, TokenRequest

log = get_logger("millrace.stages")


class Encoder(Protocol):
    """An encoder model, as the encode stage uses it."""

    def encode(self, batch: Sequence[TokenRequest]) -> list[Pooled]:
        """The result of each prompt, in order. Called on the device thread, one batch at a time."""


class Encode(Stage[TokenRequest, StepText]):
    """Runs all waiting prompts in batches, by priority and then shortest first.

    A batch has at most `max_rows` prompts and `max_batched_tokens` tokens, padding included; a longer prompt runs
    alone. Prompts of requests that have ended are skipped. A batch that fails is run again prompt by prompt. A prompt
    that fails alone ends its request. `probe` finds out after a failure, or during a batch that does not end, whether
    the device is lost; see `DeviceGuard`.
    """

    on_crash: ClassVar[Crash] = Crash.ISOLATE

    def __init__(
        self, runner: Encoder, max_batched_tokens: int, max_rows: int, probe: Callable[[], object] | None = None
    ) -> None:
        self.runner = runner
        self.max_batched_tokens = max_batched_tokens
        self.max_rows = max_rows
        self._context: Context | None = None
        self._worker: Worker | None = None
        self._num_batches = 0
        self._result: asyncio.Future[list[Pooled]] | None = None  # of the batch that runs
        self._watch: StepWatch | None = None
        self._guard = None if probe is None else DeviceGuard(probe, lambda: PROBE_S, self._note_lost)

    async def setup(self, context: Context) -> None:
        self._context = context
        if self._worker is None:
            worker = context.env.worker("device")
            worker.start()  # now, so that no prompt can fail for lack of a thread
            self._worker = worker
            if self._guard is not None:
                self._guard.join(context.env)
                self._watch = StepWatch(self._guard, context.env)

    async def handle(self, batch: Sequence[TokenRequest], out: Outlet[StepText]) -> None:
        assert self._context is not None
        self._context.lane.take()  # discards cancels: `is_live` below already excludes ended requests
        line = sorted(batch, key=lambda request: (request.priority, len(request.token_ids)))
        for part in batches(line, self.max_batched_tokens, self.max_rows):
            live = [request for request in part if self._context.is_live(request.request_id)]
            await self._run(live, out)
            await out.flush()

    async def _run(self, batch: Sequence[TokenRequest], out: Outlet[StepText]) -> None:
        assert self._worker is not None
        if not batch:
            return
        try:
            self._result = self._worker.submit(self.runner.encode, batch)
            if self._watch is not None:
                num_tokens = len(batch) * max(len(request.token_ids) for request in batch)
                self._watch.begin(self._num_batches, num_tokens, self._result)
            pooled = await self._result
        except Exception as error:  # any error of the device concerns a prompt, unless the device is lost
            if self._guard is not None:
                await self._guard.check(self._num_batches, error)
            if len(batch) > 1:
                for request in batch:
                    await self._run([request], out)
                return
            log.error("encoder.failed", request_id=batch[0].request_id, error=type(error).__name__, exc_info=error)
            out.fail(batch[0], Failed("the model failed on this request"))
        else:
            self._num_batches += 1
            out.send(StepText(self._num_batches, (), (), (), pooled=pooled))

    def _note_lost(self, lost: DeviceLost) -> None:
        assert self._worker is not None
        self._worker.abandon()
        if self._result is not None and not self._result.done():
            self._result.set_exception(lost)


def batches(line: Sequence[TokenRequest], max_tokens: int, max_rows: int) -> Iterator[list[TokenRequest]]:
    """Cuts `line`, in its order, wherever one more prompt would make the padded batch too large."""
    part: list[TokenRequest] = []
    longest = 0
    for request in line:
        longest = max(longest, len(request.token_ids))
        if part and (len(part) == max_rows or longest * (len(part) + 1) > max_tokens):
            yield part
            part, longest = [], len(request.token_ids)
        part.append(request)
    if part:
        yield part
