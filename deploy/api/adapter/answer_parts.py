"""What an answer is made of, in order: text, reasoning, calls of functions, and an end.

The APIs beside chat tell these in their own shapes. Knows what a turn finds in a text. Refuses to know any API.
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
    from ....stages.outputs import Delta
    from ..assistant_turn import Turn


@dataclass(frozen=True, slots=True)
class Text:
    """More of what the model says."""

    text: str
    logprobs: Sequence[TokenLogprobs] = ()  # of tokens of this text, if asked for


@dataclass(frozen=True, slots=True)
class End:
    """The answer is over."""

    reason: str  # stop, length, tool_calls, error or abort
    stop_reason: str | int | None = None  # the stop string or stop token id


# A call lasts until a part of another kind, another call, or the end.
Part = Text | Reasoning | ToolCallBegun | ToolCallArguments | End


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    num_prompt: int
    num_cached: int  # of the prompt, not computed
    num_completion: int
    num_reasoning: int = 0  # of the completion


class PartsReader:
    """From the pieces of one answer to its parts. `turn` finds in the text what is more than words, if it may hold
    that; log-probabilities go with the first words of their piece then."""

    def __init__(self, turn: Turn | None = None) -> None:
        self._turn = turn

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, as far as the model marks it."""
        return (self._turn.num_reasoning_tokens or 0) if self._turn is not None else 0

    def read(self, delta: Delta) -> Iterator[Part]:
        """What is certain now that this piece is there as well."""
        reason = delta.finish_reason
        if self._turn is None:
            if delta.text or delta.logprobs:
                yield Text(delta.text, delta.logprobs)
        else:
            yield from self._read_turn(self._turn, delta)
            if reason == "stop" and self._turn.num_calls:
                yield End("tool_calls", delta.stop_reason)
                return
        if reason is not None:
            yield End(reason, delta.stop_reason)

    def _read_turn(self, turn: Turn, delta: Delta) -> Iterator[Part]:
        logprobs: Sequence[TokenLogprobs] = delta.logprobs
        for piece in turn.read(delta.text, delta.token_ids, delta.finish_reason is not None):
            if isinstance(piece, interface.Text):
                yield Text(piece.text, logprobs)
                logprobs = ()
            else:
                yield piece
