"""Who is given a slot, and who gives one up for somebody better.

Plain code behind the schedule stage. Knows the line, the slots, and how many blocks the last report left; refuses to
know steps, and who is better than whom (`policy.py`).
"""

from __future__ import annotations

import numpy as np

from ..messages import Ints, PlanReport
from .lifecycle import Lives
from .sequence import Sequence

MAX_GROWTH = 6  # blocks that are left to a running sequence when somebody is let in, where nothing can be swapped


class Entrance:
    """Lets sequences in from the line, in order, and has others make way for them.

    A `report` is the last one that allocate gave, None before the first. What it says is a step old: everything here is
    a guess, and costs no more than time when it is wrong.
    """

    def __init__(self, lives: Lives, block_size: int) -> None:
        self.blocked_reason = ""  # what the first in line lacks: "blocks", or "swapped" if it is swapped out
        self._lives = lives
        self._slots = lives.slots
        self._waiting = lives.waiting
        self._policy = lives.policy
        self._block_size = block_size
        self._found = FoundShare()

    def note_found(self, slot: int, num_cached: int) -> None:
        """What was found of a prompt that begins, if it was not known before."""
        sequence = self._slots.sequences[slot]
        if sequence is not None and not sequence.num_expected_cached and not sequence.num_preempted:
            self._found.note(len(sequence.token_ids), num_cached)

    def num_to_compute(self, sequence: Sequence) -> int:
        """Tokens of it that are likely neither on the host nor in the prefix cache."""
        num_tokens = len(sequence.token_ids)
        return max(1, num_tokens - max(sequence.num_swapped, sequence.num_expected_cached, self._found.of(num_tokens)))

    # -- making way

    def move_parked(self, report: PlanReport | None) -> None:
        """Takes slots from parked sequences for any that wait; and their blocks before they are wanted, while there is
        one left for each row and what the first in line begins with: a copy takes some steps, and nobody is to wait."""
        first, table = self._waiting.peek(), self._slots
        parked = (table.is_running & table.is_parked).nonzero()[0].tolist()
        num_slots = len(self._waiting) - table.num_free - table.num_leaving
        num_blocks = 0
        if report is not None:
            wanted = len(self._lives.lineup.slots) + (0 if first is None else self._need(first))
            num_blocks = wanted - report.num_free - report.num_quarantined
        for slot in parked:
            if num_slots <= 0 and num_blocks <= 0:
                return
            num_held = -(-int(table.num_computed[slot]) // self._block_size)
            if num_slots > 0 or num_held:
                self._lives.take_slot(slot, "slot" if num_slots > 0 else "blocks")
                num_slots, num_blocks = num_slots - 1, num_blocks - num_held

    def make_way(self) -> None:
        """Takes slots from running sequences for strictly better ones that wait; who is served last gives way first.
        They are let in once no step in flight knows the slots any more."""
        first = self._waiting.peek()
        if first is None or not self._is_better_than_running(first):
            return
        line = self._waiting.in_order()[self._slots.num_leaving :]  # the others have slots on their way to them
        for slot in self._lives.lineup.slots[::-1].tolist():
            victim = self._slots.sequences[slot]
            assert victim is not None
            if not line or not self._policy.is_better(line[0], victim):
                return
            if not victim.is_protected:
                del line[0]
                self._lives.take_slot(slot, "slot")

    def _is_better_than_running(self, sequence: Sequence) -> bool:
        """Whether it is better than the one that is served last."""
        slots = self._lives.lineup.slots
        last = self._slots.sequences[slots[-1]] if len(slots) else None
        return last is not None and self._policy.is_better(sequence, last)

    # -- letting in

    def admit(self, token_budget: int, row_limit: int, report: PlanReport | None) -> bool:
        """Gives slots to those that wait, in order, while tokens (`token_budget` of them), slots (`row_limit` of them
        in use) and blocks are likely to be there. Whether anybody got one."""
        first, table = self._waiting.peek(), self._slots
        self.blocked_reason = ""
        if first is None or self._lives.num_returning or not table.num_free:
            return False
        spare, num_before = self._spare_blocks(report), table.num_running
        while first is not None and table.num_free and token_budget > 0 and table.num_running < row_limit:
            need = self._need(first)
            is_tight = spare is not None and table.num_running > 0 and not self._policy.may_enter(first, need, spare)
            if is_tight and not self._is_better_than_running(first):  # else it may take what it lacks
                self.blocked_reason = "swapped" if first.num_swapped else "blocks"
                break
            token_budget -= self.num_to_compute(first)
            self._lives.start(self._waiting.pop())
            spare = None if spare is None else spare - need - 1
            first = self._waiting.peek()
        return table.num_running > num_before

    def _need(self, sequence: Sequence) -> int:
        """Blocks that a sequence begins with: for what is known of it and one token, or all it may ever need."""
        num_tokens = max(len(sequence.token_ids) + 1, sequence.limit if sequence.is_protected else 0)
        return -(-num_tokens // self._block_size)

    def _spare_blocks(self, report: PlanReport | None) -> int | None:
        """Blocks likely to be left when every running sequence has what it needs now and some more, those of parked
        ones included; None before the first report. A guess that only keeps the newest from being let in to be
        preempted at once: that costs little where it is swapped, and much where it is computed again."""
        table = self._slots
        if report is None:
            return None
        slots = self._lives.lineup.slots
        owed = self._blocks(table.num_known[slots]) - self._blocks(table.num_computed[slots])
        if report.num_host_free:
            growth = len(slots)
        else:  # what is preempted is computed again: fewer are let in
            half_left = self._blocks(table.limit[slots] - table.num_known[slots]) // 2
            growth = int(np.clip(half_left, 1, MAX_GROWTH).sum())
        parked = self._blocks(table.num_computed[table.is_running & table.is_parked])
        return report.num_free + report.num_quarantined + int(parked.sum()) - int(owed.sum()) - growth

    def _blocks(self, num_tokens: Ints) -> Ints:
        return -(-num_tokens // self._block_size)


RATE = 0.25  # of the newest prompt in the mean


class FoundShare:
    """How much of a prompt is likely found in the cache: a running mean over the prompts that began."""

    def __init__(self) -> None:
        self._share = 0.0

    def note(self, num_tokens: int, num_found: int) -> None:
        """A prompt began, of which so many tokens were found."""
        self._share += RATE * (num_found / num_tokens - self._share)

    def of(self, num_tokens: int) -> int:
        """Tokens of the next prompt that are likely there."""
        return int(self._share * num_tokens)
