"""States at the end of an answer: the next turn of a chat goes on behind it, also within a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout.kv_layout import KVKind, KVLayout
from millrace.kernels.layout.state_layout import StateLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.messages import STATES, Direction, Started, StepDone, StepGrant
from millrace.stages.params import SamplingParams
from tests.stages.schedule.plans import ints, plan

NUM_SLOTS, SIZE = 3, 4
PROMPT = [*range(1, 7)]  # 6 tokens: its snapshot is behind 4


class Chat:
    """An allocator, and plans of which every step is done at once unless steps are `late`."""

    def __init__(self, num_snapshots: int = 4, layout: KVLayout | None = None) -> None:
        cache = PrefixCache(SIZE, states=StateLayout(64, NUM_SLOTS, num_snapshots=num_snapshots))
        num_blocks = 40 if layout is None else layout.num_blocks[0]
        self.allocator = Allocator(num_blocks, SIZE, NUM_SLOTS, 60, cache, layout=layout)
        self.cache = cache
        assert cache.snapshots is not None
        self.snapshots = cache.snapshots
        self.step = 0
        self.settled: list[StepDone] = []

    def serve(self, demands: dict[int, int], late: int = 0, **fields: Any) -> tuple[StepGrant | None, list[int]]:
        """The grant, and the cached tokens of each row."""
        made = plan(self.step, demands, completed=self.step - 1 - late)
        made = replace(made, **{"started": (), "settled": tuple(self.settled), **fields})
        self.settled.clear()
        grant, report = self.allocator.serve(made)
        self.allocator.check()
        self.step += grant is not None
        return grant, report.num_cached.tolist()

    def begin(self, slot: int, tokens: list[int], **fields: Any) -> tuple[StepGrant | None, list[int]]:
        started = Started(slot, self.step, f"r{self.step}", ints(*tokens), len(tokens), SamplingParams(), 0)
        return self.serve({slot: len(tokens)}, started=(started,), **fields)

    def tell(self, slot: int, sequence_id: int, place: int, token: int) -> None:
        columns = (np.array([value]) for value in (slot, sequence_id, place, token))
        self.settled.append(StepDone(self.step - 1, *columns, np.zeros(1, np.bool_)))

    def answer(self, prompt: list[int], tokens: list[int], *, slot: int = 0, num_late: int = 0) -> StepGrant | None:
        """A sequence answers `tokens`; then `num_late` more steps are granted, and it ends. The last grant."""
        sequence_id = self.step
        self.begin(slot, prompt)
        if self.step == sequence_id + 1 and len(prompt) > SIZE and self.allocator.tables.num_tokens[slot] < len(prompt):
            self.serve({slot: len(prompt) - int(self.allocator.tables.num_tokens[slot])})
        for place, token in enumerate(tokens):
            self.tell(slot, sequence_id, place, token)
            if place < len(tokens) - 1:
                self.serve({slot: 1})
        for late in range(num_late):
            self.serve({slot: 1}, late=late)
        return self.serve({}, late=min(1, num_late), ended=[slot])[0]


def saved(grant: StepGrant | None) -> list[tuple[Direction, list[int], list[int]]]:
    copies = () if grant is None else grant.copies
    return [
        (each.direction, each.sources.tolist(), each.destinations.tolist()) for each in copies if each.kind == STATES
    ]


ANSWER = [21, 22, 23, 24, 25]


@pytest.mark.parametrize("num_late", [0, 1])
@pytest.mark.parametrize("length", [4, 5, 6, 7])
def test_the_next_turn_of_a_chat_goes_on_behind_the_last_answer(length: int, num_late: int) -> None:
    """Its last token is not in the state, unless a step that read it was granted before the end was known."""
    chat, tokens = Chat(), [*ANSWER, 26, 27][:length]
    grant = chat.answer(PROMPT, tokens, num_late=num_late)
    known = len(PROMPT) + length - 1 + num_late
    if known % SIZE == 0 and num_late:
        assert not saved(grant), "the block that the late step fills is not in the cache"
        return
    assert saved(grant) == [(Direction.FORK, [0], [NUM_SLOTS + 1])]
    chat.serve({})
    grant, cached = chat.begin(1, [*PROMPT, *tokens, 31, 32])
    assert cached == [known] and grant is not None and grant.starts.tolist() == [known]
    assert (Direction.FORK, [NUM_SLOTS + 1], [1]) in saved(grant)
    forks = [each for each in grant.copies if each.kind == 0]
    assert len(forks) == (known % SIZE > 0), "the tail's keys are copied, too"


def test_a_turn_that_goes_on_otherwise_starts_behind_the_prompt() -> None:
    chat = Chat()
    chat.answer(PROMPT, ANSWER)
    chat.serve({})
    assert chat.begin(2, [*PROMPT, *ANSWER[:4]])[1] == [4], "its last token is always computed"
    chat = Chat()
    chat.answer(PROMPT, ANSWER)
    chat.serve({})
    assert chat.begin(1, [*PROMPT, *ANSWER[:3], 99, 99, 99])[1] == [4]


def test_an_end_with_tokens_that_are_not_known_is_not_saved() -> None:
    chat = Chat()
    assert not saved(chat.answer(PROMPT, ANSWER, num_late=2))


def test_an_end_close_behind_the_prompt_is_not_saved() -> None:
    chat = Chat()
    assert not saved(chat.answer(PROMPT, ANSWER[:2]))  # 7 tokens, and a snapshot behind 4
    assert saved(chat.answer([*PROMPT[:5], 9], ANSWER[:3], slot=1))


def test_an_end_whose_last_step_was_void_is_not_known() -> None:
    chat = Chat()
    assert saved(chat.answer(PROMPT, ANSWER, num_late=1))
    num_known = len(chat.snapshots)
    chat.serve({}, voided=(chat.step - 2,))
    assert len(chat.snapshots) == num_known
    assert chat.begin(1, [*PROMPT, *ANSWER, 31])[1] == [4]


def test_a_replaced_snapshot_drops_its_tail_and_an_evicted_tail_its_snapshot() -> None:
    chat = Chat(num_snapshots=2)
    chat.answer(PROMPT, ANSWER)
    chat.serve({})
    assert len(chat.snapshots) == 2 and len(chat.cache.partial_blocks.tails) == 1
    chat.answer([50, *PROMPT], [41], slot=1)  # takes the places of both
    chat.answer([60, *PROMPT], [41], slot=2)
    assert not chat.cache.partial_blocks.tails and len(chat.snapshots) == 2
    chat = Chat()
    chat.answer(PROMPT, ANSWER)
    chat.serve({})
    (tail,) = chat.cache.partial_blocks.tails
    chat.cache.forget(tail)
    chat.allocator.pool.forget(tail)
    assert len(chat.snapshots) == 1 and len(chat.snapshots._free) == 3
    chat.allocator.check()


def test_the_snapshot_of_a_prompt_is_replaced_before_that_of_an_answer_unless_it_was_used() -> None:
    chat, other = Chat(num_snapshots=4), [50, *PROMPT]
    chat.answer(PROMPT, ANSWER)
    chat.answer(other, ANSWER, slot=1)
    chat.serve({})
    chat.answer([60, *PROMPT], ANSWER, slot=2)  # replaces those of both prompts
    chat.serve({})
    assert chat.begin(0, [*PROMPT, *ANSWER, 31])[1] == [10] and chat.begin(1, [*other, *ANSWER, 31])[1] == [11]
    chat = Chat(num_snapshots=4)
    chat.answer(PROMPT, ANSWER)
    chat.answer([*PROMPT[:5], 9], ANSWER, slot=1)  # goes on from that of the first prompt
    chat.serve({})
    assert chat.begin(2, [*PROMPT[:5], 8])[1] == [4]


def test_a_reset_of_the_cache_forgets_an_end_that_a_step_saves() -> None:
    chat = Chat()
    assert saved(chat.answer(PROMPT, ANSWER))
    chat.allocator.reset_prefix_cache()
    chat.serve({})
    assert not len(chat.snapshots) and len(chat.snapshots._free) == 4
    assert chat.begin(1, [*PROMPT, *ANSWER, 31])[1] == [0]


def test_with_windows_the_tail_is_copied_in_every_kind() -> None:
    kinds = [KVKind("full", (0,), None, 1, 8, 8, 64), KVKind("window", (1,), 6, 1, 8, 8, 64)]
    chat = Chat(layout=KVLayout.of(kinds, SIZE, 64 * 60))
    chat.answer(PROMPT, ANSWER)
    chat.serve({})
    grant, cached = chat.begin(1, [*PROMPT, *ANSWER, 31, 32])
    assert cached == [10] and grant is not None
    assert {each.kind for each in grant.copies if each.direction is Direction.FORK} == {STATES, 0, 1}
