"""Chooses each step's tokens: greedy or drawn, with penalties, bias and truncation. Lives on the device thread.

Knows which rows need what, so that a row pays for nothing it did not ask for. Refuses to know text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from . import logits as maths
from .arrays import Array, HostArray, arrays_of
from .config import LogprobsMode
from .grammar.masks import Allowed, GrammarMasks
from .logits import Drawing, Longs
from .messages import (
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
from .pooler import Pooler
from .processors import LogitsProcessor
from .prompt_logits import LogitsWithPrompts, prompt_logprobs
from .runs import Runs, last_of_each
from .sampling_table import EDITS, ENDED, GRAMMAR, LOGPROBS, POOLED, RANDOM, THINKING, SamplingTable

Choose = Callable[[Array, Bools, Drawing | None], tuple[Longs, Bools]]  # `maths.choose`, or what does as it does
AllowOnly = Callable[[Array, Longs, Ints], None]  # `maths.allow_only`, or what does as it does

NO_ROWS: Longs = np.zeros(0, np.int64)


class Sampler:
    """Columnar sampling state of the running sequences, slot by slot, and the choice of their next tokens.

    In this order: penalties (repetition, frequency, presence), logit_bias, EOS and stop ids while below min_tokens,
    allowed tokens and bad words, a user's processor, the grammar's mask, temperature, top_k, top_p, min_p. An answer
    that can only end here ends, whatever else was asked for; one with `ignore_eos` ends only there. Greedy takes the
    likeliest, the lowest id among equals. What is drawn depends on the row's logits, its seed and the token's absolute
    position only. A thinking budget that is used up overrules the choice.

    `last_tokens` [num_slots] i64 on the device is shared with the runner: each slot's newest token is written there.

    A sequence that has ended is still in the steps that were in flight then (a deferred stop). Such rows appear in
    neither slots nor tokens of those steps, until `Started` gives their slot to somebody.

    Where a row has drafts, the token behind each is chosen in the same way, and those count that would have come one by
    one. Such rows ask for nothing that hangs on the tokens before but the logits themselves: no edits and no masks.

    Of pooled sequences there are no logits: the `pooler`, which the runner shares, has a vector when they have ended.
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
        choose: Choose = maths.choose,
        allow_only: AllowOnly = maths.allow_only,
    ) -> None:
        self.last_tokens = last_tokens
        self.pooler = pooler
        self._arrays = arrays_of(last_tokens)
        self._choose, self._allow_only = choose, allow_only
        self.table = SamplingTable(len(last_tokens), vocab_size, max_model_len, eos_token_ids)
        self.masks = masks  # None: nobody brings a grammar
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self.processor: LogitsProcessor | None = None
        self._is_processed = np.zeros(len(last_tokens), np.bool_)

    def prepare(self, started: Sequence[Started]) -> None:
        """Hears of sequences on the loop, before their first step has run."""
        if self.masks is not None:
            for one in started:
                self.masks.prepare(one)

    def use(self, processor: LogitsProcessor) -> None:
        """Has a processor change logits from now on. Before the first step."""
        self.processor = processor

    def _start(self, started: Started) -> None:
        self.table.start(started)
        if self.processor is not None:
            self._is_processed[started.slot] = self.processor.start(started)
            if self._is_processed[started.slot]:
                self.table.needs[started.slot] |= EDITS

    def sample(self, grant: StepGrant, logits: Array | LogitsWithPrompts) -> StepTokens:
        """One token for each sampled row of the grant whose sequence goes on, more where drafts turned out right, and
        what was made of those that are pooled. `logits` [L, V], of the others, may be changed.

        A row without a finite maximum (a NaN, an infinity, or nothing that is allowed) ends with `FinishReason.ERROR`
        and token 0, which means nothing. Every id is in [0, V).
        """
        for started in grant.started:
            self._start(started)
        of_prompts: tuple[PromptLogprobs, ...] = ()
        if isinstance(logits, LogitsWithPrompts):
            with self._arrays.inference():
                of_prompts = prompt_logprobs(logits)
            logits = logits.sampled
        slots, runs = grant.logits_slots, Runs.of(grant)
        needs = self.table.needs[slots]
        pooled: dict[int, Pooled] = {}
        if _any(needs, ENDED | POOLED):
            is_pooled = needs & POOLED != 0
            pooled = self._pool(slots[is_pooled])
            runs = None if runs is None else runs.take(np.flatnonzero(needs & (ENDED | POOLED) == 0))
            slots, needs = slots[~is_pooled], needs[~is_pooled]
            alive = np.flatnonzero(needs & ENDED == 0)
            slots, needs, logits = slots[alive], needs[alive], maths.rows_of(logits, alive)
        with self._arrays.inference():
            tokens = self._sample(grant, slots, runs, needs, logits, of_prompts)
        return replace(tokens, pooled=pooled) if pooled else tokens

    def _sample(
        self,
        grant: StepGrant,
        slots: Indices,
        runs: Runs | None,
        needs: NDArray[np.uint8],
        logits: Array,
        of_prompts: tuple[PromptLogprobs, ...],
    ) -> StepTokens:
        table = self.table
        places = table.num_generated[slots]
        if runs is not None:
            places = places + runs.offsets
        asked = np.flatnonzero(needs & LOGPROBS) if _any(needs, LOGPROBS) else NO_ROWS
        guided = np.flatnonzero(needs & GRAMMAR) if _any(needs, GRAMMAR) else NO_ROWS
        allowed = self._allowed(slots[guided]) if len(guided) else None
        is_raw = self.logprobs_mode == "raw_logprobs"
        raw = self._arrays.take(logits, asked) if len(asked) and is_raw else None  # a copy
        is_edited = _any(needs, EDITS)
        if is_edited:
            logits = self._arrays.floats(logits)
            self._edit(slots, logits)
        if allowed is not None:
            self._allow_only(logits, guided, allowed.masks)
        if len(asked) and not is_raw:
            raw = self._processed(logits, asked, slots, needs)
        if len(slots):
            is_random = needs & RANDOM != 0
            drawing = self._drawing(slots, places) if np.count_nonzero(is_random) else None
            token_ids, is_broken = self._choose(logits, is_random, drawing)
            if _any(needs, THINKING):
                table.steer(slots, np.flatnonzero(needs & THINKING), token_ids)
        else:
            token_ids, is_broken = NO_ROWS, np.zeros(0, np.bool_)
        over = NO_ROWS if allowed is None else guided[allowed.is_over]
        token_ids[over], is_broken[over] = table.eos_token_id, False
        if is_edited:
            table.limits.note(slots, token_ids)
            self._note_processed(slots, token_ids)
        kept: Indices | None = None
        if runs is None:
            newest, newest_ids = slots, token_ids
            finishes = table.settle(slots, places, token_ids, is_broken, over)
        else:
            finishes, kept = self._settle_runs(runs, slots, places, token_ids, is_broken, over)
            last = kept[last_of_each(slots[kept])]
            newest, newest_ids = slots[last], token_ids[last]
        self._arrays.put(self.last_tokens, newest, self._arrays.beside(self.last_tokens, newest_ids))
        if self.masks is not None and len(guided):
            goes_on = finishes[guided] == FinishReason.NONE
            self.masks.advance(slots[guided[goes_on]], token_ids[guided[goes_on]])
            self.masks.drop(slots[guided[~goes_on]])
        tokens = StepTokens(
            step=grant.step,
            slots=slots,
            sequence_ids=table.sequence_ids[slots],
            places=places,
            token_ids=token_ids,
            finishes=finishes,
            started=grant.started,
            logprobs={} if raw is None else self._logprobs(raw, asked, slots, token_ids, finishes),
            prompt_logprobs=of_prompts,
            grammar_us=0 if self.masks is None or allowed is None else self.masks.waited_us,
        )
        return tokens if kept is None or len(kept) == len(slots) else _rows_of_tokens(tokens, kept)

    def _settle_runs(
        self, runs: Runs, slots: Indices, places: Indices, token_ids: Longs, is_broken: Bools, over: Longs
    ) -> tuple[NDArray[np.int8], Indices]:
        """As the table's `settle`, of rows that may be several of one sequence: (finishes [L], which count)."""
        counting = runs.that_count(token_ids)
        over = np.isin(counting, over).nonzero()[0]
        at, place, chosen = slots[counting], places[counting], token_ids[counting]
        finishes = np.zeros(len(slots), np.int8)
        finishes[counting] = self.table.settle(at, place, chosen, is_broken[counting], over)
        return finishes, counting[runs.up_to_the_end(counting, finishes[counting])]

    def _pool(self, slots: Indices) -> dict[int, Pooled]:
        if not len(slots):
            return {}
        assert self.pooler is not None, "a pooled sequence, and no pooler"
        return self.pooler.take(slots)

    # -- choosing

    def _drawing(self, slots: Indices, places: Indices) -> Drawing:
        table = self.table
        u = maths.uniform(table.seeds[slots], table.num_prompt[slots] + places)
        return Drawing(table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots], u)

    def _allowed(self, slots: Indices) -> Allowed:
        """What the grammars of `slots` allow. To end is not allowed where `ignore_eos` asks for more."""
        assert self.masks is not None, "a sequence has a grammar, and this sampler was made without masks"
        allowed = self.masks.read(slots)
        goes_on = np.flatnonzero(self.table.ignores_eos[slots])
        self.masks.forbid_end(allowed, goes_on)
        return allowed

    # -- edits

    def _edit(self, slots: Indices, logits: Array) -> None:
        penalised = np.flatnonzero(self.table.is_penalised[slots])
        if len(penalised):
            self._penalise(slots, penalised, logits)
        biased = np.flatnonzero(self.table.num_biased[slots])
        if len(biased):
            self._add_bias(slots, biased, logits)
        rows, ids = self.table.forbidden(slots)
        if len(rows):
            maths.forbid(logits, *_beside(logits, rows, ids))
        table = self.table
        if np.count_nonzero(table.limits.is_limited[slots]):
            table.limits.apply(slots, logits)
        if self.processor is not None:
            self._process(slots, logits)

    def _process(self, slots: Indices, logits: Array) -> None:
        assert self.processor is not None
        rows = np.flatnonzero(self._is_processed[slots])
        if len(rows) == len(slots):
            self.processor.process(slots, self._arrays.as_tensor(logits))
        elif len(rows):
            some = self._arrays.take(logits, rows)
            self.processor.process(slots[rows], self._arrays.as_tensor(some))
            self._arrays.put(logits, rows, some)

    def _note_processed(self, slots: Indices, token_ids: Longs) -> None:
        rows = np.flatnonzero(self._is_processed[slots])
        if self.processor is not None and len(rows):
            self.processor.note(slots[rows], token_ids[rows])

    def _penalise(self, slots: Indices, rows: Longs, logits: Array) -> None:
        """`rows` index into `slots`. Listings of tokens are padded by their last one, whose edit is the same twice."""
        table = self.table
        at = slots[rows]
        num_generated = table.num_generated[at]
        num_tokens = table.num_prompt[at] + num_generated
        self._penalise_repetition(at, rows, num_tokens, logits)
        has_answer = np.flatnonzero(num_generated)
        if len(has_answer):
            at, rows, num_generated = at[has_answer], rows[has_answer], num_generated[has_answer]
            column = np.arange(num_generated.max())
            is_token = column < num_generated[:, None]
            ids = table.tokens[at[:, None], table.num_prompt[at, None] + np.minimum(column, num_generated[:, None] - 1)]
            frequency = table.frequency_penalty[at, None] * is_token
            presence = table.presence_penalty[at, None]
            row, token, often, once = _beside(logits, rows[:, None], ids.astype(np.int64), frequency, presence)
            maths.penalise_frequency(logits, row, token, often)
            maths.penalise_presence(logits, row, token, once)

    def _penalise_repetition(self, slots: Indices, rows: Longs, num_tokens: Ints, logits: Array) -> None:
        penalty = self.table.repetition_penalty[slots]
        repeated = np.flatnonzero(penalty != 1)
        if not len(repeated):
            return
        num_tokens = num_tokens[repeated, None]
        column = np.minimum(np.arange(num_tokens.max()), num_tokens - 1)
        ids = self.table.tokens[slots[repeated, None], column].astype(np.int64)
        row, token, factor = _beside(logits, rows[repeated, None], ids, penalty[repeated, None])
        maths.penalise_repetition(logits, row, token, factor)

    def _add_bias(self, slots: Indices, rows: Longs, logits: Array) -> None:
        table = self.table
        at = slots[rows]
        width = int(table.num_biased[at].max())
        index, column = np.nonzero(np.arange(width) < table.num_biased[at, None])
        ids, bias = table.biased_ids[at[index], column].astype(np.int64), table.bias[at[index], column]
        maths.add_bias(logits, *_beside(logits, rows[index], ids, bias))

    # -- log-probabilities

    def _processed(self, logits: Array, rows: Longs, slots: Indices, needs: NDArray[np.uint8]) -> Array:
        """The logits that the tokens of some rows are drawn by, [n, V] f32: edited, and unless a row is greedy over its
        temperature and -inf where truncation leaves nothing."""
        arrays = self._arrays
        found = arrays.floats(arrays.take(logits, rows))
        is_random = needs[rows] & RANDOM != 0
        at = slots[rows]
        if np.count_nonzero(is_random):
            temperature = np.where(is_random, self.table.temperature[at], 1.0).astype(np.float32)
            found = found / arrays.beside(logits, temperature)[:, None]
        cut = np.flatnonzero(is_random & self.table.is_truncated[at])
        if len(cut):
            drawing = self._drawing(at[cut], self.table.num_generated[at[cut]])  # its randomness is not looked at
            arrays.put(found, cut, maths.truncated(arrays.take(found, cut), drawing))
        return found

    def _logprobs(
        self, raw: Array, asked: Longs, slots: Indices, token_ids: Longs, finishes: NDArray[np.int8]
    ) -> dict[int, TopLogprobs]:
        """Row -> log-probabilities that the logits `raw` give, for the rows `asked`."""
        whole = np.flatnonzero(finishes[asked] != FinishReason.ERROR)
        rows = asked[whole]
        if not len(rows):
            return {}
        found = maths.top_logprobs(maths.rows_of(raw, whole), token_ids[rows], self.table.num_logprobs[slots[rows]])
        return dict(zip(rows.tolist(), found, strict=True))


def _rows_of_tokens(tokens: StepTokens, rows: Indices) -> StepTokens:
    """Of a step's tokens those of some rows."""
    logprobs = {new: tokens.logprobs[old] for new, old in enumerate(rows.tolist()) if old in tokens.logprobs}
    columns = {
        name: getattr(tokens, name)[rows] for name in ("slots", "sequence_ids", "places", "token_ids", "finishes")
    }
    return replace(tokens, logprobs=logprobs, **columns)


def _any(needs: NDArray[np.uint8], bit: int) -> bool:
    return bool(int(np.bitwise_or.reduce(needs)) & bit)


def _beside(x: Array, *arrays: HostArray) -> tuple[Array, ...]:
    return tuple(arrays_of(x).beside(x, array) for array in arrays)
