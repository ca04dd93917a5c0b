"""Publishes snapshots of recurrent states to the prefix cache, when the steps that take them are done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..messages import Ints, StepPlan
from .prefix_cache import BlockChain, PrefixCache
from .state_snapshots import SnapshotKey, StateSnapshots
from .tiers.block_pool import BlockPool


@dataclass(frozen=True, slots=True, eq=False)
class _SavedEnd:
    """The state at the end of an answer, which a granted step saves."""

    step: int
    place: int  # of the snapshot
    key: SnapshotKey
    tail: int | None  # block of the tail, if it ends within a block
    before: int | None  # name of the snapshot that the sequence took of its prompt


class SnapshotPublisher:
    """Keeps the snapshots true to the steps that write them and to the cache's tails, some of which they are behind."""

    def __init__(self, snapshots: StateSnapshots, cache: PrefixCache, pool: BlockPool) -> None:
        self.snapshots = snapshots
        self._cache, self._pool = cache, pool
        self._ends: list[_SavedEnd] = []

    # -- prompts

    def take(self, rows: Sequence[tuple[int, BlockChain, int]], num_known: Ints) -> dict[int, int]:
        """The places to which a step saves the states behind its rows, by slot.

        `rows`: slot, chain, and position after the last token; `num_known` [S]: tokens with which sequences started.
        """
        taken = {}
        for slot, chain, end in rows:
            if not chain.is_cut and self.snapshots.is_due(end, int(num_known[slot])):
                place = self.snapshots.take()
                if place is not None:
                    taken[slot] = place
        self._drop_lost_tails()
        return taken

    def publish(self, place: int, chain: BlockChain, *, is_at_end: bool) -> None:
        """The step that wrote `place` is done, and its blocks are in the cache.

        `is_at_end`: whether they are all of `chain`, so that the snapshot is behind its last one.
        """
        if is_at_end and not chain.is_cut and isinstance(chain.last, int):
            self.snapshots.publish(place, chain.last)
            chain.snapshot = chain.last
        else:
            self.snapshots.give_back(place)

    def give_back(self, places: Iterable[int]) -> None:
        """The places of a step that was void, or whose sequences have lost their blocks since."""
        for place in places:
            self.snapshots.give_back(place)

    # -- ends of answers

    def save_end(self, step: int, key: SnapshotKey, tail: int | None, before: int | None) -> int | None:
        """The place to which `step` saves the state behind an answer; None if there is none left.

        `tail`: block of the tail, if it ends within a block. `before`: name of the snapshot of the prompt.
        """
        place = self.snapshots.take()
        self._drop_lost_tails()
        if place is not None:
            self._ends.append(_SavedEnd(step, place, key, tail, before))
        return place

    def publish_ends(self, plan: StepPlan) -> None:
        """Publishes the ends of answers whose states are saved. A void step may have changed them."""
        if not self._ends:
            return
        ends, self._ends = self._ends, []
        for end in ends:
            if not plan.voided and end.step > plan.completed_step:
                self._ends.append(end)
                continue
            is_known = end.tail is None or self._cache.partial_blocks.tails.get(end.tail) == end.key
            if plan.voided or not is_known:
                self.snapshots.give_back(end.place)
                if end.tail is not None and is_known:
                    self._drop_tail(end.tail)
            else:
                self.snapshots.publish(end.place, end.key, end.tail)
                if end.before is not None:
                    self.snapshots.pass_by(end.before)

    def _drop_lost_tails(self) -> None:
        """Drops the tails whose snapshots were replaced: nothing can go on behind them."""
        lost, self.snapshots.lost_tails = self.snapshots.lost_tails, []
        for tail in lost:
            self._drop_tail(tail)

    def _drop_tail(self, tail: int) -> None:
        if self._cache.drop_tail(tail):
            self._pool.forget(tail)

    # -- forgetting

    def forget(self) -> None:
        """The cache is about to be emptied: gives back the places at the ends of answers."""
        self.give_back(end.place for end in self._ends)
        self._ends.clear()

    def drop_all(self) -> None:
        """After a crash: forgets all, also those that steps in flight write."""
        self._ends.clear()
        self.snapshots.drop_all()
