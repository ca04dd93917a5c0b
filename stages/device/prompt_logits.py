"""Logits of prompt tokens, for those who ask how likely their prompt was: a piece at a time, and what is kept of them.

A prompt of thousands of tokens has gigabytes of logits. So what goes from the forward pass to the sampler is the last
hidden states and the way from them to logits; and the sampler takes a bounded piece, keeps each token's log-probability
and the k likeliest, and forgets the piece before it takes the next. Lives on the device thread.
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
    """What a forward pass hands to the sampler in the place of bare logits when a row wants its prompt scored."""

    sampled: Array  # [L, V] as always
    runs: Sequence[PromptRun]
    hidden: Array  # [sum of C, H] of all runs, one after the other
    to_logits: Callable[[Array], Array]  # [n, H] -> [n, V]
    max_rows: int  # of a piece: no more than the sampler has memory for anyway

    def pieces(self) -> Iterator[tuple[int, slice, Array]]:
        """Each run in pieces of [n, V] f32: (which run, which of its tokens, logits of the tokens before them)."""
        num_rows = max(1, min(self.max_rows, PIECE_BYTES // (4 * self.sampled.shape[1])))
        begin = 0
        for index, run in enumerate(self.runs):
            for start in range(0, len(run), num_rows):
                end = min(start + num_rows, len(run))
                piece = self.to_logits(self.hidden[begin + start : begin + end])
                yield index, slice(start, end), arrays_of(piece).floats(piece)
            begin += len(run)


def prompt_logprobs(logits: LogitsWithPrompts) -> tuple[PromptLogprobs, ...]:
    """Of each run, under the model itself: before penalties, bias and temperature."""
    made = tuple(run.empty(logits.sampled.shape[1]) for run in logits.runs)
    for index, piece, scores in logits.pieces():
        _fill(made[index], piece, scores)
    return made


def _fill(kept: PromptLogprobs, piece: slice, logits: Array) -> None:
    """`logits` [n, V] f32."""
    scores = maths.score(logits, kept.token_ids[piece].astype(np.int64), kept.top_ids.shape[1])
    kept.logprobs[piece], kept.ranks[piece] = scores.logprobs, scores.ranks
    kept.top_ids[piece], kept.top_logprobs[piece] = scores.top_ids, scores.top_logprobs
