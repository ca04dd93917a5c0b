"""Submits requests to a running engine: grammars, beam searches, trace of shed requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...runtime.env.env import Env
from ...runtime.pipeline import Busy
from ...runtime.trace.tracer import EventKind
from ..adapters.gate import AdapterGate
from ..beam_search.algorithm import BeamParams
from ..errors import Overloaded, Refused, field_text
from ..exit.outboxes import RequestOutbox
from ..messages import Ints, Request
from ..params import SamplingParams
from ..tasks import Task, check_task, task_of
from .gate_waits import trace_shed
from .wiring import JoinedStages, TextStages

OWN_IDS = ("shadow-", "warm-up")  # how ids of requests begin that engines make


@dataclass(frozen=True, slots=True)
class Submitter:
    """Submits requests to running parts. Stateless; `Engine` documents the methods."""

    parts: JoinedStages
    env: Env

    async def submit(self, request: Request, wait: bool, deadline_s: float | None) -> RequestOutbox:
        _check_id(request)
        with self._turned_away():
            outbox = self.parts.pipeline.open(request, deadline_s=deadline_s)
        assert isinstance(outbox, RequestOutbox)
        request = outbox.request
        if request.adapter is not None or request.params.structured_outputs is not None:
            try:
                with self.parts.gate_waits.waiting(outbox):
                    request = await self._pass_gates(request)
            except BaseException:
                self.parts.exit.end(request.request_id, "refused")  # which also releases what a gate has given
                raise
            if self.parts.exit.live.get(request.request_id) is not outbox:
                return outbox  # it ended at a gate
        with self._turned_away():
            await self.parts.pipeline.enter(outbox, request, wait=wait)
        return outbox

    async def _pass_gates(self, request: Request) -> Request:
        """Waits for the request's adapter and grammar. Returns the request with the adapter's digest."""
        if request.adapter is not None:
            began_s = self.env.now()
            with self._shed_at("adapter"):
                request = await self.adapters().admit(self.env, request)
            self._trace_wait(EventKind.REQUEST_ADAPTER, "adapter", request, began_s)
        structured = request.params.structured_outputs
        if structured is not None:
            parts, began_s = self._able_to(task_of(request)), self.env.now()
            with self._shed_at("grammar"):
                await parts.gate.admit(self.env, request.request_id, structured)
            self._trace_wait(EventKind.REQUEST_GRAMMAR, "grammar", request, began_s)
        return request

    def _trace_wait(self, kind: EventKind, gate: str, request: Request, began_s: float) -> None:
        waited_us, tracer = int((self.env.now() - began_s) * 1e6), self.parts.pipeline.tracer
        tracer.emit(kind, tracer.source(gate), 0, request.first_sequence_id, waited_us)

    def adapters(self) -> AdapterGate:
        """Raises `Refused` unless adapters are served."""
        text = self.parts.text
        adapters = None if text is None else text.adapters
        if adapters is None:
            problem = "this engine serves none; start it with enable_lora"
            raise Refused(field_text("adapter", problem), param="model")
        return adapters

    def submit_search(self, request: Request, beams: BeamParams, deadline_s: float | None) -> RequestOutbox:
        _check_id(request)
        if request.adapter is not None:
            self.adapters().registry.require(request.adapter.name)
        try:
            return self._able_to("generate").searches.submit(request, beams, deadline_s)
        except ValueError as error:  # a request id that is in use
            raise Refused(str(error), param="request_id") from None

    async def render(self, request: Request) -> tuple[list[Ints], SamplingParams]:
        self.parts.intake.limits.check(request)
        prompts, params = await self.parts.tokenize.encode(request)
        for encoded in prompts:
            self.parts.intake.limits.complete_params(params, len(encoded.token_ids))
        return [encoded.token_ids for encoded in prompts], params

    @contextmanager
    def _turned_away(self) -> Iterator[None]:
        """Turns the refusals of the pipeline into those of the engine."""
        try:
            yield
        except Busy as error:
            waiting = self.parts.intake.admission.num_waiting
            overloaded = Overloaded(f"{error}: try again in 1 s", queue_depth=waiting, estimated_wait_s=1.0)
            trace_shed(self.parts.pipeline.tracer, overloaded, "door")
            raise overloaded from None
        except ValueError as error:  # a request id that is in use
            raise Refused(str(error), param="request_id") from None

    @contextmanager
    def _shed_at(self, gate: str) -> Iterator[None]:
        try:
            yield
        except Overloaded as error:
            trace_shed(self.parts.pipeline.tracer, error, gate)
            raise

    def _able_to(self, task: Task) -> TextStages:
        check_task(task, self.parts.loaded.info.tasks)
        if (text := self.parts.text) is None:
            raise AttributeError("a model that generates nothing has neither grammars nor searches")
        return text


def _check_id(request: Request) -> None:
    if request.request_id.startswith(OWN_IDS):
        problem = f"must not begin as the engine's own do, with {' or '.join(OWN_IDS)}"
        raise Refused(field_text("request_id", problem, repr(request.request_id)), param="request_id")
