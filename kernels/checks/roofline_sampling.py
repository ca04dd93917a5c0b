"""The least bytes and operations of each sampling kernel; see `roofline.py`.

Integer operations are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layout.sampling_rows import WIDTH
from .roofline import LaunchCost

ROW_BYTES = 4 * WIDTH  # of a slot's sampling parameters
INDEX_BYTES = 8  # of a slot, a position, a token
GROUP = 128  # tokens of a group, whose largest logit and sum are written and read again
GROUP_FLOPS = 5  # of a token: maximum, difference, product, exponential, sum


def choose(num_rows: int, vocab_size: int, element_size: int) -> LaunchCost:
    """Noise is not counted, as few numbers have it."""
    logits = num_rows * vocab_size * element_size
    row_params = num_rows * (ROW_BYTES + 3 * INDEX_BYTES)
    groups = 2 * num_rows * -(-vocab_size // GROUP) * 8
    return LaunchCost(logits + row_params + groups, GROUP_FLOPS * num_rows * vocab_size)


def choose_truncated(num_rows: int, vocab_size: int, element_size: int) -> LaunchCost:
    """As `choose`; the few groups that are read again hit the cache."""
    plain = choose(num_rows, vocab_size, element_size)
    return LaunchCost(plain.num_bytes + 4 * num_rows, plain.num_flops)


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
    logits = num_rows * vocab_size * element_size
    groups = 2 * num_rows * (-(-vocab_size // GROUP) * 12 + min(num_top, -(-vocab_size // GROUP)) * 4)
    found = num_rows * (2 * INDEX_BYTES + 4 + 8 + 12 * num_top)
    return LaunchCost(logits + groups + found, (GROUP_FLOPS + 1) * num_rows * vocab_size)
