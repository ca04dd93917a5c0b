"""The parts of an answer, in order: text, reasoning, function calls and an end.

Responses and Messages convert these parts to their own shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..assistant_turn import ToolCallArguments, ToolCallBegun
from ..parsers import interface
from ..parsers.interface import Reasoning

if TYPE_CHECKING:
    from ....stages.messages import TokenLogprobs
    from ....stages.outputs import ChoiceDelta
    from ..assistant_turn import AssistantTurn


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer's text."""

    text: str
    logprobs: Sequence[TokenLogprobs] = ()  # of the tokens of this text, if requested


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of the answer."""

    reason: str  # stop, length, tool_calls or abort
    stop_reason: str | int | None = None  # the stop string or stop token id


# A call ends at a part of another kind, another call, or `AnswerEnd`.
Part = TextDelta | Reasoning | ToolCallBegun | ToolCallArguments | AnswerEnd


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one request."""

    num_prompt: int
    num_cached: int  # of the prompt, taken from the prefix cache
    num_completion: int
    num_reasoning: int = 0  # of the completion


class PartsReader:
    """Converts the deltas of one answer to parts.

    `turn` parses the text; None if the answer can only be plain text. With a turn, the log-probabilities of a delta go
    with its first `TextDelta`.
    """

    def __init__(self, turn: AssistantTurn | None = None) -> None:
        self._turn = turn

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens so far; 0 if the model does not mark its reasoning."""
        return (self._turn.num_reasoning_tokens or 0) if self._turn is not None else 0

    def read(self, delta: ChoiceDelta) -> Iterator[Part]:
        """Takes the next delta; yields the parts that are certain by now."""
        reason: str | None = delta.finish_reason
        if self._turn is None:
            if delta.text or delta.logprobs:
                yield TextDelta(delta.text, delta.logprobs)
        else:
            yield from self._read_turn(self._turn, delta)
            reason = None if reason is None else self._turn.finish_reason(reason)
        if reason is not None:
            yield AnswerEnd(reason, delta.stop_reason)

    def _read_turn(self, turn: AssistantTurn, delta: ChoiceDelta) -> Iterator[Part]:
        logprobs: Sequence[TokenLogprobs] = delta.logprobs
        for piece in turn.read(delta.text, delta.token_ids, delta.finish_reason is not None):
            if isinstance(piece, interface.Text):
                yield TextDelta(piece.text, logprobs)
                logprobs = ()
            else:
                yield piece
