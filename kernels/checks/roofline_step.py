"""The least bytes of the kernels of a step's state; see `roofline.py`. Their operations are negligible."""

from __future__ import annotations

from ..layout.step_state import MAX_STOPS, STATE_WIDTH
from .roofline import LaunchCost

NUMBER, INDEX = 4, 8  # bytes of an i32 and an i64


def apply_updates(num_entries: int, num_started: int, num_runs: int, num_known: int) -> LaunchCost:
    """Reads the diff's header, new blocks, started sequences and their known tokens, and writes them to the tables."""
    blocks, state = 4 * num_entries, num_started * (2 * STATE_WIDTH + 1)
    return LaunchCost(NUMBER * (6 + blocks + state + 3 * num_runs + 2 * num_known), 0)


def make_inputs(num_rows: int, num_tokens: int, num_blocks: int) -> LaunchCost:
    """Rows that all continue and are all sampled, with `num_blocks` blocks in total.

    A row of the diff has four numbers; a row of the inputs has a start, a length, a slot, the place of its next token,
    the length of its run and an index of its logits; a token has an id and three indices.
    """
    header, rows = 5, 4 * num_rows + 1 + num_rows
    inputs = num_rows + 1 + 4 * num_rows
    read_and_written = header + rows + inputs + 2 * num_blocks + num_tokens
    return LaunchCost(NUMBER * read_and_written + INDEX * (num_rows + 3 * num_tokens), 0)


def note_tokens(num_rows: int) -> LaunchCost:
    """For each row: chosen id, slot, place and run, the end conditions, then token, count, end, and the host's result.

    Without drafts.
    """
    return LaunchCost(num_rows * (INDEX + NUMBER * (3 + 2 + MAX_STOPS + 3 + 2)), 0)
