"""The exit of the engine's pipeline: sorts text into the outboxes from which clients read.

It also handles the end of every request: it writes the single terminal event, tells schedule which sequences have ended
(the control lane), and tells intake that there is room again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Never

import numpy as np

from ...runtime.channel import ControlLane
from ...runtime.crash_recovery import StageCrashed
from ...runtime.env.awake_time import AwakeTimer
from ...runtime.env.log import get_logger
from ...runtime.exit import Exit
from ...runtime.stage import Context, Crash, Outlet
from ...runtime.trace.tracer import EventKind
from ...runtime.wakeups import WakeupBatch
from ..errors import Failed, Overloaded, TimedOut
from ..messages import Begun, Finish, FinishReason, Pooled, Request, StepText
from ..outputs import PrefillProgress
from ..replies import Reply
from .request_outbox import AnswerBuffer, RequestOutbox
from .slow_readers import SlowReaders

MAX_UNREAD_TOKENS = 256  # unread tokens of a choice at which it is parked
STALL_S = 30.0  # time a choice may stay parked before its request ends

log = get_logger("millrace.stages")


class Outboxes(Exit[RequestOutbox]):
    """Sorts text into outboxes, and ends requests.

    A choice with `max_unread_tokens` unread tokens is parked: schedule does not serve it until its client reads again.
    The request ends if that takes longer than `stall_s`.

    Only the exit writes to the control lane, since it knows of every end. A cancel, a deadline or an error posts its
    cause for each unfinished sequence; a stop string posts "finish". EOS, stop ids and lengths are not posted: schedule
    learns of them from the device. The lane may name sequences that schedule has never received.
    """

    inputs: ClassVar = {"in": StepText}
    on_crash: ClassVar = Crash.RECOVER

    def __init__(
        self,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        stall_s: float = STALL_S,
        max_queue_s: float | None = None,
    ) -> None:
        super().__init__()
        self.max_queue_s = max_queue_s  # time a request may wait to be served; None: no limit
        self.locate: Callable[[RequestOutbox], tuple[str, bool]] = _nowhere  # (its stage, whether it was served)
        self.max_unread_tokens = max_unread_tokens
        self.lane = ControlLane("unconnected")  # replaced by the pipeline's lane before the start
        self.on_open: list[Callable[[RequestOutbox], None]] = []  # called with each new request
        self.on_start: list[Callable[[str], None]] = []  # called with the id of a request at its first token
        self.on_end.append(self._let_go)
        self._parking = SlowReaders(stall_s, self._post, self.end)
        self._queue_timers: dict[str, AwakeTimer] = {}  # by request id, until it has ended
        self._wakeups = WakeupBatch()  # of the outboxes
        self._choices: dict[int, AnswerBuffer] = {}  # by sequence id: unfinished choices
        self._next_sequence_id = 0
        self._batch: Sequence[Any] = ()  # the current batch, or the last one
        self._num_delivered = 0  # items of the batch already delivered
        self._context: Context | None = None

    async def setup(self, context: Context) -> None:
        self._context = context

    # -- requests

    def make_outbox(self, request: Request) -> RequestOutbox:
        first, self._next_sequence_id = self._next_sequence_id, self._next_sequence_id + request.num_sequences
        is_new = self._context is not None and request.parent_id is None  # a beam search's steps keep its time
        arrival_s = self._context.env.now() if self._context is not None and is_new else request.arrival_s
        return RequestOutbox(replace(request, first_sequence_id=first, arrival_s=arrival_s), self._wakeups.wakeup())

    def open(self, request: Request, deadline_s: float | None = None) -> RequestOutbox:
        outbox = super().open(request, deadline_s)
        self._trace_accepted(outbox.request)
        self._choices.update((choice.sequence_id, choice) for choice in outbox.choices)
        for callback in self.on_open:
            callback(outbox)
        if self.max_queue_s is not None and request.parent_id is None:
            self._queue_timers[outbox.request_id] = AwakeTimer(self.max_queue_s, self._end_if_queued, outbox)
        return outbox

    def note_attempt(self, request_id: str) -> None:
        """The request is sent to an engine of several, for the first time or again."""
        if (outbox := self.live.get(request_id)) is not None:
            outbox.num_attempts += 1

    def end(self, request_id: str, cause: str, error: BaseException | None = None) -> bool:
        outbox = self.live.get(request_id)
        if cause == "deadline" and outbox is not None and error is None:
            error = self._timed_out(outbox)
        return super().end(request_id, cause, error)

    def _timed_out(self, outbox: RequestOutbox) -> TimedOut:
        stage, has_begun = self.locate(outbox)
        what = "its answer was not complete" if has_begun else "it had not started"
        message = f"the request ran out of time at {stage}: {what}; allow more time, or request fewer tokens"
        return TimedOut(message, stage=stage, has_begun=has_begun)

    def _end_if_queued(self, outbox: RequestOutbox) -> None:
        if self.live.get(outbox.request_id) is outbox and not self.locate(outbox)[1]:
            self.end(outbox.request_id, "deadline")

    def requests_of(self, item: Any) -> Iterable[str]:
        """The live requests of an item: by its request id, or by the sequences of its rows."""
        if hasattr(item, "request_id"):
            return (item.request_id,)
        sequence_ids = [*getattr(item, "sequence_ids", ()), *(pooled.sequence_id for pooled in _pooled_in(item))]
        choices = (self._choices.get(int(sequence_id)) for sequence_id in sequence_ids)
        return tuple(dict.fromkeys(choice.outbox.request_id for choice in choices if choice is not None))

    def note_service(self, request_id: str, stage: str, service_us: int) -> None:
        outbox = self.live.get(request_id)
        if outbox is not None:
            stages_us = outbox.times.stages_us
            stages_us[stage] = stages_us.get(stage, 0) + service_us

    def awaits(self, sequence_id: int) -> bool:
        """Whether a client still waits for tokens of a sequence."""
        return sequence_id in self._choices

    def park_again(self) -> None:
        """Posts each parked choice again, for a new scheduler that does not know of them."""
        for choice in self._choices.values():
            if choice.is_parked:
                self._post(choice.sequence_id, "park")

    def _post(self, sequence_id: int, cause: str) -> None:
        self.lane.post(sequence_id, cause)

    def find_request(self, key: str | int) -> Request | None:
        if isinstance(key, str):
            outbox = self.live.get(key)
            return None if outbox is None else outbox.request
        choice = self._choices.get(int(key))
        return None if choice is None else choice.outbox.request

    def number_of(self, request_id: str) -> int | None:
        outbox = self.live.get(request_id)
        return None if outbox is None else outbox.request.first_sequence_id

    def _trace_accepted(self, request: Request) -> None:
        if self._context is not None and self._context.tracer.enabled:
            tracer, source, first = self._context.tracer, self._context.source, request.first_sequence_id
            tracer.emit_request_name(source, first, request.request_id)
            tracer.emit(EventKind.REQUEST_ACCEPTED, source, 0, first, request.num_sequences, max(0, request.priority))

    def _trace_finished(self, outbox: RequestOutbox, cause: str) -> None:
        if self._context is not None and self._context.tracer.enabled:
            tracer, first = self._context.tracer, outbox.request.first_sequence_id
            counts = (outbox.num_prompt_tokens, outbox.num_generated_tokens)
            tracer.emit(EventKind.REQUEST_FINISHED, self._context.source, 0, first, tracer.source(cause), *counts)

    def _let_go(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        self._trace_finished(outbox, cause)
        self._parking.forget(outbox)
        if (timer := self._queue_timers.pop(outbox.request_id, None)) is not None:
            timer.cancel()
        for choice in outbox.choices:
            if self._choices.pop(choice.sequence_id, None) is not None and not isinstance(error, Overloaded):
                self._post(choice.sequence_id, cause)

    # -- text

    async def handle(self, batch: Sequence[Any], out: Outlet[Never]) -> None:
        self._batch, self._num_delivered = batch, 0
        for item in batch:
            self.deliver(item)
            self._num_delivered += 1

    async def recover(self, batch: Sequence[Any], error: BaseException, out: Outlet[Never]) -> None:
        """Delivers the remaining items.

        Fails the requests of the item that crashed: clients may already have some of its text, and none may be sent
        twice.
        """
        if self._batch is batch and self._num_delivered < len(batch):
            self.fail(batch[self._num_delivered], StageCrashed(self.name, self.error_code, error))
            self._num_delivered += 1
        rest = batch[self._num_delivered :] if self._batch is batch else batch
        await self.handle(rest, out)

    def deliver(self, item: StepText | Reply) -> None:
        if isinstance(item, Reply):
            self._deliver_reply(item)
            return
        choices, rung = self._choices, []
        for sequence_id, text, token_id in zip(item.sequence_ids, item.texts, item.token_ids, strict=True):
            choice = choices.get(sequence_id)
            if choice is None:
                continue
            choice.texts.append(text)
            choice.token_ids.append(token_id)
            outbox = choice.outbox
            if not outbox.has_unread:
                outbox.has_unread = True
                rung.append(outbox.wakeup)
                if not outbox.has_started:
                    self._start(outbox)
            elif len(choice.token_ids) >= self.max_unread_tokens and not choice.is_parked:
                self._parking.park(choice)
        self._wakeups.set(rung)
        for sequence_id, begun in item.begun.items():
            if (choice := choices.get(sequence_id)) is not None:
                choice.begun = begun
                choice.outbox.times.begin(begun.began_s)
        for report in item.progress:
            if (choice := choices.get(report.sequence_id)) is not None:
                self._report_progress(choice, report.num_processed)
        for scored in item.prompt_logprobs:
            if (choice := choices.get(scored.sequence_id)) is not None:
                choice.add_prompt_logprobs(scored)
                if np.isnan(scored.logprobs).any():
                    self._fail_not_finite(choice, "the log-probability of a prompt token is NaN")
        for row, logprobs in item.logprobs.items():
            if (choice := choices.get(item.sequence_ids[row])) is not None:
                choice.logprobs.append(logprobs)
        for row, finish in item.finishes.items():
            self._finish(item.sequence_ids[row], finish)
        for pooled in item.pooled:
            self._deliver_pooled(pooled)

    def _deliver_reply(self, reply: Reply) -> None:
        for sequence_id in reply.sequence_ids:
            if (choice := self._choices.get(sequence_id)) is None:
                continue
            choice.begun = Begun(reply.prompt_ids)
            choice.texts.append(reply.text)
            choice.token_ids += reply.token_ids
            if not choice.outbox.has_started:
                self._start(choice.outbox)
            choice.outbox.notify()
            self._finish(sequence_id, Finish(FinishReason.STOP))

    def _deliver_pooled(self, pooled: Pooled) -> None:
        choice = self._choices.get(pooled.sequence_id)
        if choice is None:
            return
        choice.begun = pooled.begun
        if pooled.vector is None:
            self._fail_not_finite(choice, f"the vector of input {choice.index} holds NaN or infinity")
            return
        choice.vector = pooled.vector
        outbox = choice.outbox
        if not outbox.has_started:
            self._start(outbox)
        outbox.notify()
        self._finish(pooled.sequence_id, Finish(FinishReason.STOP))

    def _report_progress(self, choice: AnswerBuffer, num_processed: int) -> None:
        began_s = choice.begun.began_s
        passed_s = 0.0 if began_s is None else max(0.0, self._now_s() - began_s)
        choice.progress = PrefillProgress(len(choice.begun.token_ids), choice.begun.num_cached, num_processed, passed_s)
        choice.outbox.notify()

    def _now_s(self) -> float:
        return 0.0 if self._context is None else self._context.env.now()

    def _start(self, outbox: RequestOutbox) -> None:
        outbox.has_started = True
        outbox.times.first_token_s = now_s = self._now_s()
        if self._context is not None and self._context.tracer.enabled:
            tracer, first = self._context.tracer, outbox.request.first_sequence_id
            waited_us = int((now_s - outbox.times.arrival_s) * 1e6)
            tracer.emit(EventKind.FIRST_TOKEN, self._context.source, 0, first, waited_us)
        for callback in self.on_start:
            callback(outbox.request.parent_id or outbox.request_id)

    def _fail_not_finite(self, choice: AnswerBuffer, problem: str) -> None:
        """Ends the request of a choice for which the model returned no finite numbers."""
        outbox = choice.outbox
        log.error(
            "model.not_finite",
            request_id=outbox.request_id,
            choice=choice.index,
            num_prompt_tokens=len(choice.begun.token_ids),
            num_generated_tokens=choice.num_generated,
        )
        message = f"{problem}; the model's weights, or its dtype, are to blame: see the server's log"
        self.end(outbox.request_id, "error", Failed(message, code="model_error"))

    def _finish(self, sequence_id: int, finish: Finish) -> None:
        choice = self._choices.get(sequence_id)
        if choice is None:
            return
        if finish.reason is FinishReason.ERROR:
            choice.token_ids.pop()  # it stands for no token
            self._fail_not_finite(
                choice, f"no token has a finite score after {choice.num_generated} tokens of choice {choice.index}"
            )
            return
        del self._choices[sequence_id]
        choice.finish = finish
        if choice.outbox.request.params.max_tokens == 0:
            choice.token_ids.clear()  # the token sampled at the end of the prompt, not requested
        if isinstance(finish.stop_reason, str):
            self._post(sequence_id, "finish")
        outbox = choice.outbox
        outbox.times.last_token_s = self._now_s()
        outbox.num_unfinished -= 1
        if not outbox.num_unfinished:
            self.end(outbox.request_id, "finish")


def _pooled_in(item: Any) -> Iterable[Pooled]:
    """The pooled results in a message of any stage."""
    pooled = getattr(item, "pooled", ())
    return pooled.values() if isinstance(pooled, Mapping) else pooled


def _nowhere(outbox: RequestOutbox) -> tuple[str, bool]:
    return "pipeline", outbox.has_started


__all__ = ["AnswerBuffer", "Outboxes", "RequestOutbox"]
