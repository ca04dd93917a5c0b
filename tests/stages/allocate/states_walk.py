"""The walk of `cached_kinds_walk.py` with the states of recurrent layers, which a step changes for good.

    python -m tests.stages.allocate.states_walk --steps 100000

The state in a slot is the mark of the last token that it has read. A row that goes on must find the mark of the token
before it, whether that was computed in the slot or copied into it, from the host or from a snapshot.

    S1  each snapshot holds the state behind its entry's tokens
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import numpy as np

from millrace.kernels.layout.state_layout import StateLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.allocate.state_snapshots import EndOfAnswer
from millrace.stages.messages import STATES, Direction
from tests.stages.allocate.cached_kinds_walk import ACTIONS, ACTIONS_OF_A_WALK, CachedWalk
from tests.stages.allocate.kinds_walk import NUM_LETTERS, NUM_SLOTS, POISON, Mark, Step, run_walks
from tests.stages.allocate.naive_memory import Text
from tests.stages.schedule.naive_scheduler import Seq


class StatesWalk(CachedWalk):
    """As `CachedWalk`, without drafts; `states` are by slot, snapshots behind them, and `host_states` by place."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        dice, layout = self.dice, self.layout
        self.scheduler.chance = 0.0
        states = StateLayout(64, NUM_SLOTS, dice.randint(1, NUM_SLOTS), dice.randint(1, 12), 2.0)
        host = self.draw_host(states)
        host = None if dice.random() < 0.2 else host
        cache = None if dice.random() < 0.1 else PrefixCache(self.size, states=states)
        if cache is not None and cache.snapshots is not None:
            cache.min_tokens_to_wait_for = 1
            cache.snapshots._every = self.size * dice.choice((2, 1000))
        self.allocator = Allocator(layout.num_blocks[0], self.size, NUM_SLOTS, self.longest, cache, host, layout)
        self.states: dict[int, Mark] = {}
        self.host_states: dict[int, Mark] = {}

    def arrive(self) -> None:
        """Also the next turn of a chat: it begins with all of a text, and goes on."""
        ended = [text for text in self.texts[-6:] if len(text.tokens) < self.longest - 2]
        if not ended or len(self.scheduler.sequences) >= 8 or self.dice.random() < 0.6:
            return super().arrive()
        text, before = Text(self.num_texts, self.trie, ""), self.dice.choice(ended).tokens
        self.num_texts += 1
        num_prompt = self.dice.randint(len(before) + 1, self.longest - 1)
        for token in before:
            text.append(token)
        while len(text.tokens) < num_prompt:
            text.append(self.dice.randrange(NUM_LETTERS))
        self.texts.append(text)
        self.scheduler.add(Seq(text, num_prompt, self.dice.randint(num_prompt + 1, self.longest), 0))

    def _run(self, step: Step) -> None:
        super()._run(step)
        for row in step.rows:
            marks = self._marks(row)
            if row.start:
                found = self.states.get(row.slot, POISON)
                assert found == marks[row.start - 1], (
                    f"step {step.grant.step}: slot {row.slot} goes on at {row.start} with the state behind {found}"
                )
            self.states[row.slot] = marks[row.end - 1]
        self._copy_states(step, is_after=True)

    def void(self) -> None:
        if self.flights:
            self.states |= dict.fromkeys((row.slot for row in self.flights[0].rows), POISON)
        super().void()

    def _copy(self, step: Step, *, is_poison: bool = False) -> None:
        blocks = tuple(copy for copy in step.grant.copies if copy.kind != STATES)
        super()._copy(replace(step, grant=replace(step.grant, copies=blocks)), is_poison=is_poison)
        self._copy_states(step, is_after=False, is_poison=is_poison)
        if is_poison:
            self._copy_states(step, is_after=True, is_poison=True)

    def _copy_states(self, step: Step, *, is_after: bool, is_poison: bool = False) -> None:
        for copy in step.grant.copies:
            if copy.kind == STATES and (copy.direction is Direction.SAVE) == is_after:
                self.seen[f"{copy.direction.name.lower()} of states"] += 1
                source = self.host_states if copy.direction is Direction.IN else self.states
                destination = self.host_states if copy.direction is Direction.OUT else self.states
                for a, b in zip(copy.sources.tolist(), copy.destinations.tolist(), strict=True):
                    destination[b] = POISON if is_poison else source.get(a, POISON)

    def check(self) -> None:
        super().check()
        cache = self.allocator.cache
        if cache is None or cache.snapshots is None:
            return
        marks = self._marks_of_entries(cache)
        for number, place in cache.snapshots._cached.items():
            if isinstance(number, EndOfAnswer):
                block, end = cache.snapshots.block_of(number), len(number.tokens) // 4
                assert cache.partial_blocks.tails[block] == number
                if self.has_index and isinstance(number[0], int) and number[0] not in marks:
                    continue  # the chain before it is gone, so nothing finds it
                last = self._mark_behind(number, marks) if self.has_index else self.device[0].get((block, end - 1))
                assert self.states.get(place) == last, f"snapshot {place} is {self.states.get(place)}, not {last}"
                self.seen["ends of answers"] += 1
            elif number in marks:
                last = marks[number][-1]
                assert self.states.get(place) == last, f"snapshot {place} is {self.states.get(place)}, not {last}"
                self.seen["snapshots"] += 1

    def _mark_behind(self, end: EndOfAnswer, marks: dict[int, list[Mark]]) -> Mark:
        before, tokens = end
        mark = marks[before][-1][1] if isinstance(before, int) else self.trie.root("")
        for token in np.frombuffer(tokens, np.int32).tolist():
            mark = self.trie.after(mark, token)
        return 0, mark

    def finish(self) -> None:
        super().finish()
        host = self.allocator.host
        assert host is None or all(pool.num_free == pool.num_blocks for pool in host.pools)


def walk(seed: int, num_actions: int = ACTIONS_OF_A_WALK) -> tuple[int, Counter[str]]:
    """One walk. Returns the number of granted steps, and how often rare things happened."""
    made = StatesWalk(seed)
    for name in made.dice.choices(list(ACTIONS), list(ACTIONS.values()), k=num_actions):
        getattr(made, name)()
    made.finish()
    return made.allocator.last_granted + 1, made.seen


if __name__ == "__main__":
    sys.exit(run_walks(walk, "states_walk"))
