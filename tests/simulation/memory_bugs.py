"""Bugs of memory, to plant: in blocks, the prefix cache and the host tier. Each is a context manager.

The simulation must find every one, and so must random plans for the allocator alone
(tests/stages/allocate/allocator_bugs.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from pytest import MonkeyPatch

from millrace.stages.allocate import prefix_cache
from millrace.stages.allocate.partial_blocks import PartialBlocks
from millrace.stages.allocate.prefix_publisher import PrefixPublisher
from millrace.stages.allocate.sequence_starts import SequenceStarts
from millrace.stages.allocate.slot_blocks import SlotBlocks
from millrace.stages.allocate.tiers.block_pool import BlockPool
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.allocate.tiers.plan_in_hand import PlanInHand
from millrace.stages.messages import Ints, StepPlan
from tests.simulation.planting import Bug, changed


def double_free() -> AbstractContextManager[None]:
    """The first of several freed blocks goes on the free stack twice."""

    def change(release: Any) -> Any:
        def twice(self: BlockPool, blocks: Ints) -> None:
            release(self, blocks)
            if len(blocks) > 1 and self.num_free < self.num_blocks:
                release(self, blocks[:1])

        return twice

    return changed(BlockPool, "_release", change)


def early_reuse() -> AbstractContextManager[None]:
    """Blocks are free at once, whatever steps in flight still use them."""

    def change(give_back: Any) -> Any:
        def hasty(self: BlockPool, blocks: Ints, last_step: int, completed_step: int) -> None:
            give_back(self, blocks, completed_step, completed_step)

        return hasty

    return changed(BlockPool, "give_back", change)


def trusted_digest() -> AbstractContextManager[None]:
    """Blocks are found by their keys alone."""

    def change(find: Any) -> Any:
        def trusting(self: Any, key: bytes, before: int | str, tokens: bytes) -> tuple[int, int] | None:
            block = self.blocks.get(key)
            return None if block is None else (block, self.entries[block][3])

        return trusting

    return changed(prefix_cache._Tier, "find", change)


def kept_despite_void() -> AbstractContextManager[None]:
    """Blocks that a void step should have filled count as filled."""

    def change(complete_steps: Any) -> Any:
        def gullible(self: PrefixPublisher, plan: StepPlan) -> None:
            complete_steps(self, replace(plan, voided=()))

        return gullible

    return changed(PrefixPublisher, "complete_steps", change)


def freed_by_the_first_holder() -> AbstractContextManager[None]:
    """A shared block is freed with the first table that releases it."""

    def change(share: Any) -> Any:
        def counting_nobody(self: BlockPool, blocks: Ints) -> None:
            share(self, blocks)
            self.num_tables[blocks] = 1

        return counting_nobody

    return changed(BlockPool, "share", change)


def shared_too_early() -> AbstractContextManager[None]:
    """A prompt's blocks can be found as soon as their step is granted."""

    def change(note_grant: Any) -> Any:
        def hasty(self: PrefixPublisher, step: int, *columns: Any) -> None:
            note_grant(self, -1, *columns)

        return hasty

    return changed(PrefixPublisher, "note_grant", change)


