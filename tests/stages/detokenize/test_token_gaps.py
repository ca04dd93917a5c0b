"""Inter-token latencies, slot by slot, against a count that is made token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millrace.runtime.histogram import Histogram
from millrace.stages.detokenize.token_gaps import BOUNDS_US, MOST_GROUPS, TokenGaps


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_a_random_life_of_slots_counts_each_gap_once(seed: int, num_lanes: int):
    draw, gaps, naive = random.Random(seed), TokenGaps(num_slots=6), Histogram(BOUNDS_US)
    now_us, slot_of, last_us, num_tokens = 0, {}, {}, {}  # slot_of: sequence -> slot, of those that run
    aside: dict[int, int] = {}  # sequence -> moment that it took along
    for step in range(300):
        now_us += draw.choice((1, 700, 12_000, 90_000))
        if draw.random() < 0.2 and slot_of:  # preempted, or over
            sequence = draw.choice(sorted(slot_of))
            moment = gaps.leave(slot_of.pop(sequence))
            if draw.random() < 0.7:
                aside[sequence] = moment
        free = sorted(set(range(6)) - set(slot_of.values()))
        if draw.random() < 0.3 and free:
            sequence = draw.choice([*sorted(aside), 1000 + step])
            slot_of[sequence] = draw.choice(free)
            gaps.enter(slot_of[sequence], aside.pop(sequence, 0))
        rows = [sequence for sequence in sorted(slot_of) if draw.random() < 0.9]
        rows = [one for one in rows if slot_of[one] % num_lanes == step % num_lanes]
        places = [num_tokens.get(sequence, 0) for sequence in rows]
        gaps.step(np.array([slot_of[s] for s in rows], np.intp), np.array(places, np.intp), now_us)
        for sequence in rows:
            if num_tokens.get(sequence):
                naive.observe(now_us - last_us[sequence])
            last_us[sequence], num_tokens[sequence] = now_us, num_tokens.get(sequence, 0) + 1
    assert (gaps.histogram.counts, gaps.histogram.total) == (naive.counts, naive.total)
    assert naive.num_observed > 50


@pytest.mark.parametrize("num_groups", [1, 2, MOST_GROUPS, MOST_GROUPS + 1])
def test_slots_that_take_turns_count_the_gaps_of_their_own_tokens(num_groups: int):
    gaps, naive, last_us = TokenGaps(num_slots=3 * num_groups), Histogram(BOUNDS_US), {}
    groups = np.array_split(np.arange(3 * num_groups), num_groups)
    for step in range(5 * num_groups):
        slots, now_us = groups[step % num_groups], 13_000 * step + step * step
        gaps.step(slots.copy(), np.full(3, step // num_groups), now_us)
        for slot in slots.tolist():
            if slot in last_us:
                naive.observe(now_us - last_us[slot])
            last_us[slot] = now_us
    assert (gaps.histogram.counts, gaps.histogram.total) == (naive.counts, naive.total)
    assert [gaps.leave(slot) for slot in range(3 * num_groups)] == [last_us[slot] for slot in range(3 * num_groups)]
