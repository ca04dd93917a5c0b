"""The outbox of a request, from which its client reads the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Never

from ...runtime.crash_recovery import StageCrashed
from ...runtime.env.log import get_logger
from ...runtime.pipeline import NotServing
from ...runtime.wakeups import SharedWakeup
from ...runtime.workers.thread_start import ThreadNotStarted
from ..errors import Failed, OutOfResources, RequestError, Unavailable
from ..messages import NO_INTS, Begun, Finish, FinishReason, Ints, PromptLogprobs, Request, TokenLogprobs
from ..outputs import FINISH_NAMES, ChoiceDelta, PrefillProgress
from ..pooling_params import Floats
from .request_times import RequestTimes, metrics

log = get_logger("millrace.stages")


class RequestOutbox:
    """The answer to a request: an async iterator over lists of `ChoiceDelta`, one per choice at most.

    For one reader. Text that arrives between two reads is joined, so the writer never waits. A reader that stalls holds
    little more than `max_unread_tokens` of each choice in memory, since such a choice is parked. The iteration ends
    once each choice has given its finish reason, or raises the `RequestError` that ended the request.
    """

    def __init__(self, request: Request, wakeup: SharedWakeup) -> None:
        self.request = request  # as it entered the pipeline
        self.request_id = request.request_id
        self.choices = [AnswerBuffer(self, index) for index in range(request.num_sequences)]
        self.num_unfinished = len(self.choices)
        self.has_unread = False
        self.has_started = False
        self.cause: str | None = None  # why it ended: finish, error, cancel, disconnect, deadline, ...
        self.error: RequestError | None = None
        self.wakeup = wakeup  # wakes the reader; a reader that polls instead of iterating awaits it
        self.times = RequestTimes(request.arrival_s)
        self.num_attempts = 0  # times that it was sent to an engine of several, so far
        self.on_read: Callable[[RequestOutbox], None] | None = None  # called at each read, if set
        self._is_over = False  # the reader has seen the end

    # -- counts, for the usage reported to clients

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all started prompts; each prompt counts once, however many choices it has."""
        return sum(len(choice.begun.token_ids) for choice in self.choices[:: self.request.params.n])

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all choices so far, EOS included."""
        return sum(choice.num_generated for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were cached, not computed; counted for the first choice of each prompt."""
        return sum(choice.begun.num_cached for choice in self.choices[:: self.request.params.n])

    def metrics(self) -> dict[str, Any]:
        """The times of the request, once it has ended; see `request_times.metrics`."""
        counts = [choice.num_generated for choice in self.choices]
        num_preempted = sum(choice.finish.num_preempted for choice in self.choices if choice.finish is not None)
        return metrics(self.times, sum(counts), max(counts), num_preempted)

    # -- prompts

    def prompt_token_ids(self, prompt: int) -> Ints:
        """[P] the ids of a prompt, as computed; empty until the first token of an answer to it."""
        first = prompt * self.request.params.n
        begun = (choice.begun.token_ids for choice in self.choices[first : first + self.request.params.n])
        return next((token_ids for token_ids in begun if len(token_ids)), NO_INTS)

    def prompt_logprobs(self, prompt: int) -> PromptLogprobs | None:
        """The log-probabilities of a prompt's tokens except the first, once its answer has a token.

        None if they were not requested, or if the prompt has a single token.
        """
        scored = self.choices[prompt * self.request.params.n].prompt_logprobs
        return PromptLogprobs.join(scored) if scored else None

    # -- reading

    def __aiter__(self) -> RequestOutbox:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        while not self.has_unread or not (deltas := self._take()):
            if self.cause is not None:
                return self._end()
            await self.wakeup
        return deltas

    def _end(self) -> Never:
        """Ends the iteration, or raises the request's error once."""
        if self._is_over or self.error is None:
            raise StopAsyncIteration
        self._is_over = True
        raise self.error

    def poll(self) -> list[ChoiceDelta]:
        """Returns what has arrived, without waiting. Does not report the end of the request."""
        return self._take() if self.has_unread else []

    def _take(self) -> list[ChoiceDelta]:
        self.has_unread = False
        if self.on_read is not None:
            self.on_read(self)
        if len(self.choices) == 1:
            delta = self.choices[0].take()
            return [] if delta is None else [delta]
        return [delta for choice in self.choices if (delta := choice.take()) is not None]

    # -- writing

    def notify(self) -> None:
        """Wakes the reader: there is something to read."""
        self.has_unread = True
        self.wakeup.set()

    def end(self, cause: str, error: BaseException | None) -> None:
        """Records the end of the request. The exit calls it once."""
        self.cause = cause
        self.error = _as_request_error(self.request_id, cause, error)
        if self.error is None:
            for choice in self.choices:
                if choice.finish is None:
                    choice.finish = Finish(FinishReason.ABORT)
        self.notify()


