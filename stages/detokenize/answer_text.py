"""The text of one answer: its decoder and stop matcher, and the rows of the message to which it adds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..messages import Begun, Bools, Finish, FinishReason, StepText, StepTokens, TokenLogprobs, TopLogprobs
from ..params import SamplingParams
from .stop_strings import StopMatcher
from .token_traits import ANY, NOT_PLAIN, classes_of

Scored = tuple[TopLogprobs, int, bool]  # of a token; the time it came in µs, and whether it was drafted


class DecodesIncrementally(Protocol):
    """Decodes the tokens of one answer to text, in whole characters."""

    def push(self, token_id: int) -> str:
        """Adds a token. Returns the text that is complete now."""

    def flush(self) -> str:
        """Returns the rest, at the end of the answer."""

    @property
    def is_idle(self) -> bool:
        """Whether the text of a plain token may be taken from the table without a push."""


class TextTableProtocol(Protocol):
    """The text of each of T tokens alone. If `is_plain[i]`, it is `texts[i]` in every context."""

    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def bytes(self) -> Sequence[bytes]: ...  # a special token's bytes are its name
    @property
    def is_plain(self) -> Bools: ...  # [T]


@dataclass(slots=True)
class TextRows:
    """The rows of a `StepText` under construction."""

    sequence_ids: list[int]
    texts: list[str]
    token_ids: list[int]
    finishes: dict[int, Finish] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    def add(
        self, sequence_id: int, text: str, token_id: int, finish: Finish | None, logprobs: TokenLogprobs | None
    ) -> None:
        row = len(self.texts)
        self.sequence_ids.append(sequence_id)
        self.texts.append(text)
        self.token_ids.append(token_id)
        if finish is not None:
            self.finishes[row] = finish
        if logprobs is not None:
            self.logprobs[row] = logprobs

    def message(self, step: int, begun: dict[int, Begun], step_tokens: StepTokens | None = None) -> StepText:
        """The message, with the prompt_logprobs and progress of `step_tokens`."""
        return StepText(
            step,
            self.sequence_ids,
            self.texts,
            self.token_ids,
            self.finishes,
            self.logprobs,
            begun,
            prompt_logprobs=() if step_tokens is None else step_tokens.prompt_logprobs,
            progress=() if step_tokens is None else step_tokens.progress,
        )


class AnswerText:
    """The decoder and stop matcher of one answer."""

    __slots__ = (
        "_decoder",
        "_matcher",
        "_params",
        "_table",
        "_usual_cares",
        "last_token_us",
        "next_place",
        "num_preempted",
        "request_id",
        "slot",
    )

    def __init__(
        self, request_id: str, table: TextTableProtocol, decoder: DecodesIncrementally, params: SamplingParams
    ) -> None:
        self.request_id = request_id
        self.slot: int | None = None
        self.next_place = 0  # valid without a slot, like the next attribute
        self.last_token_us = 0  # time of its last token
        self.num_preempted = 0
        self._table = table
        self._params = params
        self._decoder = decoder
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._usual_cares = ANY if params.logprobs is not None else NOT_PLAIN | classes_of(s[0] for s in params.stop)

    def fork(self) -> AnswerText:
        """An independent copy that has read the same tokens."""
        twin = copy.copy(self)
        twin._decoder, twin._matcher = copy.deepcopy((self._decoder, self._matcher))
        return twin

    @property
    def wanted_traits(self) -> int:
        """The traits that make the next token's row slow."""
        is_idle = self._decoder.is_idle and (self._matcher is None or self._matcher.is_idle)
        return self._usual_cares if is_idle else ANY

    def read(
        self, token_id: int, place: int, finish_reason: int, scored: Scored | None
    ) -> tuple[str, Finish | None, TokenLogprobs | None]:
        """Returns the text to send, the finish if the answer ended, and requested logprobs."""
        params = self._params
        if params.max_tokens == 0 and finish_reason != FinishReason.ERROR:
            return "", Finish(FinishReason.LENGTH), None
        is_ended = finish_reason != FinishReason.NONE
        is_shown = finish_reason == FinishReason.NONE or finish_reason == FinishReason.LENGTH
        is_shown |= finish_reason == FinishReason.STOP and params.include_stop_str_in_output
        text = self._decoder.push(token_id) if is_shown else ""
        if is_ended:
            text += self._decoder.flush()
        logprobs = None if scored is None else self._logprobs(token_id, text, *scored)
        matched = None
        if self._matcher is not None and finish_reason == FinishReason.ERROR:
            text = self._matcher.flush() + text  # the token means nothing, so no stop string turns this into an answer
        elif self._matcher is not None and place >= params.min_tokens:
            text, matched = self._matcher.push(text)
            if is_ended and matched is None:
                text += self._matcher.flush()
        if matched is not None:
            return text, Finish(FinishReason.STOP, matched), logprobs
        if not is_ended:
            return text, None, logprobs
        is_stop_id = finish_reason == FinishReason.STOP and token_id in params.stop_token_ids
        return text, Finish(FinishReason(finish_reason), token_id if is_stop_id else None), logprobs

    def _logprobs(self, token_id: int, text: str, top: TopLogprobs, now_us: int, is_drafted: bool) -> TokenLogprobs:
        """The token's logprobs. `text` is what it added, so that joined texts equal the answer."""
        alternatives = tuple(
            (other, text if other == token_id else self._name(other), self._bytes(other), logprob)
            for other, logprob in zip(top.token_ids, top.logprobs, strict=True)
        )
        token_bytes = self._bytes(token_id)
        return TokenLogprobs(token_id, text, token_bytes, top.chosen, top.rank, alternatives, now_us, is_drafted)

    def _name(self, token_id: int) -> str:
        return self._bytes(token_id).decode("utf-8", "replace")

    def _bytes(self, token_id: int) -> bytes:
        return self._table.bytes[token_id] if token_id < len(self._table.bytes) else b""
