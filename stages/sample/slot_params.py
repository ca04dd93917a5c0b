"""Sampling parameters and token counts of the running sequences, in columns indexed by slot.

Decides when they end. Plain numpy: a step of 256 rows is a few operations and no loop. Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.sampling_fields import (
    DRAWS,
    NO_CUTS,
    NO_PENALTIES,
    PENALTIES,
    PLACE,
    draws_of,
    penalties_of,
)
from ..array_checks import num_true
from ..grammar.thinking_budget import ThinkingTable
from ..messages import NO_INDICES, Bools, FinishReason, Indices, Ints, Started
from ..params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from .token_constraints import TokenConstraints

MIN_TEMPERATURE = 1e-20  # a difference of logits divided by it is still a float32; draws the likeliest token
NO_TOKEN = -1
TEMPERATURE = PLACE["temperature"]  # its column of `SlotParams.draws`
DEFAULTS = SamplingParams()

# What a row needs beyond the likeliest token. Bits: one reduction shows what no row of a step needs.
ENDED, EDITS, RANDOM, LOGPROBS, GRAMMAR, THINKING, POOLED = 1, 2, 4, 8, 16, 32, 64


class SlotParams:
    """One row per slot, filled when a sequence starts there. S slots, E end-of-sequence tokens.

    Ids outside the vocabulary are dropped: no token can match them.
    """

    def __init__(self, num_slots: int, vocab_size: int, max_model_len: int, eos_token_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos = self._known(eos_token_ids)  # [E]
        self.eos_token_id = int(self.eos[0]) if len(self.eos) else 0  # the token of an end that the sampler forces
        self.sequence_ids = np.full(num_slots, -1, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.num_generated = np.zeros(num_slots, np.intp)
        self.needs = np.zeros(num_slots, np.uint8)  # bits, as above
        # how to choose
        self.is_random = np.zeros(num_slots, np.bool_)
        self.is_truncated = np.zeros(num_slots, np.bool_)  # by any cut
        self.draws = np.tile(draws_of(DEFAULTS), (num_slots, 1)).astype(np.float64)  # [S, D] the numbers of `DRAWS`
        self.temperature = self.draws[:, TEMPERATURE]
        self.seeds = np.zeros(num_slots, np.uint64)
        self.num_logprobs = np.zeros(num_slots, np.int64)  # besides the chosen token's
        # what to change in the logits
        self.is_penalised = np.zeros(num_slots, np.bool_)
        # [S, 3] the numbers of `PENALTIES`
        self.penalties = np.tile(np.array(NO_PENALTIES, np.float32), (num_slots, 1))
        self.presence_penalty, self.frequency_penalty, self.repetition_penalty = self.penalties.T
        self.num_biased = np.zeros(num_slots, np.int32)
        # NOTE: empty, not zeros: pages that no row with a penalty or a bias has written are never allocated
        # [S, P + G] of rows with penalties only; one more than a context holds, for max_tokens = 0
        self.tokens = np.empty((num_slots, max_model_len + 1), np.int32)
        self.biased_ids = np.empty((num_slots, MAX_LOGIT_BIAS), np.int32)
        self.bias = np.empty((num_slots, MAX_LOGIT_BIAS), np.float32)
        self.thinking = ThinkingTable(num_slots)
        self.limits = TokenConstraints(num_slots, vocab_size)
        # when to end
        self.limit = np.zeros(num_slots, np.int32)  # generated tokens
        self.min_tokens = np.zeros(num_slots, np.int32)
        self.ignores_eos = np.zeros(num_slots, np.bool_)
        self._end_ids = np.full((num_slots, len(self.eos) + MAX_STOP_TOKEN_IDS), NO_TOKEN, np.int32)  # EOS first
        self._end_ids[:, : len(self.eos)] = self.eos
        self._num_end_ids = len(self.eos)  # columns in use by any row
        self._may_end = np.zeros(vocab_size, np.bool_)  # [V] ids that end or ended some row; most steps choose none
        self._may_end[self.eos] = True

    def start(self, started: Started) -> None:
        """Assigns a slot to a sequence, new or resumed, and discards the slot's old state."""
        slot, params = started.slot, started.params
        self.sequence_ids[slot] = started.sequence_id
        self.num_prompt[slot] = started.num_prompt
        self.num_generated[slot] = len(started.token_ids) - started.num_prompt
        draws = draws_of(params)
        self.draws[slot] = draws
        self.temperature[slot] = max(params.temperature, MIN_TEMPERATURE)
        self.is_random[slot] = not params.is_greedy
        self.is_truncated[slot] = draws[1:] != NO_CUTS
        self.seeds[slot] = started.seed & (2**64 - 1)
        self.num_logprobs[slot] = params.logprobs or 0
        self._start_edits(started)
        self._start_ends(started)
        is_edited = (
            self.limits.start(started) or self.is_penalised[slot] or self.num_biased[slot] > 0 or params.min_tokens > 0
        )
        self.needs[slot] = (
            EDITS * is_edited
            + RANDOM * (not params.is_greedy)
            + LOGPROBS * (params.logprobs is not None)
            + GRAMMAR * (params.structured_outputs is not None)
            + THINKING * self._start_thinking(started)
        )
        if started.pooling is not None:
            self.needs[slot] = POOLED

    def _start_thinking(self, started: Started) -> bool:
        budget = started.params.thinking_budget
        if budget is None:
            return False
        return self.thinking.start(started.slot, budget, started.token_ids[started.num_prompt :])

    def _start_edits(self, started: Started) -> None:
        slot, params = started.slot, started.params
        penalties = penalties_of(params)
        self.penalties[slot] = penalties
        self.is_penalised[slot] = penalties != NO_PENALTIES
        if self.is_penalised[slot]:
            self.tokens[slot, : len(started.token_ids)] = started.token_ids
        ids = self._known(params.logit_bias)
        self.num_biased[slot] = len(ids)
        self.biased_ids[slot, : len(ids)] = ids
        self.bias[slot, : len(ids)] = [params.logit_bias[token_id] for token_id in ids.tolist()]

    def _start_ends(self, started: Started) -> None:
        slot, params = started.slot, started.params
        num_left = self.max_model_len - started.num_prompt
        self.limit[slot] = num_left if params.max_tokens is None else min(params.max_tokens, num_left)
        self.min_tokens[slot] = min(params.min_tokens, self.max_model_len)
        self.ignores_eos[slot] = params.ignore_eos
        num_eos, stop_ids = len(self.eos), self._known(params.stop_token_ids)
        self._end_ids[slot, num_eos:] = NO_TOKEN
        self._end_ids[slot, num_eos : num_eos + len(stop_ids)] = stop_ids
        self._num_end_ids = max(self._num_end_ids, num_eos + len(stop_ids))
        self._may_end[stop_ids] = True

    def _known(self, token_ids: Collection[int]) -> Ints:
        return np.array([token_id for token_id in token_ids if 0 <= token_id < self.vocab_size], np.int32)

    def row(self, slot: int) -> dict[str, float]:
        """The numbers of a slot's row on a device, by field; a greedy row has temperature 0."""
        numbers = [*self.draws[slot].tolist(), *self.penalties[slot].tolist()]
        row = {field.name: number for field, number in zip((*DRAWS, *PENALTIES), numbers, strict=True)}
        return row if self.needs[slot] & RANDOM else {**row, "temperature": 0.0}

    def end_ids(self, slot: int) -> Ints:
        """EOS and stop token ids of a slot, which may not be chosen before `min_tokens`."""
        ids = self._end_ids[slot]
        known: Ints = ids[ids != NO_TOKEN]
        return known

    def forbidden(self, slots: Indices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """EOS and stop ids of the rows below `min_tokens`: (index into `slots`, id)."""
        early = np.flatnonzero(self.num_generated[slots] < self.min_tokens[slots])
        ids = self._end_ids[slots[early], : self._num_end_ids].astype(np.int64)
        at, column = np.nonzero(ids != NO_TOKEN)
        return early[at], ids[at, column]

    def steer(self, slots: Indices, rows: NDArray[np.intp], token_ids: NDArray[np.int64]) -> None:
        """Overwrites the `token_ids` of `rows` with the tokens that their thinking budgets force.

        A row whose thinking has ended loses the THINKING bit.
        """
        token_ids[rows], is_over = self.thinking.steer(slots[rows], token_ids[rows])
        self.needs[slots[rows[is_over]]] &= ~np.uint8(THINKING)

    def note_tokens(
        self, slots: Indices, place: Indices, token_ids: Indices, is_broken: Bools, over: Indices = NO_INDICES
    ) -> NDArray[np.int8]:
        """Records one new token for each of `slots`, none of which has ended.

        Returns their `FinishReason`. `place` is the token's index in its answer: `num_generated` so far, plus one for
        each earlier row of the slot. Answers end by `finish_of` in `kernels/layout/finish_rule.py`; the grammars of the
        rows `over` allow nothing more.
        """
        num_generated = place + 1
        self.num_generated[slots] = num_generated
        is_penalised = self.is_penalised[slots]
        if num_true(is_penalised):
            at = slots[is_penalised]
            self.tokens[at, self.num_prompt[at] + place[is_penalised]] = token_ids[is_penalised]
        finishes = np.zeros(len(slots), np.int8)
        is_at_limit = num_generated >= self.limit[slots]
        may_end = self._may_end[token_ids]
        if len(over) or num_true(is_at_limit) or num_true(may_end) or num_true(is_broken):
            finishes[is_at_limit] = FinishReason.LENGTH
            finishes[self._ends(slots, token_ids) & (place >= self.min_tokens[slots])] = FinishReason.STOP
            finishes[over] = FinishReason.STOP
            finishes[is_broken] = FinishReason.ERROR
            self.needs[slots[finishes != FinishReason.NONE]] |= ENDED
        return finishes

    def _ends(self, slots: Indices, token_ids: Indices) -> Bools:
        matches = self._end_ids[:, : self._num_end_ids][slots] == token_ids[:, None]
        matches[:, : len(self.eos)] &= ~self.ignores_eos[slots, None]
        is_end: Bools = matches.any(1)
        return is_end
