"""Inter-token latencies, slot by slot, against a count that is made token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millrace.runtime.histogram import Histogram
from millrace.stages.detokenize.token_gaps import BOUNDS_US, TokenGaps


@pytest.mark.parametrize("seed", range(20))
def test_a_random_life_of_slots_counts_each_gap_once(seed: int):
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
        places = [num_tokens.get(sequence, 0) for sequence in rows]
        gaps.step(np.array([slot_of[s] for s in rows], np.intp), np.array(places, np.intp), now_us)
        for sequence in rows:
            if num_tokens.get(sequence):
                naive.observe(now_us - last_us[sequence])
            last_us[sequence], num_tokens[sequence] = now_us, num_tokens.get(sequence, 0) + 1
    assert (gaps.histogram.counts, gaps.histogram.total) == (naive.counts, naive.total)
    assert naive.num_observed > 50
