"""The intake stage: admits or rejects each request, before the engine spends any work on it.

The checks against the model are in `stages/request_limits.py`, the limits on load in `admission.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ...runtime.exit import Outbox
from ...runtime.stage import Context, Crash, Outlet, Stage
from ...runtime.trace.tracer import EventKind
from ..errors import Overloaded, Refused
from ..messages import Request
from ..request_limits import RequestLimits, estimated_tokens
from .admission import Admission


class Intake(Stage[Request, Request]):
    """Admits requests; fails those the model cannot serve at all or has no room for now.

    The errors are `Refused` and `Overloaded`. A beam search counts once, under its own id, with its first step. Its
    later steps are always admitted.

    `request_started` moves a request from waiting to running, and `request_ended` releases it. The exit calls both
    directly, on the same event loop (`exit.on_start`, `exit.on_end`).
    """

    on_crash: ClassVar = Crash.ISOLATE

    def __init__(
        self,
        limits: RequestLimits,
        max_admitted_requests: int = 1024,
        max_waiting_requests: int = 512,
        max_queue_s: float | None = None,
    ) -> None:
        self.limits = limits
        self.admission = Admission(max_admitted_requests, max_waiting_requests, max_queue_s)
        self._context: Context | None = None

    async def setup(self, context: Context) -> None:
        self._context = context

    async def handle(self, batch: Sequence[Request], out: Outlet[Request]) -> None:
        for request in batch:
            if request.parent_id is not None and not self._is_live(request.parent_id):
                continue  # a step of a beam search that has ended
            try:
                self.limits.check(request)
                num_tokens = estimated_tokens(request, self.limits.max_model_len)
                self.admission.admit(request.parent_id or request.request_id, num_tokens, self._now_s())
            except Refused as error:
                out.fail(request, error)
            except Overloaded as error:
                self._trace_shed(error)
                out.fail(request, error)
            else:
                out.send(request)

    def request_started(self, request_id: str) -> None:
        """Counts the request as running: its first text has arrived."""
        self.admission.start(request_id)

    def request_ended(self, outbox: Outbox[Any], cause: str, error: BaseException | None) -> None:
        """Releases a request that has ended, for any reason."""
        self.admission.release(outbox.request_id, self._now_s(), is_served=cause == "finish")

    def _trace_shed(self, error: Overloaded) -> None:
        assert self._context is not None
        tracer, source = self._context.tracer, self._context.source
        counts = (int(error.estimated_wait_s * 1000), error.queue_depth, tracer.source("waiting"))
        tracer.emit(EventKind.REQUEST_SHED, source, 0, *counts)

    def _is_live(self, request_id: str) -> bool:
        assert self._context is not None
        return self._context.is_live(request_id)

    def _now_s(self) -> float:
        assert self._context is not None
        return self._context.env.now()
