"""Log-probabilities of prompt tokens (`prompt_logprobs`), computed in pieces.

Used on the device thread only. The logits of a long prompt take gigabytes. So the forward pass hands the sampler the
last hidden states and a function from them to logits. The sampler computes one bounded piece at a time, and keeps each
token's log-probability, its rank and the k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..messages import PromptLogprobs
from ..sample import sampling_math as maths
from .arrays import Array, arrays_of
from .prompt_runs import PromptRun

PIECE_BYTES = 32 * 2**20  # of logits at a time, as float32


@dataclass(frozen=True, slots=True, eq=False)
class LogitsWithPrompts:
    """The result of a forward pass, instead of plain logits, when a step scores a prompt."""

    sampled: Array  # [L, V] as without scored prompts
    runs: Sequence[PromptRun]
    hidden: Array  # [sum of C, H] of all runs, concatenated
    to_logits: Callable[[Array], Array]  # [n, H] -> [n, V]
    max_rows: int  # of a piece; the sampler has memory for this many rows of logits

    def pieces(self) -> Iterator[tuple[int, slice, Array]]:
        """Yields pieces of at most `PIECE_BYTES`: (index of the run, its tokens, logits [n, V] f32).

        The logits of a token are computed from the hidden state of the token before it.
        """
        num_rows = max(1, min(self.max_rows, PIECE_BYTES // (4 * self.sampled.shape[1])))
        begin = 0
        for index, run in enumerate(self.runs):
            for start in range(0, len(run), num_rows):
                end = min(start + num_rows, len(run))
                piece = self.to_logits(self.hidden[begin + start : begin + end])
                yield index, slice(start, end), arrays_of(piece).floats(piece)
            begin += len(run)


def prompt_logprobs(logits: LogitsWithPrompts) -> tuple[PromptLogprobs, ...]:
    """Scores each run by the model's raw logits: before penalties, bias and temperature."""
    made = tuple(run.empty(logits.sampled.shape[1]) for run in logits.runs)
    for index, piece, scores in logits.pieces():
        _fill(made[index], piece, scores)
    return made


def _fill(kept: PromptLogprobs, piece: slice, logits: Array) -> None:
    """Writes the scores of one piece into `kept`. `logits` [n, V] f32."""
    scores = maths.score(logits, kept.token_ids[piece].astype(np.int64), kept.top_ids.shape[1])
    kept.logprobs[piece], kept.ranks[piece] = scores.logprobs, scores.ranks
    kept.top_ids[piece], kept.top_logprobs[piece] = scores.top_ids, scores.top_logprobs
