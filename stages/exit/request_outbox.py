"""Where a client reads the answer to its request. Knows text, counts and the one end; refuses to know HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Never

from ...runtime.env.log import get_logger
from ...runtime.pipeline import NotServing
from ...runtime.stage_runner import StageCrashed
from ...runtime.wakeups import SharedBell
from ..errors import Failed, RequestError, Unavailable
from ..messages import NO_INTS, Begun, Finish, FinishReason, Ints, PromptLogprobs, Request, TokenLogprobs
from ..outputs import FINISH_NAMES, Delta, Progress
from ..pooling_params import Floats
from .request_times import RequestTimes, metrics

log = get_logger("millrace.stages")


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

    # -- writing

    def tell(self) -> None:
        """There is something to read."""
        self.has_news = True
        self.bell.ring()

    def end(self, cause: str, error: BaseException | None) -> None:
        """Called once, by the exit."""
        self.cause = cause
        self.error = _as_request_error(self.request_id, cause, error)
        if self.error is None:
            for choice in self.choices:
                if choice.finish is None:
                    choice.finish = Finish(FinishReason.ABORT)
        self.tell()


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


NOT_BEGUN = Begun(NO_INTS)


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
