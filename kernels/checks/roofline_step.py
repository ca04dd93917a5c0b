"""What the kernels of a step's state must move at the least; see `roofline.py`. They compute nothing worth counting."""

from __future__ import annotations

from ..layout.step_state import MAX_STOPS, STATE_WIDTH
from .roofline import Cost

NUMBER, INDEX = 4, 8  # bytes of an i32 and an i64


def take_news(num_entries: int, num_started: int, num_runs: int, num_known: int) -> Cost:
    """New blocks in tables, sequences that begin, and their known tokens, in so many runs: read from the diff, written
    to the tables; and what of the diff's header says where they are."""
    blocks, state = 4 * num_entries, num_started * (2 * STATE_WIDTH + 1)
    return Cost(NUMBER * (6 + blocks + state + 3 * num_runs + 2 * num_known), 0)


def make_inputs(num_rows: int, num_tokens: int, num_blocks: int) -> Cost:
    """For rows that all go on and are all sampled, with `num_blocks` blocks together. Rows of the diff have four
    numbers; rows of the inputs a start, a length and a slot, and an index of their logits; tokens an id of their own,
    and three indices."""
    header, rows = 4, 4 * num_rows + 1 + num_rows
    inputs = num_rows + 1 + 2 * num_rows
    read_and_written = header + rows + inputs + 2 * num_blocks + num_tokens
    return Cost(NUMBER * read_and_written + INDEX * (num_rows + 3 * num_tokens), 0)


def settle(num_rows: int) -> Cost:
    """A chosen id and a slot, what may end the row, and then its token, its count, its end, and what the host is
    told."""
    return Cost(num_rows * (INDEX + NUMBER * (1 + 3 + MAX_STOPS + 3 + 2)), 0)
