"""Pooling: sums the hidden states of pooled sequences, slot by slot, into vectors.

Used on the device thread only.
"""

from __future__ import annotations

import numpy as np

from ..messages import Begun, Indices, Pooled, Started, StepGrant
from ..pooling_params import Floats, PoolingParams
from .arrays import Array, arrays_of


class Pooler:
    """The pooling state of each slot, shared by the runner and the sampler.

    The runner adds the hidden states of each step with pooled rows. The sampler takes the vectors of the sequences
    whose prompts are complete. `sums` is [S, H] f32 zeros on the device, one row per slot, H the hidden size.

    Chunks of a prompt arrive in order. A sequence that restarts, after a preemption or a void step, starts from zero.
    """

    def __init__(self, sums: Array) -> None:
        num_slots = len(sums)
        self.num_pooled = 0  # slots in use by pooled sequences; while it is 0, steps need no inspection
        self.is_pooled = np.zeros(num_slots, np.bool_)  # [S]
        self._is_mean = np.zeros(num_slots, np.bool_)  # [S]
        self._is_first = np.zeros(num_slots, np.bool_)  # [S]
        self._started: list[Started | None] = [None] * num_slots
        self._arrays = arrays_of(sums)
        self.sums = sums  # [S, H] over the positions that are pooled
        self.score_head: Floats | None = None  # [H]: turns the last hidden state of a pair of texts into a logit

    def start(self, started: Started) -> None:
        """Assigns a slot to a sequence, pooled or not, and discards the slot's old state."""
        self._leave(started.slot)
        if started.pooling is None:
            return
        slot, kind = started.slot, started.pooling.kind
        self.sums[slot] = 0
        self._started[slot] = started
        self._is_mean[slot], self._is_first[slot] = kind in ("mean", "mean_sqrt_len"), kind == "cls"
        self.is_pooled[slot] = True
        self.num_pooled += 1

    def tokens_of_interest(self, grant: StepGrant, offsets: Indices) -> tuple[Indices, Indices]:
        """The tokens of a step to pool, and the slot of each, [W] both.

        A mean needs all tokens of a prompt, the other kinds its first or its last. Row i of the grant has its first
        token at `offsets[i]`.
        """
        slots, counts = grant.slots, grant.num_tokens.astype(np.intp)
        is_mean, is_first = self._is_mean[slots], self._is_first[slots]
        is_last = self.is_pooled[slots] & ~is_mean & ~is_first
        first, last = is_first & (grant.starts == 0), is_last & grant.is_sampled
        ranges = zip(offsets[is_mean].tolist(), counts[is_mean].tolist(), strict=True)
        means = [np.arange(offset, offset + count) for offset, count in ranges]
        tokens = np.concatenate([offsets[first], (offsets + counts - 1)[last], *means])
        return tokens, np.concatenate([slots[first], slots[last], np.repeat(slots[is_mean], counts[is_mean])])

    def add(self, slots: Indices, hidden: Array) -> None:
        """Adds the hidden states [W, H] of the tokens that `tokens_of_interest` returned."""
        self._arrays.add_rows(self.sums, slots, hidden)

    def take(self, slots: Indices) -> dict[int, Pooled]:
        """The results of the sequences in `slots` [P], by slot.

        Their prompts are computed; their slots are cleared.
        """
        vectors = self._arrays.on_host(self._arrays.take(self.sums, slots))
        pooled = {}
        for slot, vector in zip(slots.tolist(), vectors, strict=True):
            started = self._started[slot]
            assert started is not None and started.pooling is not None
            if started.pooling.kind == "score" and self.score_head is not None:
                vector = _probability(vector @ self.score_head)
            pooled[slot] = _pooled(started, started.pooling, vector / _divisor(started))
            self._leave(slot)
        return pooled

    def _leave(self, slot: int) -> None:
        self.num_pooled -= int(self.is_pooled[slot])
        self.is_pooled[slot] = self._is_mean[slot] = self._is_first[slot] = False
        self._started[slot] = None


def _divisor(started: Started) -> float:
    assert started.pooling is not None
    kind, num_tokens = started.pooling.kind, started.num_prompt
    return num_tokens if kind == "mean" else num_tokens**0.5 if kind == "mean_sqrt_len" else 1


def _probability(logit: np.float32) -> Floats:
    """The sigmoid of a logit, as [1]. Tiny values keep their digits."""
    return np.array([np.exp(-np.logaddexp(0.0, -float(logit)))], np.float32)


def _pooled(started: Started, params: PoolingParams, vector: Floats) -> Pooled:
    return Pooled(started.sequence_id, params.finish(vector), Begun(started.token_ids, started.num_cached))
