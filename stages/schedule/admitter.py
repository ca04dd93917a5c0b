"""Admission of waiting sequences to slots, and preemption for better ones.

Plain code behind the schedule stage. `policy.py` decides which sequence is better.
"""

from __future__ import annotations

import numpy as np

from ...kernels.layout.kv_layout import KVLayout
from ..array_checks import total
from ..messages import NO_INTS, Ints, PlanReport
from .adapter_lines import AdapterLines
from .adapter_slots import AdapterState
from .lifecycle import SequenceLifecycle
from .sequence import Sequence
from .spare_blocks import SpareBlocks, SpareOfKinds, SpareOfOneKind

MAX_GROWTH = 6  # blocks reserved per running sequence on admission, where nothing can be swapped


class Admitter:
    """Admits sequences from the queue, in order, and preempts running ones for them.

    A `report` is allocate's last one; None before the first. It is a step old, so every decision here is an estimate:
    a wrong one costs time, and breaks nothing.
    """

    def __init__(
        self,
        lifecycle: SequenceLifecycle,
        block_size: int,
        layout: KVLayout | None = None,
        *,
        splits_prompts: bool = True,
    ) -> None:
        # What the first in the queue lacks: "blocks"; "swapped" if it is swapped out; "adapter" if it may not pass
        # those that wait for theirs.
        self.blocked_reason = ""
        self._adapters = lifecycle.adapters
        self._lifecycle = lifecycle
        self._slots = lifecycle.slots
        self._waiting = lifecycle.waiting
        self._policy = lifecycle.policy
        self._block_size = block_size
        self._layout, self._splits_prompts = layout, splits_prompts
        self._found = CacheHitEstimate()

    def note_cached(self, slot: int, num_cached: int) -> None:
        """Records how much of a starting prompt was cached.

        Ignores prompts with a hint and resumed sequences.
        """
        sequence = self._slots.sequences[slot]
        if sequence is not None and not sequence.num_expected_cached and not sequence.num_preempted:
            self._found.note(len(sequence.token_ids), num_cached)

    def num_to_compute(self, sequence: Sequence) -> int:
        """Expected tokens to compute: those likely neither on the host nor in the prefix cache."""
        num_tokens = len(sequence.token_ids)
        return max(1, num_tokens - max(sequence.num_swapped, sequence.num_expected_cached, self._found.of(num_tokens)))

    # -- preemption

    def move_parked(self, report: PlanReport | None) -> None:
        """Preempts parked sequences: for slots, if any sequence waits; for blocks, ahead of need.

        Blocks are freed until each served row can have one and the first waiting sequence can start. A copy to the host
        takes some steps, so doing it ahead avoids waiting for it.
        """
        first, table = self._waiting.peek(), self._slots
        parked = (table.is_running & table.is_parked).nonzero()[0].tolist()
        num_slots = len(self._waiting) - table.num_free - table.num_leaving
        num_blocks = 0
        if report is not None:
            wanted = len(self._lifecycle.service_order.slots) + (0 if first is None else self._need(first))
            num_blocks = wanted - self._num_free(report, 0 if first is None else self._num_tokens(first))
        for slot in parked:
            if num_slots <= 0 and num_blocks <= 0:
                return
            num_held = -(-int(table.num_computed[slot]) // self._block_size)
            if num_slots > 0 or num_held:
                self._lifecycle.take_slot(slot, "slot" if num_slots > 0 else "blocks")
                num_slots, num_blocks = num_slots - 1, num_blocks - num_held

    def preempt_for_waiting(self) -> None:
        """Preempts running sequences, the last served first, for strictly better waiting ones.

        The waiting ones are admitted once no step in flight uses the slots any more.
        """
        first = self._next()
        if first is None or not self._is_better_than_running(first):
            return
        line = self._waiting.in_order()
        if self._adapters is not None:
            line = [sequence for sequence in line if self._may_enter(sequence)]
        del line[: self._slots.num_leaving]  # the others get the slots that are being freed
        for slot in self._lifecycle.service_order.slots[::-1].tolist():
            victim = self._slots.sequences[slot]
            assert victim is not None
            if not line or not self._policy.is_better(line[0], victim):
                return
            if not victim.is_protected:
                del line[0]
                self._lifecycle.take_slot(slot, "slot")

    def _is_better_than_running(self, sequence: Sequence) -> bool:
        """Whether `sequence` is better than the running one that is served last."""
        slots = self._lifecycle.service_order.slots
        last = self._slots.sequences[slots[-1]] if len(slots) else None
        return last is not None and self._policy.is_better(sequence, last)

    # -- admission

    def admit(self, token_budget: int, row_limit: int, report: PlanReport | None) -> bool:
        """Gives slots to waiting sequences, in order. Returns whether any got one.

        Stops when the `token_budget` is used up, `row_limit` slots are in use, or blocks are likely to run out.
        """
        table = self._slots
        self.blocked_reason = ""
        if self._lifecycle.num_returning or not table.num_free or (first := self._next()) is None:
            return False
        spare, num_before = self._spare(report), table.num_running
        while first is not None and table.num_free and token_budget > 0 and table.num_running < row_limit:
            need = self._need(first)
            is_tight = (
                spare is not None
                and table.num_running > 0
                and not self._policy.may_enter(first, need, spare.for_tokens(self._num_tokens(first)))
            )
            if is_tight and not self._is_better_than_running(first):  # a better one may preempt for what it lacks
                self.blocked_reason = "swapped" if first.num_swapped else "blocks"
                break
            token_budget -= self.num_to_compute(first)
            self._lifecycle.start(self._waiting.pop())
            if spare is not None:
                spare.take(self._num_tokens(first))
            first = self._next()
        return table.num_running > num_before

    def _next(self) -> Sequence | None:
        """The first sequence in the queue that may be admitted, after those were set aside that wait for an adapter."""
        first = self._waiting.peek()
        if self._adapters is None:
            return first
        while first is not None and self._lacks_adapter(first):
            self._adapters.add(self._waiting.pop(), self._policy.rank(first))
            first = self._waiting.peek()
        if first is not None and not self._may_enter(first):
            self.blocked_reason = "adapter"
            return None
        return first

    def _may_enter(self, sequence: Sequence) -> bool:
        """Whether a sequence has its adapter, and passes none that has waited enough for its own."""
        lines = self._adapters
        return lines is None or not (
            self._lacks_adapter(sequence) or lines.holds_back(sequence, self._policy.rank(sequence))
        )

    def _lacks_adapter(self, sequence: Sequence) -> bool:
        """Whether a sequence cannot run as its adapter is not resident."""
        assert self._adapters is not None
        return bool(sequence.adapter) and not self._adapters.slots.may_join(sequence.adapter)

    # -- adapters

    def preempt_for_adapters(self) -> None:
        """Preempts rows for better sequences that were set aside, and parked rows whose adapter leaves its slot.

        Call it before the rows of a plan are chosen.
        """
        lines = self._adapters
        assert lines is not None
        self._make_way_for_adapter(lines)
        if lines.slots.num_draining:  # a client that does not read would hold the slot for long
            for slot in (self._slots.is_running & self._slots.is_parked).nonzero()[0].tolist():
                if self._is_draining(slot):
                    self._lifecycle.take_slot(slot, "adapter")

    def serve_adapter_lines(self, completed_step: int, last_granted: int) -> bool:
        """Loads and drains slots of adapters for those set aside. Returns whether any may run now."""
        lines = self._adapters
        assert lines is not None
        ready = lines.advance(completed_step, last_granted, self._tokens_left_by_adapter)
        for digest in ready:
            for sequence in lines.take(digest):
                self._waiting.push(sequence, self._policy.rank(sequence))
        return bool(ready)

    def _make_way_for_adapter(self, lines: AdapterLines) -> None:
        """Drains a slot all of whose rows are worse than the best sequence set aside, and preempts those rows."""
        if (line := lines.first_blocked()) is None:
            return
        first = line.first
        if not self._is_better_than_running(first):
            return
        rows = self._rows_by_adapter()
        for slot in lines.slots.slots:
            if slot.digest in lines.slots.pinned:
                continue
            held = [sequence for _, sequence in rows.get(slot.number, ())]
            held += [self._lifecycle.sequences[each] for each in slot.promised]
            is_worse = (self._policy.is_better(first, each) and not each.is_protected for each in held)
            if slot.state is AdapterState.RESIDENT and held and all(is_worse):
                lines.drain_for(line, slot)
                for number, _ in rows.get(slot.number, ()):
                    self._lifecycle.take_slot(number, "adapter")
                return

    def _rows_by_adapter(self) -> dict[int, list[tuple[int, Sequence]]]:
        """(slot, sequence) of the running sequences, by the slot of their adapter."""
        rows: dict[int, list[tuple[int, Sequence]]] = {}
        for slot in self._slots.running().tolist():
            sequence = self._slots.sequences[slot]
            assert sequence is not None
            rows.setdefault(sequence.adapter_slot, []).append((slot, sequence))
        return rows

    def _tokens_left_by_adapter(self) -> dict[int, int]:
        """The tokens that the running sequences may still generate, by the slot of their adapter."""
        num_left = self._slots.limit - self._slots.num_known
        return {
            number: sum(int(num_left[slot]) for slot, _ in rows) for number, rows in self._rows_by_adapter().items()
        }

    def _is_draining(self, slot: int) -> bool:
        sequence, lines = self._slots.sequences[slot], self._adapters
        assert sequence is not None and lines is not None
        number = sequence.adapter_slot
        return number > 0 and lines.slots.slots[number - 1].state is AdapterState.DRAINING

    def _need(self, sequence: Sequence) -> int:
        """Blocks of kind 0 that a sequence starts with."""
        num_tokens = self._num_tokens(sequence)
        if self._layout is not None:
            return self._layout.most_blocks(0, num_tokens, 1 if self._splits_prompts else num_tokens)
        return -(-num_tokens // self._block_size)

    def _num_tokens(self, sequence: Sequence) -> int:
        """The tokens for which a sequence has blocks when it starts: those known, and one; all if it is protected."""
        return max(len(sequence.token_ids) + 1, sequence.limit if sequence.is_protected else 0)

    def _num_free(self, report: PlanReport, num_tokens: int) -> int:
        """Blocks of kind 0 that a sequence of so many tokens can have, once the steps in flight are done."""
        if self._layout is None or report.kv_room is None:
            return report.num_free + report.num_quarantined
        room = SpareOfKinds(self._layout, report.kv_room, splits_prompts=self._splits_prompts)
        return max(0, room.for_tokens(num_tokens))

    def _spare(self, report: PlanReport | None) -> SpareBlocks | None:
        """Blocks likely to be left once running sequences have what they need, and room to grow.

        Blocks of parked sequences count as available. None before the first report. The estimate only avoids admitting
        a sequence that would be preempted at once, which is cheap with swapping and expensive with recomputing.
        """
        table = self._slots
        if report is None:
            return None
        slots = self._lifecycle.service_order.slots
        known, computed = table.num_known[slots], table.num_computed[slots]
        if report.num_host_free:
            growth = np.ones_like(known)
        else:  # preempted sequences are recomputed, so admit fewer
            half_left = self._blocks(table.limit[slots] - known) // 2
            growth = np.minimum(np.maximum(half_left, 1), MAX_GROWTH)
        parked = NO_INTS
        if self._lifecycle.num_parked:
            parked = table.num_computed[table.is_running & table.is_parked]
        if self._layout is not None and report.kv_room is not None:
            spare = SpareOfKinds(self._layout, report.kv_room, splits_prompts=self._splits_prompts)
            spare.count_rows(computed, known + growth * self._block_size)
            spare.count_parked(parked)
            return spare
        owed = self._blocks(known) - self._blocks(computed) + growth
        num_left = report.num_free + report.num_quarantined + total(self._blocks(parked)) - total(owed)
        return SpareOfOneKind(num_left, self._block_size)

    def _blocks(self, num_tokens: Ints) -> Ints:
        return -(-num_tokens // self._block_size)


RATE = 0.25  # of the newest prompt in the mean


class CacheHitEstimate:
    """The share of a prompt likely found in the cache: an exponential mean over started prompts."""

    def __init__(self) -> None:
        self._share = 0.0

    def note(self, num_tokens: int, num_found: int) -> None:
        """Records a started prompt of `num_tokens` tokens, of which `num_found` were cached."""
        self._share += RATE * (num_found / num_tokens - self._share)

    def of(self, num_tokens: int) -> int:
        """Expected cached tokens of a prompt of `num_tokens`."""
        return int(self._share * num_tokens)
