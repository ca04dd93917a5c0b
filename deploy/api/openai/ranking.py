"""`best_of`: more answers than were asked for, of which the likeliest are told."""

from __future__ import annotations

from collections.abc import Sequence

from .answers import Choice


def best(choices: Sequence[Choice], best_of: int, n: int) -> list[Choice]:
    """Of each prompt's `best_of` choices the `n` with the highest mean log-probability a token, best first, numbered
    anew. Among equals the earlier ones."""
    chosen: list[Choice] = []
    for first in range(0, len(choices), best_of):
        ranked = sorted(choices[first : first + best_of], key=_mean_logprob, reverse=True)
        chosen += ranked[:n]
    for index, choice in enumerate(chosen):
        choice.index = index
    return chosen


def _mean_logprob(choice: Choice) -> float:
    logprobs = [token.logprob for token in choice.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
