"""Chooses tokens by kernels, with sampling parameters and tokens on the device.

Either the host waits for a step's tokens (`choose`, as in `TokenChooser`), or it submits the choice and gets the tokens
later (`choose_on_device`, for a `StepSubmitter`). The tokens are the same either way. Imports torch. Used on the device
thread, except `read_scores`, which runs where `TracksOutcomes.note_tokens` does.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.kernel_set import SamplingKernels
from ....kernels.layout import sampling_rows, step_state
from ....kernels.layout.step_state import SlotState, StepBuffers
from ....model.decoder.upload import upload
from ...device.step_result import TokenChoice
from ...engine_settings import LogprobsMode
from ...grammar.masks import AllowedTokens
from ...messages import Bools, Indices, Ints, Started, TopLogprobs
from ...params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from ...sample import logit_edits, sampling_math
from ...sample.sampling_math import Longs, TokenScores
from ...sample.slot_params import EDITS, GRAMMAR, LOGPROBS, POOLED, RANDOM, THINKING, SlotParams
from ...sample.token_chooser import NO_ROWS, SampledRows, TokenChooser, any_of
from .guide_uploads import NO_TOKEN, GuideLayout
from .step_device import ATTENDED

# Kinds of sampling of a `StepSubmitter`; each does all that the ones before it do. GUIDED reads a guide of the host.
PLAIN, TRUNCATED, EDITED, GUIDED = 0, 1, 2, 3
KINDS = (PLAIN, TRUNCATED, EDITED, GUIDED)
SCORED = 4  # kinds with log-probabilities add SCORED * (1 + k), where k of the likeliest tokens are requested
# Kernels are compiled for a number of candidates rounded up to a power of two. One value for each, and the maximum.
COMPILED_TOPS = (0, 1, 2, 3, 5, 9, 17, MAX_LOGPROBS)

# The columns of a step's scores, [S, SCORE_WIDTH] i32; floats are stored by their bits.
LOGPROB, RANK, TOP_IDS, TOP_LOGPROBS = 0, 1, 2, 2 + MAX_LOGPROBS
SCORE_WIDTH = 2 + 2 * MAX_LOGPROBS


def is_guided(kind: int) -> bool:
    """Whether this kind of sampling reads a guide."""
    return kind >= 0 and kind % SCORED == GUIDED


class TritonTokenChooser(TokenChooser):
    """As `TokenChooser`, by kernels.

    The cuts keep the same tokens, including all ties. Differences: the random noise is another, so a seed
    gives other tokens; the sums for top_p are in f32; and a token counts at most 32,767 times for penalties.

    Tables on the device, indexed by slot, are filled when a sequence starts. Token counts are updated with each choice.
    Rare features (allowed tokens, bad words, a user's logits processor) are done by torch, between the kernels.
    """

    def __init__(
        self,
        table: SlotParams,
        last_tokens: Tensor,
        mode: LogprobsMode,
        *,
        kernels: SamplingKernels,
        num_rows: int | None = None,
    ) -> None:
        """A step has at most `num_rows` rows of logits: as many as slots by default."""
        super().__init__(table, last_tokens, mode)
        self._kernels = kernels
        num_slots, num_ends = len(last_tokens), len(table.eos) + MAX_STOP_TOKEN_IDS
        self._device = last_tokens.device
        self._rows = self._upload(np.tile(sampling_rows.pack(), (num_slots, 1)))  # the default row uses no feature
        self._counts = self._zeros((num_slots, table.vocab_size), torch.int16)
        self._biased_ids = self._zeros((num_slots, MAX_LOGIT_BIAS), torch.int32)
        self._bias = self._zeros((num_slots, MAX_LOGIT_BIAS), torch.float32)
        self._end_ids = self._zeros((num_slots, num_ends), torch.int32)
        self.num_rows = num_rows or num_slots
        self.scores = self._zeros((self.num_rows, SCORE_WIDTH), torch.int32)  # of a step's rows
        self.guides = GuideLayout(self.num_rows, table.vocab_size)
        self.guide = self._zeros((self.guides.size,), torch.int32)  # of a step's rows

    def start(self, started: Started) -> None:
        super().start(started)
        slot, table = started.slot, self.table
        num_biased, ends = int(table.num_biased[slot]), table.end_ids(slot)
        row = sampling_rows.pack(
            seed=int(table.seeds[slot]),
            num_biased=num_biased,
            num_ends=len(ends),
            end_position=int(table.num_prompt[slot] + table.min_tokens[slot]),
            **table.row(slot),
        )
        self._rows[slot] = self._upload(row)
        if table.is_penalised[slot]:
            counts = sampling_rows.count(started.token_ids, started.num_prompt, table.vocab_size)
            self._counts[slot] = self._upload(counts)
        if num_biased:
            self._biased_ids[slot, :num_biased] = self._upload(table.biased_ids[slot, :num_biased])
            self._bias[slot, :num_biased] = self._upload(table.bias[slot, :num_biased])
        self._end_ids[slot, : len(ends)] = self._upload(ends)

    def choose(self, rows: SampledRows, logits: Tensor, allowed: AllowedTokens | None) -> TokenChoice:
        if not len(rows.slots):
            return TokenChoice(NO_ROWS, np.zeros(0, np.bool_))
        slots, positions = self._upload(np.stack([rows.slots, self.table.num_prompt[rows.slots] + rows.places]))
        edited = logits
        if rows.any_needs & EDITS or allowed is not None:
            edited = self._edited(rows, slots, positions, logits, allowed)
        bounds = None
        if np.count_nonzero(self.table.is_truncated[rows.slots] & (rows.needs & RANDOM != 0)):
            chosen, bounds = self._kernels.choose_truncated(edited, self._rows, slots, positions)
        else:
            chosen = self._kernels.choose(edited, self._rows, slots, positions)
        found = chosen.cpu().numpy()
        scored = None
        if rows.any_needs & LOGPROBS:
            scored = (logits,) if self.logprobs_mode == "raw_logprobs" else (edited, self._rows, slots, bounds)
            if len(scored) > 1 and rows.any_needs & GRAMMAR:  # where no token is allowed, an end is forced: certain
                none = np.flatnonzero((found < 0) & (rows.needs & GRAMMAR != 0))
                edited[self._upload(none), self.table.eos_token_id] = 0.0
        return TokenChoice(np.maximum(found, 0), found < 0, scored)

    @property
    def scored_kinds(self) -> tuple[int, ...]:
        """Kinds that together launch every scoring kernel.

        With raw logits the kernels are the same for all kinds; those of GUIDED are always those of EDITED.
        """
        kinds = (PLAIN,) if self.logprobs_mode == "raw_logprobs" else (PLAIN, TRUNCATED, EDITED)
        return tuple(kind + SCORED * (1 + k) for kind in kinds for k in COMPILED_TOPS)

    def warm_attended(self, dtype: torch.dtype) -> None:
        """Launches the kernels of attended steps once, to compile them at the start. Logits are of `dtype`."""
        table, kernels = self.table, self._kernels
        logits = self._zeros((1, table.vocab_size), dtype)
        slots = self._zeros((1,), torch.int64)
        masks = self._zeros((1, self.guides.num_words), torch.int32)
        tables = (self._counts, self._biased_ids, self._bias, self._end_ids)
        kernels.edit(logits, self._rows, slots, slots, *tables, masks, slots)
        for each in (logits, kernels.edit(logits, self._rows, slots, slots, *tables)):
            kernels.choose(each, self._rows, slots, slots)
            chosen, bounds = kernels.choose_truncated(each, self._rows, slots, slots)
        raw = () if self.logprobs_mode == "raw_logprobs" else (self._rows, slots, bounds)
        kernels.score(logits, slots, chosen.clamp(min=0), min(1, table.vocab_size), *raw)

    def kind(self, slots: Indices) -> int:
        """The kind of sampling with which `choose_on_device` serves all rows of these slots.

        ATTENDED if the host must see the logits of any row.
        """
        needs = self.table.needs[slots]
        any_needs = any_of(needs)
        if any_needs & POOLED or (any_needs & EDITS and np.count_nonzero(self._is_processed[slots])):
            return ATTENDED
        if any_needs & (GRAMMAR | THINKING):
            kind = GUIDED
        elif any_needs & EDITS:
            kind = GUIDED if np.count_nonzero(self.table.limits.is_limited[slots]) else EDITED
        else:
            kind = TRUNCATED if np.count_nonzero(self.table.is_truncated[slots] & (needs & RANDOM != 0)) else PLAIN
        if any_needs & LOGPROBS:
            num_top = int(self.table.num_logprobs[slots].max())
            return kind + SCORED * (1 + num_top) if num_top <= MAX_LOGPROBS else ATTENDED
        return kind

    def choose_on_device(self, logits: Tensor, slots: SlotState, buffers: StepBuffers, kind: int) -> Tensor:
        """[P] token ids: a `Choose` of `device_work.py`. Launches only.

        A scored kind also fills `scores`.
        """
        num_scores, kind = divmod(kind, SCORED)
        raw = logits
        rows = slots.state[:, step_state.DRAW :]  # begins as a row of `sampling_rows`
        sampled_slots, positions = buffers.sampled_slots, buffers.next_positions
        bounds = None
        if kind >= EDITED:
            tables = (self._counts, self._biased_ids, self._bias, self._end_ids)
            masks = self._masks(len(sampled_slots)) if kind == GUIDED else ()
            logits = self._kernels.edit(logits, self._rows, sampled_slots, positions, *tables, *masks)
        if kind != PLAIN:
            chosen, bounds = self._kernels.choose_truncated(logits, rows, sampled_slots, positions)
        else:
            chosen = self._kernels.choose(logits, rows, sampled_slots, positions)
        if kind == GUIDED:
            forced = self.guides.forced(self.guide)[: len(chosen)]
            self._kernels.force(chosen, forced)
            if num_scores and self.logprobs_mode != "raw_logprobs":
                _allow_forced_ends(logits, chosen, forced)
        if kind >= EDITED:
            self._kernels.count_tokens(self._counts, self._rows, sampled_slots, chosen.clamp(min=0))
        if num_scores:
            drawn = (logits, rows, sampled_slots.clamp(min=0), bounds)
            self._score(chosen, num_scores - 1, *((raw,) if self.logprobs_mode == "raw_logprobs" else drawn))
        return chosen

    def _masks(self, num_rows: int) -> tuple[Tensor, Tensor]:
        return self.guides.masks(self.guide), self.guides.mask_rows(self.guide)[:num_rows]

    def _score(self, chosen: Tensor, num_top: int, logits: Tensor, *drawn: Tensor | None) -> None:
        every, num_top = torch.arange(len(chosen), device=self._device), min(num_top, logits.shape[1])
        found = self._kernels.score(logits, every, chosen.clamp(min=0), num_top, *drawn)
        scores, (logprobs, ranks, top_ids, top_logprobs) = self.scores[: len(chosen)], found
        scores[:, LOGPROB], scores[:, RANK] = logprobs.view(torch.int32), ranks
        scores[:, TOP_IDS : TOP_IDS + num_top] = top_ids
        scores[:, TOP_LOGPROBS : TOP_LOGPROBS + num_top] = top_logprobs.view(torch.int32)

    def read_scores(self, slots: Indices, scores: Ints) -> list[TopLogprobs]:
        """Log-probabilities from rows of `scores` [n, SCORE_WIDTH] on the host."""
        floats, ids = scores.view(np.float32), scores.astype(np.int64)
        found = TokenScores(floats[:, LOGPROB], ids[:, RANK], ids[:, TOP_IDS:TOP_LOGPROBS], floats[:, TOP_LOGPROBS:])
        return sampling_math.top_logprobs_of(found, self.table.num_logprobs[slots])

    def note(self, slots: Indices, token_ids: Longs) -> None:
        super().note(slots, token_ids)
        if np.count_nonzero(self.table.is_penalised[slots]):
            where, chosen = self._upload(np.stack([slots, token_ids]))
            self._kernels.count_tokens(self._counts, self._rows, where, chosen)

    def logprobs_of(
        self, choice: TokenChoice, rows: SampledRows, token_ids: Longs, is_reported: Bools
    ) -> dict[int, TopLogprobs]:
        requested = rows.that_need(LOGPROBS)
        reported = requested[is_reported[requested]]
        if choice.scored is None or not len(reported):
            return {}
        logits, *drawn = choice.scored
        num_top = self.table.num_logprobs[rows.slots[reported]]
        most = min(int(num_top.max()), logits.shape[1])
        found = self._kernels.score(logits, self._upload(reported), self._upload(token_ids), most, *drawn)
        logprobs, ranks, top_ids, top_logprobs = (part.cpu().numpy() for part in found)
        scores = TokenScores(logprobs, ranks, top_ids, top_logprobs)
        return dict(zip(reported.tolist(), sampling_math.top_logprobs_of(scores, num_top), strict=True))

    # -- parts

    def _edited(
        self, rows: SampledRows, slots: Tensor, positions: Tensor, logits: Tensor, allowed: AllowedTokens | None
    ) -> Tensor:
        """The edited logits, a new f32 tensor.

        The grammar's mask is applied with the other edits, but after the user's processor if any row has one.
        """
        is_processed = self.processor is not None and bool(self._is_processed[rows.slots].any())
        masks = mask_rows = None
        if allowed is not None and not is_processed:
            masks = self._upload(allowed.taken)
            mask_of = np.full(len(rows.slots), -1, np.int64)
            mask_of[allowed.rows] = np.arange(len(allowed.rows))
            mask_rows = self._upload(mask_of)
        tables = (self._counts, self._biased_ids, self._bias, self._end_ids)
        edited = self._kernels.edit(logits, self._rows, slots, positions, *tables, masks, mask_rows)
        if np.count_nonzero(self.table.limits.is_limited[rows.slots]):
            self.table.limits.apply(rows.slots, edited)
        if is_processed:
            self._process(rows.slots, edited)
            if allowed is not None:
                logit_edits.allow_only(edited, allowed.rows, allowed.taken)
        return edited

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        return upload(array, self._device)


def _allow_forced_ends(logits: Tensor, chosen: Tensor, forced: Tensor) -> None:
    """Makes a forced end certain in rows that allow no token, for their log-probabilities. Launches only."""
    at = chosen.clamp(min=0)[:, None]
    own = logits.gather(1, at)
    logits.scatter_(1, at, own.masked_fill((forced < NO_TOKEN)[:, None] & own.isneginf(), 0.0))