def forked_one_token_too_many() -> AbstractContextManager[None]:
    """One token more counts as copied than two blocks have in common."""

    def change(find: Any) -> Any:
        def generous(self: PartialBlocks, before: int | str, tokens: bytes, least: int) -> tuple[int, int] | None:
            found = find(self, before, tokens, least)
            return None if found is None else (found[0], min(found[1] + 1, len(tokens) // 4))

        return generous

    return changed(PartialBlocks, "find", change)


def fork_source_not_held() -> AbstractContextManager[None]:
    """The block that a sequence copies from may be reused before it is copied."""

    def change(attach: Any) -> Any:
        def careless(self: SequenceStarts, hand: PlanInHand, row: int, *, may_fork: bool) -> None:
            attach(self, hand, row, may_fork=may_fork)
            beginning = hand.begun.get(int(hand.plan.slots[row]))
            if beginning is not None and beginning.source is not None:
                self.device.pool.give_back(np.array([beginning.source], np.int32), -1, self.device.completed_step)

        return careless

    def change_fork(fork: Any) -> Any:
        def without_giving_back(self: SequenceStarts, hand: PlanInHand) -> None:
            give_back, self.device.pool.give_back = self.device.pool.give_back, lambda *_: None  # type: ignore[method-assign]
            fork(self, hand)
            self.device.pool.give_back = give_back  # type: ignore[method-assign]

        return without_giving_back

    def change_give_up(give_up: Any) -> Any:
        def without_giving_back(self: SequenceStarts, hand: PlanInHand, slot: int) -> None:
            beginning = hand.begun.get(slot)
            if beginning is not None and beginning.source is not None:
                hand.begun[slot] = replace(beginning, source=None)
            give_up(self, hand, slot)

        return without_giving_back

    @contextmanager
    def planted() -> Iterator[None]:
        with MonkeyPatch.context() as patch:
            for name, made in (
                ("attach", change),
                ("fork", change_fork),
                ("_give_up_beginning", change_give_up),
            ):
                patch.setattr(SequenceStarts, name, made(getattr(SequenceStarts, name)))
            yield

    return planted()


def fork_source_reused_while_copied() -> AbstractContextManager[None]:
    """The block that a sequence copies from is freed as soon as the step that copies it is granted."""

    def change(fork: Any) -> Any:
        def hasty(self: SequenceStarts, hand: PlanInHand) -> None:
            with of_step(hand, -1):
                fork(self, hand)

        return hasty

    return changed(SequenceStarts, "fork", change)


def forked_block_never_let_go() -> AbstractContextManager[None]:
    """A sequence that copies from a block goes on holding it."""

    def change(fork: Any) -> Any:
        def clinging(self: SequenceStarts, hand: PlanInHand) -> None:
            give_back, self.device.pool.give_back = self.device.pool.give_back, lambda *_: None  # type: ignore[method-assign]
            fork(self, hand)
            self.device.pool.give_back = give_back  # type: ignore[method-assign]

        return clinging

    return changed(SequenceStarts, "fork", change)


@contextmanager
def of_step(hand: PlanInHand, step: int) -> Iterator[None]:
    """Meanwhile the plan in hand is said to be that of another step."""
    plan, hand.plan = hand.plan, replace(hand.plan, step=step)
    yield
    hand.plan = plan


def tails_of_other_salts() -> AbstractContextManager[None]:
    """A first block is copied whichever sequence computed it."""

    def change(name: str) -> Any:
        def of(method: Any) -> Any:
            def unsalted(self: PartialBlocks, *args: Any) -> Any:
                at = 0 if name == "find" else 1
                before = "" if isinstance(args[at], str) else args[at]
                return method(self, *args[:at], before, *args[at + 1 :])

            return unsalted

        return of

    @contextmanager
    def planted() -> Iterator[None]:
        with MonkeyPatch.context() as patch:
            for name in ("find", "add", "add_tail", "remove"):
                patch.setattr(PartialBlocks, name, change(name)(getattr(PartialBlocks, name)))
            yield

    return planted()


def tail_found_too_early() -> AbstractContextManager[None]:
    """The tail of a prompt can be found as soon as its step is granted."""

    def change(note_grant: Any) -> Any:
        def hasty(self: PrefixPublisher, step: int, slots: Any, starts: Ints, ends: Ints, found: Ints) -> None:
            note_grant(self, step, slots, starts, ends, found)
            for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
                chain = self._chain(slot)
                if end == self._num_known[slot] and chain.num_blocks == chain.num_known:
                    self._num_completed[slot] = end
                    self._put_tail(slot, chain)

        return hasty

    return changed(PrefixPublisher, "note_grant", change)


def reused_while_copied() -> AbstractContextManager[None]:
    """The blocks of a victim are freed when its own last step is done, though a later one copies them."""

    def change(preempt: Any) -> Any:
        def hasty(self: SlotBlocks, hand: PlanInHand, slot: int) -> None:
            with of_step(hand, int(self.last_step[slot])):
                preempt(self, hand, slot)

        return hasty

    return changed(SlotBlocks, "preempt", change)


def host_reused_early() -> AbstractContextManager[None]:
    """Host blocks are free as soon as the copy back is granted."""

    def change(release: Any) -> Any:
        def hasty(self: HostTier, sequence_id: int, last_step: int, completed_step: int) -> None:
            release(self, sequence_id, completed_step, completed_step)

        return hasty

    return changed(HostTier, "release", change)


def half_a_block_forgotten() -> AbstractContextManager[None]:
    """Only full blocks are copied to the host, and the tokens in the last one count as copied, too."""

    def change(preempt: Any) -> Any:
        def short(self: SlotBlocks, hand: PlanInHand, slot: int) -> None:
            num_copies = len(hand.copies)
            num_full = int(self.device.tables.num_tokens[slot]) // self.device.pool.block_size
            preempt(self, hand, slot)
            if len(hand.copies) > num_copies:
                copy = hand.copies.pop()
                hand.copies.append(
                    replace(copy, sources=copy.sources[:num_full], destinations=copy.destinations[:num_full])
                )

        return short

    return changed(SlotBlocks, "preempt", change)


def moved_despite_void() -> AbstractContextManager[None]:
    """Cached blocks that a void step should have copied to the host count as copied."""

    def change(complete_steps: Any) -> Any:
        def gullible(self: HostTier, completed_step: int, voided: Any, generation: int) -> list[int]:
            return list(complete_steps(self, completed_step, (), -1))

        return gullible

    return changed(HostTier, "complete_steps", change)


MEMORY_BUGS: Mapping[str, Bug] = {
    bug.__name__: bug
    for bug in (
        double_free,
        early_reuse,
        trusted_digest,
        kept_despite_void,
        freed_by_the_first_holder,
        shared_too_early,
        forked_one_token_too_many,
        fork_source_not_held,
        fork_source_reused_while_copied,
        forked_block_never_let_go,
        tails_of_other_salts,
        tail_found_too_early,
        reused_while_copied,
        host_reused_early,
        half_a_block_forgotten,
        moved_despite_void,
    )
}
