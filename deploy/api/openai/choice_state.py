"""One answer as it grows, the token counts of all answers of a request, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..assistant_turn import AssistantTurn, Piece
from .logprob_fields import completion_logprobs

if TYPE_CHECKING:
    from ....stages.messages import TokenLogprobs
    from ....stages.outputs import ChoiceDelta


@dataclass(slots=True)
class ChoiceState:
    """One answer as it grows. `num_chars` counts the text of its tokens, for `text_offset`."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # not in `written` yet
    written: dict[str, bytearray] = field(default_factory=dict)  # the lists of logprobs as JSON without brackets
    num_scored: int = 0  # tokens in `written`, and the sum of their log-probabilities
    sum_logprobs: float = 0.0
    num_tokens: int = 0
    num_chars: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    turn: AssistantTurn | None = None  # parser of the text; None if it is plain text
    pieces: list[Piece] = field(default_factory=list)  # of the turn: all, or those of the last delta if not kept
    is_opened: bool = False  # its first chunk, which may hold prompt data, has been sent

    def add(self, delta: ChoiceDelta, keep: bool) -> None:
        """Adds a delta. With `keep`, its text, token ids and logprobs are stored too."""
        self.num_tokens += len(delta.token_ids)
        if self.turn is not None:
            pieces = self.turn.read(delta.text, delta.token_ids, delta.finish_reason is not None)
            if not keep:
                self.pieces.clear()
            self.pieces += pieces
        if keep:
            self.texts.append(delta.text)
            self.token_ids.extend(delta.token_ids)
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            if self.turn is not None:
                self.finish_reason = self.turn.finish_reason(delta.finish_reason)

    def completion_logprobs(self, tokens: Sequence[TokenLogprobs], *, as_ids: bool) -> dict[str, list[Any]]:
        """Its next tokens in the shape of completions; offsets continue from the last call's."""
        lists = completion_logprobs(tokens, self.num_chars, as_ids=as_ids)
        self.num_chars += sum(len(token.token) for token in tokens)
        return lists


def usage(num_prompt: int, num_cached: int, choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """The `usage` object: tokens of all prompts and all choices of a request."""
    num_completion = sum(choice.num_tokens for choice in choices)
    token_counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens": num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    thoughts = [choice.turn.num_reasoning_tokens for choice in choices if choice.turn is not None]
    if any(count is not None for count in thoughts):
        token_counts["completion_tokens_details"] = {"reasoning_tokens": sum(count or 0 for count in thoughts)}
    return token_counts


def best(choices: Sequence[ChoiceState], best_of: int, n: int) -> list[ChoiceState]:
    """Selects the `n` best of each prompt's `best_of` choices, best first, and renumbers them.

    Choices are ranked by mean log-probability per token. Among equals the earlier choice wins.
    """
    chosen: list[ChoiceState] = []
    for first in range(0, len(choices), best_of):
        ranked = sorted(choices[first : first + best_of], key=_mean_logprob, reverse=True)
        chosen += ranked[:n]
    for index, choice in enumerate(chosen):
        choice.index = index
    return chosen


def _mean_logprob(choice: ChoiceState) -> float:
    return choice.sum_logprobs / choice.num_scored if choice.num_scored else float("-inf")
