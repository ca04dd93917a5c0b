"""The encode stage of an encoder model: prompts go in, vectors come out, a batch at a time.

It stands where schedule to detokenize stand for a model that generates: what reads a text at once has no steps, no
cache and no tokens of its own. Knows batches; refuses to know how a vector is made: that is the runner's, in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from ...runtime.env.log import get_logger
from ...runtime.stage import Context, Crash, Outlet, Stage
from ...runtime.workers.worker import Worker
from ..errors import Failed
from ..messages import Pooled, StepText, TokenRequest

log = get_logger("millrace.stages")


class Encoder(Protocol):
    """An encoder model, as the encode stage knows it."""

    def encode(self, batch: Sequence[TokenRequest]) -> list[Pooled]:
        """What becomes of each prompt of a batch, in its order. Called in a thread, one batch at a time."""


class Encode(Stage[TokenRequest, StepText]):
    """Takes all prompts that wait, short ones first within a priority, and runs them in batches of at most
    `max_batched_tokens` tokens, padding included, and `max_rows` prompts; a longer prompt runs alone.

    Prompts of requests that have ended are left out. A batch that fails is run again prompt by prompt, and a prompt
    that fails alone ends its request.
    """

    on_crash: ClassVar[Crash] = Crash.ISOLATE

    def __init__(self, runner: Encoder, max_batched_tokens: int, max_rows: int) -> None:
        self.runner = runner
        self.max_batched_tokens = max_batched_tokens
        self.max_rows = max_rows
        self._context: Context | None = None
        self._worker: Worker | None = None
        self._num_batches = 0

    async def setup(self, context: Context) -> None:
        self._context = context
        if self._worker is None:
            self._worker = context.env.worker("device")

    async def handle(self, batch: Sequence[TokenRequest], out: Outlet[StepText]) -> None:
        assert self._context is not None
        self._context.lane.take()  # cancels need no other answer than the look at who is live
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
            pooled = await self._worker.submit(self.runner.encode, batch)
        except Exception as error:  # whatever the device raised: it belongs to a prompt, not to this stage
            if len(batch) > 1:
                for request in batch:
                    await self._run([request], out)
                return
            log.error("encoder.failed", request_id=batch[0].request_id, error=type(error).__name__, exc_info=error)
            out.fail(batch[0], Failed("the model failed on this request"))
        else:
            self._num_batches += 1
            out.send(StepText(self._num_batches, (), (), (), pooled=pooled))


def batches(line: Sequence[TokenRequest], max_tokens: int, max_rows: int) -> Iterator[list[TokenRequest]]:
    """`line` cut, in its order, where another prompt would make the padded batch too large."""
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
