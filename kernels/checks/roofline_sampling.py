"""The least bytes and operations of each sampling kernel; see `roofline.py`.

Integer operations are not counted. Drawing takes about 25 of them a token, mostly for Philox.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layout.sampling_rows import WIDTH
from .roofline import LaunchCost

ROW_BYTES = 4 * WIDTH  # of a slot's sampling parameters
INDEX_BYTES = 8  # of a slot, a position, a token
GROUP = 4096  # tokens of a group, whose best number and id are written and read again
GUMBEL_FLOPS = 16  # of a token, with temperature and comparison


def choose(num_rows: int, num_random: int, vocab_size: int, element_size: int, num_cut: int = 0) -> LaunchCost:
    """`num_random` of the rows are drawn, `num_cut` of them above a threshold."""
    logits = num_rows * vocab_size * element_size
    row_params = num_rows * (ROW_BYTES + 3 * INDEX_BYTES) + 4 * num_cut
    bests = 2 * num_rows * -(-vocab_size // GROUP) * 8
    greedy = num_rows - num_random
    return LaunchCost(logits + row_params + bests, vocab_size * (greedy + GUMBEL_FLOPS * num_random))


def thresholds(num_rows: int, num_cut: int, vocab_size: int, element_size: int) -> LaunchCost:
    """Only the `num_cut` rows with a threshold are read, and counted once, as the second pass hits the cache."""
    logits = num_cut * vocab_size * element_size
    return LaunchCost(logits + num_rows * (ROW_BYTES + INDEX_BYTES + 4), 6 * num_cut * vocab_size)


def edit(
    num_rows: int, vocab_size: int, element_size: int, num_penalised: int, num_masked: int, num_listed: Sequence[int]
) -> LaunchCost:
    """Reads logits and writes them in f32. `num_listed` is each row's number of biased or banned ids."""
    logits = num_rows * vocab_size * (element_size + 4)
    counts = num_penalised * vocab_size * 2
    masks = num_masked * -(-vocab_size // 32) * 4 + num_rows * INDEX_BYTES * (num_masked > 0)
    row_params = num_rows * (ROW_BYTES + 2 * INDEX_BYTES) + 16 * sum(num_listed)
    return LaunchCost(logits + counts + masks + row_params, 5 * num_penalised * vocab_size + sum(num_listed))


def force(num_rows: int) -> LaunchCost:
    return LaunchCost(num_rows * (2 * INDEX_BYTES + 4), 0)


def count_tokens(num_rows: int, num_penalised: int) -> LaunchCost:
    return LaunchCost(num_rows * (ROW_BYTES + 2 * INDEX_BYTES) + 4 * num_penalised, 0)


def score(num_rows: int, vocab_size: int, element_size: int, num_top: int) -> LaunchCost:
    """Scores a token of each row, and lists its `num_top` likeliest."""
    num_groups = -(-vocab_size // GROUP)
    logits = num_rows * vocab_size * element_size
    parts = 2 * num_rows * num_groups * (12 + 8 * num_top)
    found = num_rows * (2 * INDEX_BYTES + 4 + 8 + 12 * num_top)
    return LaunchCost(logits + parts + found, (4 + num_top) * num_rows * vocab_size)
