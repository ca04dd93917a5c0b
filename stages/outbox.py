"""The exit of the engine's pipeline, and the outboxes from which clients read.

Everything about the end of a request meets here: the exit writes the one terminal event, tells schedule which sequences
need not go on (the control lane), and intake that there is room again. Knows text and counts; refuses to know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Never

from ..runtime.bells import BellTower, SharedBell
from ..runtime.channel import ControlLane
from ..runtime.exit import Exit
from ..runtime.log import get_logger
from ..runtime.pipeline import NotServing
from ..runtime.runner import StageCrashed
from ..runtime.stage import Context, Crash, Outlet
from ..runtime.trace import EventKind
from .errors import Failed, Overloaded, RequestError, TimedOut, Unavailable
from .messages import (
    NO_INTS,
    Begun,
    Finish,
    FinishReason,
    Ints,
    Pooled,
    PromptLogprobs,
    Request,
    StepText,
    TokenLogprobs,
)
from .outputs import FINISH_NAMES, Delta, Progress
from .pooling import Floats
from .timing import RequestTimes, metrics

MAX_UNREAD_TOKENS = 256  # of a choice, before it is parked
STALL_S = 30.0  # that a client may leave a parked choice
NOT_BEGUN = Begun(NO_INTS)

log = get_logger("millrace.stages")


class Outboxes(Exit["RequestOutbox"]):
    """Sorts text into outboxes, and ends requests.

    A choice that has `max_unread_tokens` tokens nobody reads is parked: schedule does not serve it until its client
    reads again, and the request ends if that takes longer than `stall_s`.

    The control lane is written here and nowhere else, for here all ends are known: a cancel, a deadline or an error
    posts its cause for each sequence that has not finished, a stop string posts "finish". EOS, stop ids and lengths are
    not posted, as schedule learns of them from the device. Schedule may be told of sequences that it never met.
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
        self.max_queue_s = max_queue_s  # that a request may wait to be served; None: for ever
        self.locate: Callable[[RequestOutbox], tuple[str, bool]] = _nowhere  # the stage it is at, whether it was served
        self.max_unread_tokens = max_unread_tokens
        self.stall_s = stall_s
        self.lane = ControlLane("nobody reads")  # the pipeline's own takes its place before the start
        self.on_open: list[Callable[[RequestOutbox], None]] = []  # called with each request that comes in
        self.on_start: list[Callable[[str], None]] = []  # called with the id of a request at its first token
        self.on_end.append(self._let_go)
        self._bells = BellTower()  # of the outboxes
        self._choices: dict[int, Choice] = {}  # by sequence id: those that have not finished
        self._next_sequence_id = 0
        self._batch: Sequence[Any] = ()  # in hand, or last
        self._num_delivered = 0  # items of it
        self._context: Context | None = None

    async def setup(self, context: Context) -> None:
        self._context = context

    # -- requests

    def make_outbox(self, request: Request) -> RequestOutbox:
        first, self._next_sequence_id = self._next_sequence_id, self._next_sequence_id + request.num_sequences
        is_new = self._context is not None and request.parent_id is None  # a step of a search came when that did
        arrival_s = self._context.env.now() if self._context is not None and is_new else request.arrival_s
        return RequestOutbox(replace(request, first_sequence_id=first, arrival_s=arrival_s), self._bells.bell())

    def open(self, request: Request, deadline_s: float | None = None) -> RequestOutbox:
        outbox = super().open(request, deadline_s)
        self._trace_accepted(outbox.request)
        self._choices.update((choice.sequence_id, choice) for choice in outbox.choices)
        for callback in self.on_open:
            callback(outbox)
        if self.max_queue_s is not None and request.parent_id is None:
            loop = asyncio.get_running_loop()
            outbox.queue_timer = loop.call_later(self.max_queue_s, self._end_if_queued, outbox)
        return outbox

    def end(self, request_id: str, cause: str, error: BaseException | None = None) -> bool:
        outbox = self.live.get(request_id)
        if cause == "deadline" and outbox is not None and error is None:
            error = self._timed_out(outbox)
        return super().end(request_id, cause, error)

    def _timed_out(self, outbox: RequestOutbox) -> TimedOut:
        stage, has_begun = self.locate(outbox)
        what = "its answer was not complete" if has_begun else "it had not begun"
        message = f"the request ran out of time at {stage}: {what}; allow more time, or ask for less"
        return TimedOut(message, stage=stage, has_begun=has_begun)

    def _end_if_queued(self, outbox: RequestOutbox) -> None:
        if self.live.get(outbox.request_id) is outbox and not self.locate(outbox)[1]:
            self.end(outbox.request_id, "deadline")

    def requests_of(self, item: Any) -> Iterable[str]:
        """By request id, or by the sequences in the rows of a step."""
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
        """Whether somebody waits for more of a sequence."""
        return sequence_id in self._choices

    def park_again(self) -> None:
        """Tells schedule once more of each choice that is parked: it is another one, and has not heard."""
        for choice in self._choices.values():
            if choice.is_parked:
                self.lane.post(choice.sequence_id, "park")

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
        outbox.forget_stall()
        if outbox.queue_timer is not None:
            outbox.queue_timer.cancel()
        for choice in outbox.choices:
            if self._choices.pop(choice.sequence_id, None) is not None and not isinstance(error, Overloaded):
                self.lane.post(choice.sequence_id, cause)

    # -- text

    async def handle(self, batch: Sequence[Any], out: Outlet[Never]) -> None:
        self._batch, self._num_delivered = batch, 0
        for item in batch:
            self.deliver(item)
            self._num_delivered += 1

    async def recover(self, batch: Sequence[Any], error: BaseException, out: Outlet[Never]) -> None:
        """Delivers what was not delivered. The step in whose middle it broke ends its requests: some of its text is
        with their clients, and none may be sent twice."""
        if self._batch is batch and self._num_delivered < len(batch):
            self.fail(batch[self._num_delivered], StageCrashed(self.name, self.error_code, error))
            self._num_delivered += 1
        rest = batch[self._num_delivered :] if self._batch is batch else batch
        await self.handle(rest, out)

    def deliver(self, item: StepText) -> None:
        choices, rung = self._choices, []
        for sequence_id, text, token_id in zip(item.sequence_ids, item.texts, item.token_ids, strict=True):
            choice = choices.get(sequence_id)
            if choice is None:
                continue
            choice.texts.append(text)
            choice.token_ids.append(token_id)
            outbox = choice.outbox
            if not outbox.has_news:
                outbox.has_news = True
                rung.append(outbox.bell)
                if not outbox.has_started:
                    self._start(outbox)
            elif len(choice.token_ids) >= self.max_unread_tokens and not choice.is_parked:
                self._park(choice)
        self._bells.ring(rung)
        for sequence_id, begun in item.begun.items():
            if (choice := choices.get(sequence_id)) is not None:
                choice.begun = begun
                times = choice.outbox.times
                times.began_s = begun.began_s if times.began_s is None else min(times.began_s, begun.began_s)
        for told in item.progress:
            if (choice := choices.get(told.sequence_id)) is not None:
                self._tell_progress(choice, told.num_processed)
        for scored in item.prompt_logprobs:
            if (choice := choices.get(scored.sequence_id)) is not None:
                choice.add_prompt_logprobs(scored)
        for row, logprobs in item.logprobs.items():
            if (choice := choices.get(item.sequence_ids[row])) is not None:
                choice.logprobs.append(logprobs)
        for row, finish in item.finishes.items():
            self._finish(item.sequence_ids[row], finish)
        for pooled in item.pooled:
            self._deliver_pooled(pooled)

    def _deliver_pooled(self, pooled: Pooled) -> None:
        choice = self._choices.get(pooled.sequence_id)
        if choice is None:
            return
        choice.vector = pooled.vector
        choice.begun = pooled.begun
        outbox = choice.outbox
        if not outbox.has_started:
            self._start(outbox)
        outbox.has_news = True
        outbox.bell.ring()
        self._finish(pooled.sequence_id, Finish(FinishReason.ERROR if pooled.vector is None else FinishReason.STOP))

    def _tell_progress(self, choice: Choice, num_processed: int) -> None:
        began_s = choice.begun.began_s
        passed_s = max(0.0, self._now_s() - began_s)
        choice.progress = Progress(len(choice.begun.token_ids), choice.begun.num_cached, num_processed, passed_s)
        choice.outbox.has_news = True
        choice.outbox.bell.ring()

    def _now_s(self) -> float:
        return 0.0 if self._context is None else self._context.env.now()

    def _park(self, choice: Choice) -> None:
        choice.is_parked = True
        self.lane.post(choice.sequence_id, "park")
        outbox = choice.outbox
        if outbox.stall_timer is None:
            loop = asyncio.get_running_loop()
            outbox.stall_timer = loop.call_later(self.stall_s, self.end, outbox.request_id, "stalled_reader")
            outbox.on_read = self._unpark

    def _unpark(self, outbox: RequestOutbox) -> None:
        outbox.forget_stall()
        for choice in outbox.choices:
            if choice.is_parked:
                choice.is_parked = False
                if choice.sequence_id in self._choices:
                    self.lane.post(choice.sequence_id, "unpark")

    def _start(self, outbox: RequestOutbox) -> None:
        outbox.has_started = True
        outbox.times.first_token_s = now_s = self._now_s()
        if self._context is not None and self._context.tracer.enabled:
            tracer, first = self._context.tracer, outbox.request.first_sequence_id
            waited_us = int((now_s - outbox.times.arrival_s) * 1e6)
            tracer.emit(EventKind.FIRST_TOKEN, self._context.source, 0, first, waited_us)
        for callback in self.on_start:
            callback(outbox.request.parent_id or outbox.request_id)

    def _finish(self, sequence_id: int, finish: Finish) -> None:
        choice = self._choices.pop(sequence_id, None)
        if choice is None:
            return
        choice.finish = finish
        if choice.outbox.request.params.max_tokens == 0:
            choice.token_ids.clear()  # a token that came with the end of the prompt, and nobody asked for
        if isinstance(finish.stop_reason, str):
            self.lane.post(sequence_id, "finish")
        outbox = choice.outbox
        outbox.times.last_token_s = self._now_s()
        outbox.num_unfinished -= 1
        if not outbox.num_unfinished:
            self.end(outbox.request_id, "finish")


