"""The sampler: chooses each step's tokens, greedily or at random.

Used on the device thread, except `prepare`. A row pays only for the features that its request uses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..array_checks import num_true
from ..device.arrays import Array, arrays_of
from ..device.pooler import Pooler
from ..device.scored_prompts import LogitsWithPrompts
from ..device.step_result import TokenChoice
from ..engine_settings import LogprobsMode
from ..grammar.masks import GrammarMasks
from ..messages import (
    Bools,
    FinishReason,
    Indices,
    Ints,
    Pooled,
    PromptLogprobs,
    Started,
    StepGrant,
    StepTokens,
    TopLogprobs,
)
from . import sampling_math
from .draft_acceptance import DraftRuns, last_of_each
from .logit_tiles import rows_of
from .logits_processor import LogitsProcessor
from .sampling_math import Longs
from .slot_params import EDITS, ENDED, GRAMMAR, LOGPROBS, POOLED, THINKING, SlotParams
from .token_chooser import NO_ROWS, MakeTokenChooser, SampledRows, TokenChooser, any_of


class Sampler:
    """The sampling state of the running sequences, by slot, and the choice of their tokens.

    Order of operations: penalties (repetition, frequency, presence), logit_bias, EOS and stop ids while below
    min_tokens, allowed tokens and bad words, the user's logits processor, the grammar's mask, temperature, then
    the cuts in the order of `CUTS` in `kernels/layout/sampling_fields.py`. A used-up thinking budget overrides the
    chosen token.

    An answer whose grammar allows only an end ends here, whatever other parameters say. With `ignore_eos`, a grammar
    ends its answer only there. Greedy sampling takes the likeliest token, the lowest id among equals. A random draw
    depends only on the row's logits, its seed and the token's absolute position.

    `last_tokens` [num_slots] i64 on the device is shared with the runner: each slot's newest token is written there.

    A sequence that has ended is still a row of the steps in flight (a deferred stop). Such rows are left out of the
    result, until `Started` assigns their slot again.

    Where a row has drafts, a token is chosen after each draft in the same way. `draft_acceptance.py` decides which of
    them count. Rows with drafts have no edits and no masks: nothing but the logits depends on earlier tokens.

    Pooled sequences have no logits. The `pooler`, shared with the runner, has a vector when their prompt is complete.
    """

    def __init__(
        self,
        last_tokens: Array,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Collection[int] = (),
        masks: GrammarMasks | None = None,
        pooler: Pooler | None = None,
        *,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        chooser: MakeTokenChooser = TokenChooser,
    ) -> None:
        self.last_tokens = last_tokens
        self.pooler = pooler
        self._arrays = arrays_of(last_tokens)
        self.table = SlotParams(len(last_tokens), vocab_size, max_model_len, eos_token_ids)
        self.chooser = chooser(self.table, last_tokens, logprobs_mode)
        self.masks = masks  # None: no request has a grammar

    def prepare(self, started: Sequence[Started]) -> None:
        """Starts the grammars of new sequences.

        Called on the event loop, before their first step has run.
        """
        if self.masks is not None:
            for one in started:
                self.masks.prepare(one)

    def use(self, processor: LogitsProcessor) -> None:
        """Installs a logits processor. Must be called before the first step."""
        self.chooser.use(processor)

    def start(self, started: Started) -> None:
        """Assigns a slot to a sequence. Called before its first step is sampled."""
        self.table.start(started)
        self.chooser.start(started)

    def sample(self, grant: StepGrant, logits: Array | LogitsWithPrompts | TokenChoice) -> StepTokens:
        """Chooses a token for each live sampled row, and one more for each accepted draft.

        The result also has the vectors of pooled sequences. `logits` [L, V], of all rows that are not pooled, may be
        modified. A `TokenChoice` instead of logits holds tokens that the model has chosen.

        A row without a finite maximum (a NaN, an infinity, or no allowed token) ends with `FinishReason.ERROR` and a
        meaningless token 0. Every id is in [0, V).
        """
        for started in grant.started:
            self.start(started)
        if isinstance(logits, TokenChoice):  # made with the forward pass, for each sampled row
            return self._note_chosen(grant, logits.token_ids, logits.is_broken)[0]
        return self.choose(grant, logits)

    def choose(self, grant: StepGrant, logits: Array | LogitsWithPrompts) -> StepTokens:
        """As `sample`, when all new sequences of the grant have been started."""
        of_prompts: tuple[PromptLogprobs, ...] = ()
        if isinstance(logits, LogitsWithPrompts):
            with self._arrays.inference():
                of_prompts = prompt_logprobs(logits)
            logits = logits.sampled
        slots, runs = grant.logits_slots, DraftRuns.of(grant)
        needs = self.table.needs[slots]
        any_needs = any_of(needs)
        pooled: dict[int, Pooled] = {}
        if any_needs & (ENDED | POOLED):
            is_pooled = needs & POOLED != 0
            pooled = self._pool(slots[is_pooled])
            runs = None if runs is None else runs.take(np.flatnonzero(needs & (ENDED | POOLED) == 0))
            slots, needs = slots[~is_pooled], needs[~is_pooled]
            alive = np.flatnonzero(needs & ENDED == 0)
            slots, needs, logits = slots[alive], needs[alive], rows_of(logits, alive)
            any_needs = any_of(needs)
        places = self.table.num_generated[slots]
        if runs is not None:
            places = places + runs.offsets
        with self._arrays.inference():
            tokens = self._sample(grant, SampledRows(slots, places, needs, any_needs), runs, logits, of_prompts)
        return replace(tokens, pooled=pooled) if pooled else tokens

    def note_tokens(self, grant: StepGrant, result: Ints, scores: Ints | None = None) -> StepTokens:
        """Applies the tokens that an asynchronous device chose for a step.

        `result` [2, L] holds token ids, -1 for a row whose sequence had ended or that follows a wrong draft, and
        `FinishReason`s, of which only ERROR is read. `scores` [L, W] are the device's, for the log-probabilities.
        """
        is_broken = result[1] == FinishReason.ERROR
        tokens, rows = self._note_chosen(grant, result[0].astype(np.intp), is_broken, are_guided=True)
        if scores is None:
            return tokens
        slots, finishes = tokens.slots, tokens.finishes
        requested = ((self.table.needs[slots] & LOGPROBS != 0) & (finishes != FinishReason.ERROR)).nonzero()[0]
        found = self.chooser.read_scores(slots[requested], scores[rows][requested])
        return replace(tokens, logprobs=dict(zip(requested.tolist(), found, strict=True)))

    def _note_chosen(
        self, grant: StepGrant, token_ids: Indices, is_broken: Bools, *, are_guided: bool = False
    ) -> tuple[StepTokens, Bools | Indices]:
        """Applies chosen tokens [L]; below 0 for a row that had ended, or that follows a wrong draft.

        `are_guided`: rows may have grammars, thinking budgets, allowed tokens and bad words, which the choice has kept.
        Returns the step's tokens, and which of the rows of logits they are of, [L].
        """
        table, slots, runs = self.table, grant.slots, DraftRuns.of(grant)
        if runs is not None:
            slots = grant.logits_slots
        elif num_true(grant.is_sampled) < len(slots):
            slots = slots[grant.is_sampled]
        goes_on = (table.needs[slots] & ENDED == 0) & (token_ids >= 0)
        if num_true(goes_on) < len(slots):
            slots, token_ids, is_broken = slots[goes_on], token_ids[goes_on], is_broken[goes_on]
        places, ids = table.num_generated[slots], table.sequence_ids[slots]
        if runs is not None:
            places = places + runs.offsets[goes_on]
        needs = any_of(table.needs[slots]) if are_guided else 0
        if needs & (GRAMMAR | THINKING | EDITS):
            finishes, grammar_us = self._note_guided(slots, places, token_ids, is_broken)
        else:
            finishes, grammar_us = table.note_tokens(slots, places, token_ids, is_broken), 0
        tokens = StepTokens(
            grant.step, slots, ids, places, token_ids, finishes, started=grant.started, grammar_us=grammar_us
        )
        if runs is None:
            return tokens, goes_on
        rows = goes_on.nonzero()[0]
        kept = runs.up_to_the_end(rows, finishes)  # the host knows more ends than the device
        return _rows_of_tokens(tokens, kept), rows[kept]

    def _note_guided(
        self, slots: Indices, places: Indices, token_ids: Indices, is_broken: Bools
    ) -> tuple[NDArray[np.int8], int]:
        """As the table's `note_tokens`, for rows with guides. Also returns the time waited for grammar masks.

        An answer that a guide has ended has the token of a forced end.
        """
        table, over = self.table, NO_ROWS
        needs = table.needs[slots]
        guided, thinking = np.flatnonzero(needs & GRAMMAR), np.flatnonzero(needs & THINKING)
        if self.masks is not None and len(guided):
            ends = guided[token_ids[guided] == table.eos_token_id]
            over = ends[self.masks.is_ending(slots[ends])]
        if len(thinking):
            table.steer(slots, thinking, token_ids)
            token_ids[over] = table.eos_token_id
        table.limits.note(slots, token_ids)
        finishes = table.note_tokens(slots, places, token_ids, is_broken, over)
        if self.masks is None or not len(guided):
            return finishes, 0
        self._advance_masks(slots, token_ids, finishes, guided)
        return finishes, self.masks.waited_us

    def _sample(
        self,
        grant: StepGrant,
        rows: SampledRows,
        runs: DraftRuns | None,
        logits: Array,
        of_prompts: tuple[PromptLogprobs, ...],
    ) -> StepTokens:
        table, slots, places = self.table, rows.slots, rows.places
        guided = rows.that_need(GRAMMAR)
        allowed, over = None, NO_ROWS
        if len(guided):
            assert self.masks is not None, "a sequence has a grammar, and this sampler was made without masks"
            allowed = self.masks.read(guided, slots)
        choice = self.chooser.choose(rows, logits, allowed)
        token_ids, is_broken = choice.token_ids, choice.is_broken
        if self.masks is not None and allowed is not None:
            over = self.masks.over(allowed, token_ids, is_broken)
        if rows.any_needs & THINKING:
            table.steer(slots, rows.that_need(THINKING), token_ids)
        if len(over):
            token_ids[over], is_broken[over] = table.eos_token_id, False
        if rows.any_needs & EDITS:
            self.chooser.note(slots, token_ids)
        kept: Indices | None = None
        if runs is None:
            newest, newest_ids = slots, token_ids
            finishes = table.note_tokens(slots, places, token_ids, is_broken, over)
        else:
            finishes, kept = self._note_runs(runs, slots, places, token_ids, is_broken, over)
            last = kept[last_of_each(slots[kept])]
            newest, newest_ids = slots[last], token_ids[last]
        self._arrays.put(self.last_tokens, newest, self._arrays.beside(self.last_tokens, newest_ids))
        if len(guided):
            self._advance_masks(slots, token_ids, finishes, guided)
        tokens = StepTokens(
            step=grant.step,
            slots=slots,
            sequence_ids=table.sequence_ids[slots],
            places=places,
            token_ids=token_ids,
            finishes=finishes,
            started=grant.started,
            logprobs=self._logprobs(choice, rows, token_ids, finishes),
            prompt_logprobs=of_prompts,
            grammar_us=0 if self.masks is None or allowed is None else self.masks.waited_us,
        )
        return tokens if kept is None or len(kept) == len(slots) else _rows_of_tokens(tokens, kept)

    def _advance_masks(self, slots: Indices, token_ids: Indices, finishes: NDArray[np.int8], guided: Indices) -> None:
        """Starts computing the next masks of the rows `guided`, and drops those that have ended."""
        assert self.masks is not None
        goes_on = finishes[guided] == FinishReason.NONE
        self.masks.advance(slots[guided[goes_on]], token_ids[guided[goes_on]])
        self.masks.drop(slots[guided[~goes_on]])

    def _note_runs(
        self, runs: DraftRuns, slots: Indices, places: Indices, token_ids: Longs, is_broken: Bools, over: Longs
    ) -> tuple[NDArray[np.int8], Indices]:
        """As the table's `note_tokens`, for several rows of a sequence: (finishes [L], rows that count)."""
        counting = runs.that_count(token_ids)
        over = np.isin(counting, over).nonzero()[0]
        at, place, chosen = slots[counting], places[counting], token_ids[counting]
        finishes = np.zeros(len(slots), np.int8)
        finishes[counting] = self.table.note_tokens(at, place, chosen, is_broken[counting], over)
        return finishes, counting[runs.up_to_the_end(counting, finishes[counting])]

    def _logprobs(
        self, choice: TokenChoice, rows: SampledRows, token_ids: Longs, finishes: NDArray[np.int8]
    ) -> dict[int, TopLogprobs]:
        if not rows.any_needs & LOGPROBS:
            return {}
        return self.chooser.logprobs_of(choice, rows, token_ids, finishes != FinishReason.ERROR)

    def _pool(self, slots: Indices) -> dict[int, Pooled]:
        if not len(slots):
            return {}
        assert self.pooler is not None, "a pooled sequence, and no pooler"
        return self.pooler.take(slots)