def _as_request_error(request_id: str, cause: str, error: BaseException | None) -> RequestError | None:
    """The error shown to the client, without internal detail."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, StageCrashed):
        return Failed(f"stage {error.stage} failed on this request; see the server's log", code=error.code)
    if isinstance(error, ThreadNotStarted):
        log.error("thread.not_started", request_id=request_id, reason=str(error))
        return OutOfResources()
    if isinstance(error, NotServing):
        state = error.health.state
        return Unavailable(str(error), code=state if state in ("dead", "loading") else "draining")
    if error is not None:
        log.error("request.failed", request_id=request_id, error=type(error).__name__, exc_info=error)
        return Failed("internal error; see the server's log")
    return None


NOT_BEGUN = Begun(NO_INTS)


class AnswerBuffer:
    """One choice of a request: the exit fills it, the reader takes `ChoiceDelta`s from it."""

    __slots__ = (
        "begun",
        "finish",
        "index",
        "is_parked",
        "is_finish_delivered",
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
        self.is_finish_delivered = False  # whether the reader has its finish reason
        self.begun = NOT_BEGUN
        self.progress: PrefillProgress | None = None  # the last report, until it is read
        self.prompt_logprobs: list[PromptLogprobs] = []  # of a prompt's first choice, if requested; in order
        self.num_read = 0  # tokens already read
        self.num_unspoken_chars = 0  # characters read whose logprobs are not read yet

    @property
    def num_generated(self) -> int:
        return self.num_read + len(self.token_ids)

    def add_prompt_logprobs(self, scored: PromptLogprobs) -> None:
        """Adds new positions.

        Drops parts that repeat known ones: a preempted prompt is scored again.
        """
        if not self.prompt_logprobs or scored.end > self.prompt_logprobs[-1].end:
            self.prompt_logprobs.append(scored)

    def take(self) -> ChoiceDelta | None:
        """Takes what is new, or None. Tokens count even if their text is still held back."""
        is_end = self.finish is not None and not self.is_finish_delivered
        progress, self.progress = self.progress, None
        if not self.token_ids and not is_end:
            return None if progress is None else ChoiceDelta(self.index, "", (), progress=progress)
        text, token_ids = "".join(self.texts), tuple(self.token_ids)
        self.texts, self.token_ids = [], []
        self.num_read += len(token_ids)
        self.num_unspoken_chars += len(text)
        logprobs = self._take_logprobs() if self.logprobs else ()
        if not is_end or self.finish is None:
            return ChoiceDelta(self.index, text, token_ids, logprobs, progress=progress)
        self.is_finish_delivered = True
        finish = self.finish
        reason = FINISH_NAMES[finish.reason]
        return ChoiceDelta(self.index, text, token_ids, logprobs, reason, finish.stop_reason, finish.score, self.vector)

    def _take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Takes the logprobs whose text has been read, so that their joined texts equal the text.

        Text cut off by a stop string is cut off here too.
        """
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