class RequestOutbox:
    """Where a client reads the answer to its request: an async iterator over lists of `Delta`, at most one a choice.

    Text that arrives between two reads is joined, so the writer never waits; and a reader that stalls holds little more
    than `max_unread_tokens` of each choice in memory, as those are parked. The iteration ends after each choice had its
    finish reason, or raises the `RequestError` that ended the request. One reader.
    """

    def __init__(self, request: Request, bell: SharedBell) -> None:
        self.request = request  # as it enters the pipeline
        self.request_id = request.request_id
        self.choices = [Choice(self, index) for index in range(request.num_sequences)]
        self.num_unfinished = len(self.choices)
        self.has_news = False
        self.has_started = False
        self.cause: str | None = None  # why it ended: finish, error, cancel, disconnect, deadline, ...
        self.error: RequestError | None = None
        self.bell = bell  # rung when there is something to read; who does not iterate waits for it otherwise
        self.stall_timer: asyncio.TimerHandle | None = None  # runs while a choice is parked
        self.queue_timer: asyncio.TimerHandle | None = None
        self.times = RequestTimes(request.arrival_s)
        self.on_read: Callable[[RequestOutbox], None] | None = None  # to be told of the next read
        self._is_over = False  # the reader has seen the end

    # -- counts, for the usage that a client is told

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has; 0 for those not started."""
        return sum(len(choice.begun.token_ids) for choice in self.choices[:: self.request.params.n])

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all choices so far, EOS included."""
        return sum(choice.num_generated for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found, not computed; of each prompt those of its first choice."""
        return sum(choice.begun.num_cached for choice in self.choices[:: self.request.params.n])

    def metrics(self) -> dict[str, Any]:
        """How long it took, once it is over; see `timing.metrics`."""
        counts = [choice.num_generated for choice in self.choices]
        num_preempted = sum(choice.finish.num_preempted for choice in self.choices if choice.finish is not None)
        return metrics(self.times, sum(counts), max(counts), num_preempted)

    # -- prompts

    def prompt_token_ids(self, prompt: int) -> Ints:
        """[P] of that prompt, as it was computed; empty until a first token of answer to it."""
        first = prompt * self.request.params.n
        begun = (choice.begun.token_ids for choice in self.choices[first : first + self.request.params.n])
        return next((token_ids for token_ids in begun if len(token_ids)), NO_INTS)

    def prompt_logprobs(self, prompt: int) -> PromptLogprobs | None:
        """Of all tokens but the first of that prompt, once it has a token of answer; None if it has just one, or if
        nobody asked."""
        scored = self.choices[prompt * self.request.params.n].prompt_logprobs
        return PromptLogprobs.join(scored) if scored else None

    # -- reading

    def __aiter__(self) -> RequestOutbox:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self.has_news or not (deltas := self._take()):
            if self.cause is not None:
                return self._end()
            await self.bell
        return deltas

    def _end(self) -> Never:
        """No more is to come."""
        if self._is_over or self.error is None:
            raise StopAsyncIteration
        self._is_over = True
        raise self.error

    def poll(self) -> list[Delta]:
        """What has arrived, without waiting for more; nothing of how it ends."""
        return self._take() if self.has_news else []

    def _take(self) -> list[Delta]:
        self.has_news = False
        if self.on_read is not None:
            self.on_read(self)
        if len(self.choices) == 1:
            delta = self.choices[0].take()
            return [] if delta is None else [delta]
        return [delta for choice in self.choices if (delta := choice.take()) is not None]

    def forget_stall(self) -> None:
        """The reader reads, or need not any more."""
        self.on_read = None
        if self.stall_timer is not None:
            self.stall_timer.cancel()
            self.stall_timer = None

    # -- ending

    def end(self, cause: str, error: BaseException | None) -> None:
        """Called once, by the exit."""
        self.cause = cause
        self.error = _as_request_error(self.request_id, cause, error)
        if self.error is None:
            for choice in self.choices:
                if choice.finish is None:
                    choice.finish = Finish(FinishReason.ABORT)
        self.has_news = True
        self.bell.ring()


class Choice:
    """One answer on its way to the reader: what has arrived and was not read yet."""

    __slots__ = (
        "begun",
        "finish",
        "index",
        "is_parked",
        "is_told",
        "logprobs",
        "num_read",
        "num_unspoken_chars",
        "outbox",
        "progress",
        "prompt_logprobs",
        "sequence_id",
        "texts",
        "token_ids",
        "vector",
    )

    def __init__(self, outbox: RequestOutbox, index: int) -> None:
        self.outbox = outbox
        self.index = index
        self.sequence_id = outbox.request.first_sequence_id + index
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.vector: Floats | None = None  # of a pooled sequence, whole
        self.finish: Finish | None = None
        self.is_parked = False
        self.is_told = False  # the reader knows that it has finished
        self.begun = NOT_BEGUN
        self.progress: Progress | None = None  # the last that was told, until it is read
        self.prompt_logprobs: list[PromptLogprobs] = []  # of a prompt's first choice, if asked for; in order
        self.num_read = 0  # tokens
        self.num_unspoken_chars = 0  # of text that was read, and whose logprobs were not

    @property
    def num_generated(self) -> int:
        return self.num_read + len(self.token_ids)

    def add_prompt_logprobs(self, scored: PromptLogprobs) -> None:
        """Takes in what is new. After a preemption a prompt is scored again, and may be from its beginning."""
        if not self.prompt_logprobs or scored.end > self.prompt_logprobs[-1].end:
            self.prompt_logprobs.append(scored)

    def take(self) -> Delta | None:
        """What is new, or None. Tokens without text yet (half a character, a held-back stop string) are news too."""
        is_end = self.finish is not None and not self.is_told
        progress, self.progress = self.progress, None
        if not self.token_ids and not is_end:
            return None if progress is None else Delta(self.index, "", (), progress=progress)
        text, token_ids = "".join(self.texts), tuple(self.token_ids)
        self.texts, self.token_ids = [], []
        self.num_read += len(token_ids)
        self.num_unspoken_chars += len(text)
        logprobs = self._take_logprobs() if self.logprobs else ()
        if not is_end or self.finish is None:
            return Delta(self.index, text, token_ids, logprobs, progress=progress)
        self.is_told = True
        finish = self.finish
        reason = FINISH_NAMES[finish.reason]
        return Delta(self.index, text, token_ids, logprobs, reason, finish.stop_reason, finish.score, self.vector)

    def _take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Those whose text has been spoken, so that their texts joined are the text. What a stop string took from the
        text, it takes from the logprobs too."""
        taken: list[TokenLogprobs] = []
        for entry in self.logprobs:
            if len(entry.token) > self.num_unspoken_chars:
                break
            self.num_unspoken_chars -= len(entry.token)
            taken.append(entry)
        del self.logprobs[: len(taken)]
        if self.finish is not None and self.logprobs:
            if self.num_unspoken_chars:
                taken.append(replace(self.logprobs[0], token=self.logprobs[0].token[: self.num_unspoken_chars]))
            self.logprobs.clear()
            self.num_unspoken_chars = 0
        return tuple(taken)


def _pooled_in(item: Any) -> Iterable[Pooled]:
    """Of a message of any stage."""
    pooled = getattr(item, "pooled", ())
    return pooled.values() if isinstance(pooled, Mapping) else pooled


def _as_request_error(request_id: str, cause: str, error: BaseException | None) -> RequestError | None:
    """What the client is told: nothing of our insides."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, StageCrashed):
        return Failed(f"stage {error.stage} failed on this request; the log has more", code=error.code)
    if isinstance(error, NotServing):
        return Unavailable(str(error), code="dead" if error.health.state == "dead" else "draining")
    if error is not None:
        log.error("request.failed", request_id=request_id, error=type(error).__name__, exc_info=error)
        return Failed("internal error; the log has more")
    return None


def _nowhere(outbox: RequestOutbox) -> tuple[str, bool]:
    return "pipeline", outbox.has_started


__all__ = ["Choice", "Outboxes", "RequestOutbox"]