def _rows_of_tokens(tokens: StepTokens, rows: Indices) -> StepTokens:
    """The tokens of some rows of a step."""
    logprobs = {new: tokens.logprobs[old] for new, old in enumerate(rows.tolist()) if old in tokens.logprobs}
    columns = {
        name: getattr(tokens, name)[rows] for name in ("slots", "sequence_ids", "places", "token_ids", "finishes")
    }
    return replace(tokens, logprobs=logprobs, **columns)


def prompt_logprobs(logits: LogitsWithPrompts) -> tuple[PromptLogprobs, ...]:
    """Scores each run by the model's raw logits: before penalties, bias and temperature."""
    made = tuple(run.empty(logits.sampled.shape[1]) for run in logits.runs)
    for index, piece, scores in logits.pieces():
        _fill_prompt_logprobs(made[index], piece, scores)
    return made


def _fill_prompt_logprobs(kept: PromptLogprobs, piece: slice, logits: Array) -> None:
    """`logits` [n, V] f32."""
    scores = sampling_math.score(logits, kept.token_ids[piece].astype(np.int64), kept.top_ids.shape[1])
    kept.logprobs[piece], kept.ranks[piece] = scores.logprobs, scores.ranks
    kept.top_ids[piece], kept.top_logprobs[piece] = scores.top_ids, scores.top_logprobs
