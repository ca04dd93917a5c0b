"""Submits requests to a running engine: grammars, beam searches, trace of shed requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ...runtime.env.env import Env
from ...runtime.pipeline import Busy
from ...runtime.trace.tracer import EventKind
from ..adapters.gate import AdapterGate
from ..beam_search.algorithm import BeamParams
from ..errors import Overloaded, Refused, TimedOut
from ..exit.outboxes import RequestOutbox
from ..messages import Ints, Request
from ..params import SamplingParams
from ..tasks import Task, check_task, task_of
from .wiring import EncoderStages, TextStages


@dataclass(frozen=True, slots=True)
class Submitter:
    """Submits requests to running parts. Stateless; `Engine` documents the methods."""

    parts: TextStages | EncoderStages
    env: Env

    async def submit(self, request: Request, wait: bool, deadline_s: float | None) -> RequestOutbox:
        if request.adapter is None:
            return await self._submit(request, wait, deadline_s)
        adapters, began_s = self.adapters(), self.env.now()
        try:
            async with asyncio.timeout(deadline_s):
                request = await adapters.admit(self.env, request)
        except Overloaded as error:
            self._trace_shed(error, "adapter")
            raise
        except TimeoutError:
            message = "the time limit of the request passed while its adapter was loaded"
            raise TimedOut(message, stage="intake", has_begun=False) from None
        left_s = None if deadline_s is None else max(deadline_s - (self.env.now() - began_s), 0.0)
        try:
            return await self._submit(request, wait, left_s)
        except BaseException:
            adapters.leave(request.request_id)
            raise

    def adapters(self) -> AdapterGate:
        """Raises `Refused` unless adapters are served."""
        adapters = self.parts.adapters if isinstance(self.parts, TextStages) else None
        if adapters is None:
            raise Refused("adapter: this engine serves none; start it with enable_lora", param="model")
        return adapters

    async def _submit(self, request: Request, wait: bool, deadline_s: float | None) -> RequestOutbox:
        structured = request.params.structured_outputs
        if structured is None:
            return await self._enter(request, wait, deadline_s)
        parts, began_s = self._able_to(task_of(request)), self.env.now()
        try:
            async with asyncio.timeout(deadline_s):
                await parts.gate.admit(self.env, request.request_id, structured)
        except Overloaded as error:
            self._trace_shed(error, "grammar")
            raise
        except TimeoutError:
            message = "the time limit of the request passed while its grammar was compiled"
            raise TimedOut(message, stage="intake", has_begun=False) from None
        left_s = None if deadline_s is None else max(deadline_s - (self.env.now() - began_s), 0.0)
        lookup_s = self.env.now() - began_s
        try:
            outbox = await self._enter(request, wait, left_s)
        except BaseException:
            parts.gate.leave(request.request_id)
            raise
        tracer, first = parts.pipeline.tracer, outbox.request.first_sequence_id
        tracer.emit(EventKind.REQUEST_GRAMMAR, tracer.source("grammar"), 0, first, int(lookup_s * 1e6))
        return outbox

    def submit_search(self, request: Request, beams: BeamParams, deadline_s: float | None) -> RequestOutbox:
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

    async def _enter(self, request: Request, wait: bool, deadline_s: float | None) -> RequestOutbox:
        try:
            return await self.parts.pipeline.submit(request, deadline_s=deadline_s, wait=wait)  # type: ignore[return-value]
        except Busy as error:
            waiting = self.parts.intake.admission.num_waiting
            overloaded = Overloaded(f"{error}: try again in 1 s", queue_depth=waiting, estimated_wait_s=1.0)
            self._trace_shed(overloaded, "door")
            raise overloaded from None
        except ValueError as error:  # a request id that is in use
            raise Refused(str(error), param="request_id") from None

    def _able_to(self, task: Task) -> TextStages:
        check_task(task, self.parts.loaded.info.tasks)
        if not isinstance(self.parts, TextStages):
            raise AttributeError("a model that generates nothing has neither grammars nor searches")
        return self.parts

    def _trace_shed(self, error: Overloaded, reason: str) -> None:
        tracer = self.parts.pipeline.tracer
        counts = (int(error.estimated_wait_s * 1000), error.queue_depth, tracer.source(reason))
        tracer.emit(EventKind.REQUEST_SHED, tracer.source("door"), 0, *counts)
