"""What an answer is made of, in order: text, reasoning, calls of functions, and an end.

Every API tells these in its own shapes; whoever parses a model's output makes them. Knows no API and no parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..stages.messages import TokenLogprobs
    from ..stages.outputs import Delta


@dataclass(frozen=True, slots=True)
class Text:
    """More of what the model says."""

    text: str
    logprobs: Sequence[TokenLogprobs] = ()  # of tokens of this text, if asked for


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what it thinks before it says something."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """It begins to call a function. The call lasts until a part of another kind, another call, or the end."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The answer is over."""

    reason: str  # stop, length, tool_calls, error or abort
    stop_reason: str | int | None = None  # the stop string or stop token id


Part = Text | Reasoning | Call | Arguments | End


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    num_prompt: int
    num_cached: int  # of the prompt, not computed
    num_completion: int
    num_reasoning: int = 0  # of the completion


def plain_parts(delta: Delta) -> Iterator[Part]:
    """The parts of a piece of an answer in which nothing is to be found but text."""
    if delta.text or delta.logprobs:
        yield Text(delta.text, delta.logprobs)
    if delta.finish_reason is not None:
        yield End(delta.finish_reason, delta.stop_reason)
