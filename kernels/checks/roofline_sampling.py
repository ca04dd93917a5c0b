"""What each sampling kernel must move and compute at the least; see `roofline.py`.

Integer work is not counted, and Philox is mostly that: drawing costs about 25 integer operations a token besides.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layout.sampling_rows import WIDTH
from .roofline import Cost

ROW_BYTES = 4 * WIDTH  # of what a slot asked for
INDEX_BYTES = 8  # of a slot, a position, a token
GROUP = 4096  # tokens whose best one is written and read again: a number and an id
GUMBEL_FLOPS = 16  # a token, with its temperature and its comparison


def choose(num_rows: int, num_random: int, vocab_size: int, element_size: int, num_cut: int = 0) -> Cost:
    """`num_random` of the rows are drawn, `num_cut` of those above a threshold."""
    logits = num_rows * vocab_size * element_size
    asked = num_rows * (ROW_BYTES + 3 * INDEX_BYTES) + 4 * num_cut
    bests = 2 * num_rows * -(-vocab_size // GROUP) * 8
    greedy = num_rows - num_random
    return Cost(logits + asked + bests, vocab_size * (greedy + GUMBEL_FLOPS * num_random))


def thresholds(num_rows: int, num_cut: int, vocab_size: int, element_size: int) -> Cost:
    """`num_cut` of the rows have a threshold, and only those are read: once here, as the second look finds them in the
    cache."""
    logits = num_cut * vocab_size * element_size
    return Cost(logits + num_rows * (ROW_BYTES + INDEX_BYTES + 4), 6 * num_cut * vocab_size)


def edit(
    num_rows: int, vocab_size: int, element_size: int, num_penalised: int, num_masked: int, num_listed: Sequence[int]
) -> Cost:
    """Reads logits and writes them in f32. `num_listed` of each row: ids that are biased or banned."""
    logits = num_rows * vocab_size * (element_size + 4)
    counts = num_penalised * vocab_size * 2
    masks = num_masked * -(-vocab_size // 32) * 4 + num_rows * INDEX_BYTES * (num_masked > 0)
    asked = num_rows * (ROW_BYTES + 2 * INDEX_BYTES) + 16 * sum(num_listed)
    return Cost(logits + counts + masks + asked, 5 * num_penalised * vocab_size + sum(num_listed))


def count_tokens(num_rows: int, num_penalised: int) -> Cost:
    return Cost(num_rows * (ROW_BYTES + 2 * INDEX_BYTES) + 4 * num_penalised, 0)


def score(num_rows: int, vocab_size: int, element_size: int, num_top: int) -> Cost:
    """`num_top` likeliest tokens of each row."""
    num_groups = -(-vocab_size // GROUP)
    logits = num_rows * vocab_size * element_size
    parts = 2 * num_rows * num_groups * (12 + 8 * num_top)
    found = num_rows * (2 * INDEX_BYTES + 4 + 8 + 12 * num_top)
    return Cost(logits + parts + found, (4 + num_top) * num_rows * vocab_size)
