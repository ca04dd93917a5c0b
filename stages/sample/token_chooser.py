"""Chooses tokens from a step's logits: edits, masks, the choice, log-probabilities.

Used on the device thread only. Rows of V logits are numpy's or torch's, as the model returns them. Each row pays only
for the features it uses.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...runtime.message import message
from ..device.arrays import Array, HostArray, arrays_of
from ..device.step_result import TokenChoice
from ..engine_settings import LogprobsMode
from ..grammar.masks import AllowedTokens
from ..messages import Bools, Indices, Ints, Started, TopLogprobs
from . import logit_edits, sampling_math
from .logit_tiles import rows_of
from .logits_processor import LogitsProcessor
from .sampling_math import DrawParams, Longs
from .slot_params import EDITS, GRAMMAR, LOGPROBS, RANDOM, SlotParams

NO_ROWS: Longs = np.zeros(0, np.int64)


@message
class SampledRows:
    """The rows of a step that get a token, [n] each. A slot may have several adjacent rows."""

    slots: Indices
    places: Indices  # of the tokens to choose, in their answers
    needs: NDArray[np.uint8]  # bits, as in the table
    any_needs: int  # the bits that any of the rows has

    def that_need(self, bit: int) -> Longs:
        """[m] the rows with this bit."""
        return np.flatnonzero(self.needs & bit) if self.any_needs & bit else NO_ROWS


class TokenChooser:
    """Chooses tokens with numpy, or with torch on the device of its tensors."""

    def __init__(self, table: SlotParams, last_tokens: Array, mode: LogprobsMode) -> None:
        """`last_tokens` [S] is of the same kind as the logits, and on the same device."""
        self.table = table
        self.logprobs_mode: LogprobsMode = mode
        self.processor: LogitsProcessor | None = None
        self._arrays = arrays_of(last_tokens)
        self._is_processed = np.zeros(len(last_tokens), np.bool_)

    def use(self, processor: LogitsProcessor) -> None:
        """Installs a logits processor. Must be called before the first step."""
        self.processor = processor

    def start(self, started: Started) -> None:
        """Assigns a slot to a sequence. The table must have started it already."""
        if self.processor is not None:
            self._is_processed[started.slot] = self.processor.start(started)
            if self._is_processed[started.slot]:
                self.table.needs[started.slot] |= EDITS

    def choose(self, rows: SampledRows, logits: Array, allowed: AllowedTokens | None) -> TokenChoice:
        """Chooses tokens for n rows of `logits` [n, V], which may be modified.

        `allowed` holds the grammars' masks; None if no row has a grammar.
        """
        requested = rows.that_need(LOGPROBS)
        is_raw = self.logprobs_mode == "raw_logprobs"
        scored = self._arrays.take(logits, requested) if len(requested) and is_raw else None  # a copy
        if rows.any_needs & EDITS:
            logits = self._arrays.floats(logits)
            self._edit(rows.slots, logits)
        if len(requested) and not is_raw:
            if allowed is not None:
                logit_edits.allow_only(logits, allowed.rows, allowed.taken)
                allowed = None
            scored = self._processed(logits, requested, rows)
        if not len(rows.slots):
            return TokenChoice(NO_ROWS, np.zeros(0, np.bool_))
        return TokenChoice(*self._choose(rows, logits, allowed), scored)

    def _choose(self, rows: SampledRows, logits: Array, allowed: AllowedTokens | None) -> tuple[Longs, Bools]:
        """Chooses from [n, V] edited logits: (tokens, is_broken), [n] each."""
        if allowed is not None:
            logit_edits.allow_only(logits, allowed.rows, allowed.taken)
        is_random = rows.needs & RANDOM != 0
        drawing = self._drawing(rows.slots, rows.places) if rows.any_needs & RANDOM else None
        return sampling_math.choose(logits, is_random, drawing)

    def note(self, slots: Indices, token_ids: Longs) -> None:
        """Records the token of each slot. Called when any of the rows had edits."""
        self.table.limits.note(slots, token_ids)
        rows = np.flatnonzero(self._is_processed[slots])
        if self.processor is not None and len(rows):
            self.processor.note(slots[rows], token_ids[rows])

    def logprobs_of(
        self, choice: TokenChoice, rows: SampledRows, token_ids: Longs, is_reported: Bools
    ) -> dict[int, TopLogprobs]:
        """Log-probabilities by row, for the rows that request them and with `is_reported` [n].

        `token_ids` [n] are the rows' final tokens.
        """
        requested = rows.that_need(LOGPROBS)
        whole = np.flatnonzero(is_reported[requested])
        reported = requested[whole]
        if choice.scored is None or not len(reported):
            return {}
        num_top = self.table.num_logprobs[rows.slots[reported]]
        found = sampling_math.top_logprobs(rows_of(choice.scored, whole), token_ids[reported], num_top)
        return dict(zip(reported.tolist(), found, strict=True))

    def read_scores(self, slots: Indices, scores: Ints) -> list[TopLogprobs]:
        """Log-probabilities from the scores [n, W] of an asynchronous device.

        Its own chooser overrides this.
        """
        raise NotImplementedError(f"{type(self).__name__} chooses on the host: cannot read {len(scores)} scores")

    def _drawing(self, slots: Indices, places: Indices) -> DrawParams:
        table = self.table
        u = sampling_math.uniform(table.seeds[slots], table.num_prompt[slots] + places)
        return DrawParams(table.draws[slots], u)

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
            logit_edits.forbid(logits, *_beside(logits, rows, ids))
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

    def _penalise(self, slots: Indices, rows: Longs, logits: Array) -> None:
        """Applies the penalties of `rows`, which index into `slots`.

        Token lists are padded with their last token; repeating its edit has no effect.
        """
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
            logit_edits.penalise_frequency(logits, row, token, often)
            logit_edits.penalise_presence(logits, row, token, once)

    def _penalise_repetition(self, slots: Indices, rows: Longs, num_tokens: Ints, logits: Array) -> None:
        penalty = self.table.repetition_penalty[slots]
        repeated = np.flatnonzero(penalty != 1)
        if not len(repeated):
            return
        num_tokens = num_tokens[repeated, None]
        column = np.minimum(np.arange(num_tokens.max()), num_tokens - 1)
        ids = self.table.tokens[slots[repeated, None], column].astype(np.int64)
        row, token, factor = _beside(logits, rows[repeated, None], ids, penalty[repeated, None])
        logit_edits.penalise_repetition(logits, row, token, factor)

    def _add_bias(self, slots: Indices, rows: Longs, logits: Array) -> None:
        table = self.table
        at = slots[rows]
        width = int(table.num_biased[at].max())
        index, column = np.nonzero(np.arange(width) < table.num_biased[at, None])
        ids, bias = table.biased_ids[at[index], column].astype(np.int64), table.bias[at[index], column]
        logit_edits.add_bias(logits, *_beside(logits, rows[index], ids, bias))

    # -- log-probabilities

    def _processed(self, logits: Array, requested: Longs, rows: SampledRows) -> Array:
        """The processed logits of some rows, [n, V] f32.

        They are edited. Rows that are not greedy are also divided by their temperature, and truncated tokens are -inf.
        Where a grammar allows no token, an end is certain: the sampler forces one there.
        """
        arrays = self._arrays
        found = arrays.floats(arrays.take(logits, requested))
        guided = np.flatnonzero(rows.needs[requested] & GRAMMAR) if rows.any_needs & GRAMMAR else NO_ROWS
        if len(guided):
            logit_edits.allow_end(found, guided, self.table.eos_token_id)
        is_random = rows.needs[requested] & RANDOM != 0
        at = rows.slots[requested]
        if np.count_nonzero(is_random):
            temperature = np.where(is_random, self.table.temperature[at], 1.0).astype(np.float32)
            found = found / arrays.beside(logits, temperature)[:, None]
        cut = np.flatnonzero(is_random & self.table.is_truncated[at])
        if len(cut):
            drawing = self._drawing(at[cut], self.table.num_generated[at[cut]])  # its `u` is not used
            arrays.put(found, cut, sampling_math.truncated(arrays.take(found, cut), drawing))
        return found


def any_of(needs: NDArray[np.uint8]) -> int:
    """The bits that any row has. Takes 0.35 us for 16 rows; numpy's reduction takes 0.9 us."""
    bits = 0
    for different in set(needs.tobytes()):
        bits |= different
    return bits


def _beside(x: Array, *arrays: HostArray) -> tuple[Array, ...]:
    return tuple(arrays_of(x).beside(x, array) for array in arrays)


class MakeTokenChooser(Protocol):
    """Makes a `TokenChooser`, or a subclass of it."""

    def __call__(self, table: SlotParams, last_tokens: Array, mode: LogprobsMode) -> TokenChooser: ...
