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
class ScoredChunk:
    """C consecutive tokens of one prompt that a step scores.

    Each is scored by the logits of the token before it.
    """

    sequence_id: int
    start: int  # position of the first, at least 1
    token_ids: Ints  # [C] a view of the prompt
    first_row: int  # index among the step's tokens of the token before the first
    num_top: int  # k

    def __len__(self) -> int:
        return len(self.token_ids)

    def empty(self, vocab_size: int) -> PromptLogprobs:
        """Uninitialized arrays for the scores: C * (k + 1) * 8 bytes.

        A token takes 4 bytes for its log-probability, 4 for its rank, and 8 for each of the k likeliest.
        """
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
    """The slots with prompts to score."""

    def __init__(self, num_slots: int) -> None:
        self._started: list[Started | None] = [None] * num_slots
        self._ends = np.zeros(num_slots, np.int32)  # [S] length of a prompt to score, 0 where there is none

    def start(self, started: Started) -> None:
        """Assigns a slot to a sequence, and discards the slot's old state."""
        wants = started.wants_prompt_logprobs
        self._started[started.slot] = started if wants else None
        self._ends[started.slot] = started.num_prompt if wants else 0

    def runs(self, grant: StepGrant) -> tuple[ScoredChunk, ...]:
        """The prompt tokens to score in a step: none in almost all steps.

        A decode step never scores any.
        """
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

    def _run(self, slot: int, start: int, end: int, first_row: int) -> ScoredChunk:
        started = self._started[slot]
        assert started is not None and started.params.prompt_logprobs is not None
        token_ids = started.token_ids[start:end]
        return ScoredChunk(started.sequence_id, start, token_ids, first_row, started.params.prompt_logprobs)


def rows_of(runs: Sequence[ScoredChunk]) -> NDArray[np.int64]:
    """The indices, among a step's tokens, whose logits are needed, run by run."""
    return np.concatenate([np.arange(run.first_row, run.first_row + len(run)) for run in runs])


def _first_rows(grant: StepGrant) -> NDArray[np.int64]:
    """[R] index of each row's first token among the step's tokens. Rows of one token come first."""
    order = np.argsort(grant.num_tokens != 1, kind="stable")
    counts = grant.num_tokens[order].astype(np.int64)
    places = np.empty(len(order), np.int64)
    places[order] = np.cumsum(counts) - counts
    return places


PIECE_BYTES = 32 * 2**20  # of logits at a time, as float32


def rows_of_a_piece(max_rows: int, vocab_size: int) -> int:
    """The most rows of logits that are computed at once for scored prompts."""
    return max(1, min(max_rows, PIECE_BYTES // (4 * vocab_size)))


@dataclass(frozen=True, slots=True, eq=False)
class LogitsWithPrompts:
    """The result of a forward pass, instead of plain logits, when the prompt of some row is scored."""

    sampled: Array  # [L, V] as without scored prompts
    runs: Sequence[ScoredChunk]
    hidden: Array  # [sum of C, H] of all runs, concatenated
    to_logits: Callable[[Array], Array]  # [n, H] -> [n, V]
    max_rows: int  # of a piece; the sampler has memory for this many rows of logits

    def pieces(self) -> Iterator[tuple[int, slice, Array]]:
        """Yields pieces of at most `PIECE_BYTES`: (index of the run, its tokens, their logits [n, V] f32).

        The logits of a token are computed from the hidden state of the token before it.
        """
        num_rows = rows_of_a_piece(self.max_rows, self.sampled.shape[1])
        begin = 0
        for index, run in enumerate(self.runs):
            for start in range(0, len(run), num_rows):
                end = min(start + num_rows, len(run))
                piece = self.to_logits(self.hidden[begin + start : begin + end])
                yield index, slice(start, end), arrays_of(piece).floats(piece)
            begin += len(run)
