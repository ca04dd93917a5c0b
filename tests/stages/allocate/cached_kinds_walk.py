"""The walk of `kinds_walk.py` with a prefix cache and a host tier: texts that begin alike, forks, swaps and evictions.

    python -m tests.stages.allocate.cached_kinds_walk --steps 100000

Keys of equal texts are equal, whichever sequence computed them. The device runs the copies of a grant in their order,
and reads the window of each query. Some walks have windows only. Checked beside the invariants of the walk:

    K3  each block that the cache holds of any kind has the keys of its entry's tokens
    K4  no kind finds more than kind 0, and none of its blocks is of an entry that kind 0 lost
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from millrace.kernels.layout.state_layout import StateLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.messages import Direction, PlanReport, StepGrant, StepPlan
from tests.stages.allocate.kinds_walk import (
    NUM_LETTERS,
    NUM_SLOTS,
    POISON,
    Mark,
    Row,
    Step,
    Walk,
    run_walks,
)
from tests.stages.allocate.naive_memory import Text
from tests.stages.schedule.naive_scheduler import Seq

ACTIONS = {"arrive": 5, "plan": 10, "complete": 9, "void": 0.3, "end": 0.5, "crash": 0.1, "reset_cache": 0.1}
ACTIONS_OF_A_WALK = 250


class CachedWalk(Walk):
    """As `Walk`; the host's blocks are dicts, too."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        dice, self.has_index = self.dice, self.layout.kinds[0].window is not None
        self.scheduler.most_drafts = min(3, self.size - 1)  # a step has at most a block of a sequence
        cache, host = None, None
        if dice.random() < 0.9:
            cache = PrefixCache(self.size)
            cache.min_tokens_to_wait_for = cache.min_tokens_to_fork = 1
        if cache is None or dice.random() < 0.6:
            host = self.draw_host()
        layout = self.layout
        self.allocator = Allocator(layout.num_blocks[0], self.size, NUM_SLOTS, self.longest, cache, host, layout)
        self.host: list[dict[tuple[int, int], Mark]] = [{} for _ in self.kinds]
        self.texts: list[Text] = []
        self.arriving: dict[tuple[int, int], int] = {}  # (kind, host block) -> the step that writes it

    def draw_host(self, states: StateLayout | None = None) -> HostTier:
        """A host tier of a few blocks of each kind."""
        dice = self.dice
        sizes = [dice.randint(1, 2 * self.longest // self.size) for _ in self.kinds]
        if self.has_index:
            sizes.insert(0, dice.randint(sizes[0], 3 * self.longest // self.size))
        weights = [2.0] * (len(sizes) - 1)
        return HostTier(sizes[0], self.size, None, sizes[1:], weights, states, has_index=self.has_index)

    # -- what may happen

    def arrive(self) -> None:
        if len(self.scheduler.sequences) >= 8:
            return
        dice = self.dice
        text = Text(self.num_texts, self.trie, "")
        self.num_texts += 1
        num_prompt = dice.randint(1, self.longest - 1)
        if self.texts and dice.random() < 0.8:
            known = dice.choice(self.texts[-6:]).tokens
            for token in known[: dice.randint(0, num_prompt)]:
                text.append(token)
        while len(text.tokens) < num_prompt:
            text.append(dice.randrange(NUM_LETTERS))
        self.texts.append(text)
        limit = dice.randint(num_prompt + 1, self.longest)
        self.scheduler.add(Seq(text, num_prompt, limit, dice.randint(0, 1)))

    def reset_cache(self) -> None:
        self.allocator.reset_prefix_cache()
        self.check()

    # -- the grant

    def _note(self, plan: StepPlan, grant: StepGrant | None, report: PlanReport) -> None:
        super()._note(plan, grant, report)
        self.seen["hit"] += int((report.num_cached[report.num_granted > 0] > 0).sum())
        self.seen["swapped"] += len(report.swapped)
        if grant is None:
            return
        for copy in grant.copies:
            kind = "windows" if self.has_index else f"kind {min(copy.kind, 1)}"
            self.seen[f"{copy.direction.name.lower()} of {kind}"] += 1
            if copy.direction is Direction.OUT:
                for place in copy.destinations.tolist():
                    self.arriving[copy.kind, place] = grant.step

    def _is_shared(self, kind: int, block: int) -> bool:
        return block in self.allocator.kinds[kind].pool.kept()

    def _has_other_holder(self, kind: int, block: int) -> bool:
        return any(block in table.values() for table in self.tables[kind].values())

    def _marks(self, row: Row) -> list[Mark]:
        certain = row.end - row.num_drafts
        known: list[Mark] = [(0, mark) for mark in row.text.marks[:certain]]
        return known + [(1 + row.text.sequence_id, -2 - i) for i in range(certain, row.end)]

    # -- the device

    def _run(self, step: Step) -> None:
        self._copy(step)
        super()._run(step)

    def void(self) -> None:
        if self.flights and self.flights[0].grant.step <= self.scheduler.last_granted:
            self._copy(self.flights[0], is_poison=True)
        super().void()

    def _copy(self, step: Step, *, is_poison: bool = False) -> None:
        for copy in step.grant.copies:
            device, host = self.device[copy.kind], self.host[copy.kind]
            source = host if copy.direction is Direction.IN else device
            destination = host if copy.direction is Direction.OUT else device
            for a, b in zip(copy.sources.tolist(), copy.destinations.tolist(), strict=True):
                for offset in range(self.size):
                    found = POISON if is_poison else source.get((a, offset), POISON)
                    destination[b, offset] = found

    def _choose(self, step: Step, row: Row) -> list[tuple[int, int, int, int, int]]:
        seq = self.scheduler.holders[row.slot]
        assert seq.text is row.text
        if seq.is_finished:
            return []
        num_right = self.dice.randint(0, row.num_drafts)
        for _ in range(1 + num_right):
            row.text.append(self.dice.randrange(NUM_LETTERS))
        certain = row.end - row.num_drafts
        for position in range(certain, certain + num_right):
            for kind in self.kinds:
                block = step.tables[kind][row.slot][position // self.size]
                self.device[kind][block, position % self.size] = 0, row.text.marks[position]
        self.scheduler.accept(seq, num_right)
        seq.is_finished = len(row.text.tokens) >= seq.limit or self.dice.random() < 0.1
        made = []
        for i in range(1 + num_right):
            place, token = certain + i - seq.num_prompt, row.text.tokens[certain + i]
            made.append((row.slot, seq.sequence_id, place, token, int(seq.is_finished and i == num_right)))
        return made

    # -- invariants

    def check(self) -> None:
        super().check()
        cache = self.allocator.cache
        if cache is None:
            return
        cache.check()
        marks = self._marks_of_entries(cache)
        for kind, index in enumerate(cache.kinds, 0 if self.has_index else 1):
            for number, block in index.blocks.items():
                if number in marks:
                    own = [self.device[kind].get((block, i)) for i in range(self.size)]
                    assert own == marks[number], f"block {block} of kind {kind} has {own}, its entry {marks[number]}"
                    self.seen["entries of windows" if self.has_index else "entries of two kinds"] += 1
            for number, place in index.places.items():
                if number in marks and self.arriving.get((kind, place), -1) <= self.scheduler.completed_step:
                    own = [self.host[kind].get((place, i)) for i in range(self.size)]
                    assert own == marks[number], f"host block {place} of kind {kind} has {own}, not {marks[number]}"

    def _marks_of_entries(self, cache: PrefixCache) -> dict[int, list[Mark]]:
        """Entry -> what its block holds: of kind 0, or of an index kind, which holds nothing, by its tokens."""
        if not self.has_index:
            entries = cache.known_blocks()
            return {number: [self.device[0][block, i] for i in range(self.size)] for block, _, number in entries}
        known = {entry[3]: entry for tier in (cache._device, cache._host) for entry in tier.entries.values()}
        marks: dict[int, list[Mark]] = {}
        for number in sorted(known):  # an entry has a greater number than the one before it
            _, before, tokens, _, _ = known[number]
            if isinstance(before, int) and before not in marks:
                continue  # that one is gone, so nothing finds this one
            mark = marks[before][-1][1] if isinstance(before, int) else self.trie.root("")
            marks[number] = []
            for token in np.frombuffer(tokens, np.int32).tolist():
                mark = self.trie.after(mark, token)
                marks[number].append((0, mark))
        return marks

    def finish(self) -> None:
        for sequence_id in list(self.scheduler.sequences):
            self.scheduler.end(sequence_id)
        for _ in range(20):
            self.plan()
            self.complete()
        self.allocator.reset_prefix_cache()
        super().finish()
        host = self.allocator.host
        if host is not None:  # as the next plan would
            host.complete_steps(self.scheduler.completed_step, (), self.scheduler.generation)
        assert host is None or all(pool.num_free == pool.num_blocks for pool in (host.pool, *host.more))
        pool = self.allocator._device.pool
        assert not pool.num_in_use and not pool.num_cached


def walk(seed: int, num_actions: int = ACTIONS_OF_A_WALK) -> tuple[int, Counter[str]]:
    """One walk. Returns the number of granted steps, and how often rare things happened."""
    made = CachedWalk(seed)
    for name in made.dice.choices(list(ACTIONS), list(ACTIONS.values()), k=num_actions):
        getattr(made, name)()
    made.finish()
    return made.allocator.last_granted + 1, made.seen


if __name__ == "__main__":
    sys.exit(run_walks(walk, "cached_kinds_walk"))
