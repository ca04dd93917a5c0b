"""Writes a step's guide: grammars' masks, allowed tokens, bad words, and tokens forced by budgets and ends.

The host computes it while the forward pass runs, from the tokens of earlier steps. Used on the device thread.
"""

from __future__ import annotations

import numpy as np

from ...messages import Indices, Ints, StepGrant
from ...sample.sampler import Sampler
from ...sample.slot_params import EDITS, ENDED, GRAMMAR, THINKING
from ...sample.token_chooser import any_of
from .guide_uploads import NO_MASK, NO_TOKEN, GuideLayout


class GuideWriter:
    """The guides of a sampler's rows."""

    def __init__(self, sampler: Sampler, layout: GuideLayout) -> None:
        self._sampler, self._layout = sampler, layout

    def awaits_results(self, grant: StepGrant, num_pending: int) -> bool:
        """Whether the guide depends on tokens of steps whose results are not applied, `num_pending` at most.

        It does with a grammar, with a bad word of several tokens, and when a budget may be used up.
        """
        table, slots = self._sampler.table, grant.logits_slots
        needs = table.needs[slots]
        any_needs = any_of(needs)
        if any_needs & GRAMMAR:
            return True
        if any_needs & THINKING and table.thinking.may_force(slots[needs & THINKING != 0], num_pending):
            return True
        return bool(any_needs & EDITS and np.count_nonzero(table.limits.depends_on_tokens[slots]))

    def write(self, grant: StepGrant, guide: Ints) -> int:
        """A `WriteGuide` for the rows of a step's logits. May wait for masks, which a side thread computes."""
        table, slots, layout = self._sampler.table, grant.logits_slots, self._layout
        needs = table.needs[slots]
        needs = np.where(needs & ENDED == 0, needs, 0)
        forced = layout.forced(guide)
        layout.mask_rows(guide)[:], forced[:] = NO_MASK, NO_TOKEN
        thinking = np.flatnonzero(needs & THINKING)
        if len(thinking):
            forced[thinking] = table.thinking.forced(slots[thinking])
        count = self._write_grammars(slots, np.flatnonzero(needs & GRAMMAR), guide)
        if any_of(needs) & EDITS:
            count = self._write_limits(
                slots, np.flatnonzero(table.limits.is_limited[slots] & (needs != 0)), guide, count
            )
        return layout.masks_at + count * layout.num_words

    def _write_grammars(self, slots: Indices, rows: Indices, guide: Ints) -> int:
        """Writes the masks of `rows`, and the ends of answers that can only end. Returns the number of masks."""
        if not len(rows):
            return 0
        layout, masks = self._layout, self._sampler.masks
        assert masks is not None, "a sequence has a grammar, and this sampler was made without masks"
        allowed = masks.read(rows, slots)
        found = allowed.masks[:, : layout.num_words]  # without the bit of an end that is no token
        np.take(found, allowed.mask_rows, axis=0, out=layout.masks(guide)[: len(rows)], mode="clip")
        layout.mask_rows(guide)[rows] = np.arange(len(rows))
        over = rows[masks.is_ending(allowed.mask_rows)]
        layout.forced(guide)[over] = -2 - self._sampler.table.eos_token_id
        return len(rows)

    def _write_limits(self, slots: Indices, rows: Indices, guide: Ints, count: int) -> int:
        """Writes allowed tokens and bad words into the masks, of which `count` are in use. Returns the new count."""
        masks, mask_rows = self._layout.masks(guide), self._layout.mask_rows(guide)
        for row, slot in zip(rows.tolist(), slots[rows].tolist(), strict=True):
            if mask_rows[row] == NO_MASK:
                masks[count], mask_rows[row], count = -1, count, count + 1
            self._sampler.table.limits.restrict(slot, masks[mask_rows[row]])
        return count
