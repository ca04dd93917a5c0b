"""Logits of prompt tokens, for those who ask how likely their prompt was: a piece at a time, and what is kept of them.

A prompt of thousands of tokens has gigabytes of logits. So what goes from the forward pass to the sampler is the last
hidden states and the way from them to logits; and the sampler takes a bounded piece, keeps each token's log-probability
and the k likeliest, and forgets the piece before it takes the next. Imports torch; lives on the device thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .messages import PromptLogprobs
from .prompt_runs import PromptRun

PIECE_BYTES = 32 * 2**20  # of logits at a time, as float32


@dataclass(frozen=True, slots=True, eq=False)
class LogitsWithPrompts:
    """What a forward pass hands to the sampler in the place of bare logits when a row wants its prompt scored."""

    sampled: Tensor  # [L, V] as always
    runs: Sequence[PromptRun]
    hidden: Tensor  # [sum of C, H] of all runs, one after the other
    to_logits: Callable[[Tensor], Tensor]  # [n, H] -> [n, V]
    max_rows: int  # of a piece: no more than the sampler has memory for anyway

    def pieces(self) -> Iterator[tuple[int, slice, Tensor]]:
        """Each run in pieces of [n, V] f32: (which run, which of its tokens, logits of the tokens before them)."""
        num_rows = max(1, min(self.max_rows, PIECE_BYTES // (4 * self.sampled.shape[1])))
        begin = 0
        for index, run in enumerate(self.runs):
            for start in range(0, len(run), num_rows):
                end = min(start + num_rows, len(run))
                yield index, slice(start, end), self.to_logits(self.hidden[begin + start : begin + end]).float()
            begin += len(run)


def prompt_logprobs(logits: LogitsWithPrompts) -> tuple[PromptLogprobs, ...]:
    """Of each run, under the model itself: before penalties, bias and temperature."""
    made = tuple(run.empty(logits.sampled.shape[1]) for run in logits.runs)
    for index, piece, scores in logits.pieces():
        _fill(made[index], piece, scores)
    return made


def _fill(kept: PromptLogprobs, piece: slice, logits: Tensor) -> None:
    """`logits` [n, V] f32."""
    chosen_ids = torch.from_numpy(kept.token_ids[piece].astype(np.int64)).to(logits.device)
    chosen = logits.gather(1, chosen_ids[:, None])
    total = torch.logsumexp(logits, dim=1)
    kept.logprobs[piece] = (chosen[:, 0] - total).cpu().numpy()
    kept.ranks[piece] = ((logits > chosen).sum(1) + 1).cpu().numpy()
    if kept.top_ids.shape[1]:
        top = logits.topk(kept.top_ids.shape[1], dim=1)
        kept.top_ids[piece] = top.indices.cpu().numpy()
        kept.top_logprobs[piece] = (top.values - total[:, None]).cpu().numpy()
