"""Prompt tokens whose log-probabilities are requested: which a step scores, and their logits in bounded pieces.

The logits of a prompt of thousands of tokens take gigabytes. So the forward pass hands the sampler the last hidden
states and the function from them to logits. The sampler takes one bounded piece at a time and keeps of each token its
log-probability, its rank and the k likeliest tokens. Used on the device thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..messages import Ints, PromptLogprobs, Started, StepGrant
from .arrays import Array, arrays_of


@dataclass(frozen=True, slots=True, eq=False)
class PromptRun:
    """C tokens of one prompt that a step scores, each by the logits of the token before it."""

    sequence_id: int
    start: int  # position of the first, at least 1
    token_ids: Ints  # [C] a view of the prompt
    first_row: int  # place of the token before the first among all tokens of the step
    num_top: int  # k

    def __len__(self) -> int:
        return len(self.token_ids)

    def empty(self, vocab_size: int) -> PromptLogprobs:
        """Room for what is kept: for each token 4 bytes of log-probability, 4 of rank, and 8 for each of the likeliest,
        so C * (k + 1) * 8 in all."""
        shape = (len(self), min(self.num_top, vocab_size))
        return PromptLogprobs(
            sequence_id=self.sequence_id,
            start=self.start,
            token_ids=self.token_ids,
            logprobs=np.empty(len(self), np.float32),
            ranks=np.empty(len(self), np.int32),
            top_ids=np.empty(shape, np.int32),
            top_logprobs=np.empty(shape, np.float32),
        )


class ScoredPrompts:
    """Who wants a prompt scored, slot by slot."""

    def __init__(self, num_slots: int) -> None:
        self._started: list[Started | None] = [None] * num_slots
        self._ends = np.zeros(num_slots, np.int32)  # [S] length of a prompt to score, 0 where there is none

    def start(self, started: Started) -> None:
        """A sequence takes a slot; what was there is forgotten."""
        wants = started.wants_prompt_logprobs
        self._started[started.slot] = started if wants else None
        self._ends[started.slot] = started.num_prompt if wants else 0

    def runs(self, grant: StepGrant) -> tuple[PromptRun, ...]:
        """What a step is to score, nothing in nearly all of them. A decoding step has no prompt but for last tokens."""
        if grant.is_decode:
            return ()
        starts, ends = grant.starts + 1, self._ends[grant.slots]
        rows = np.flatnonzero(starts < ends)
        if not len(rows):
            return ()
        ends = np.minimum(starts + grant.num_tokens, ends)[rows].tolist()
        first_rows = _first_rows(grant)[rows].tolist()
        slots, starts = grant.slots[rows].tolist(), starts[rows].tolist()
        return tuple(self._run(*values) for values in zip(slots, starts, ends, first_rows, strict=True))

    def _run(self, slot: int, start: int, end: int, first_row: int) -> PromptRun:
        started = self._started[slot]
        assert started is not None and started.params.prompt_logprobs is not None
        token_ids = started.token_ids[start:end]
        return PromptRun(started.sequence_id, start, token_ids, first_row, started.params.prompt_logprobs)


def rows_of(runs: Sequence[PromptRun]) -> NDArray[np.int64]:
    """The places among a step's tokens whose logits are wanted, run by run."""
    return np.concatenate([np.arange(run.first_row, run.first_row + len(run)) for run in runs])


def _first_rows(grant: StepGrant) -> NDArray[np.int64]:
    """[R] where each row's first token is among the step's: rows of one token come first."""
    order = np.argsort(grant.num_tokens != 1, kind="stable")
    counts = grant.num_tokens[order].astype(np.int64)
    places = np.empty(len(order), np.int64)
    places[order] = np.cumsum(counts) - counts
    return places


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
