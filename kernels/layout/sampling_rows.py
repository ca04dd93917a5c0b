"""A slot's sampling parameters as the sampling kernels read them: one row of 16 i32 numbers, 64 bytes.

The host packs a row when a sequence starts; it stays on the device while the sequence runs. Floats are stored by their
bits. A row begins with the numbers of a draw, all that `choose`, `choose_truncated` and `score` read: any table whose
rows begin so will do. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .sampling_fields import DRAWS, PENALTIES, Kind, SamplingField

WIDTH = 16

SEED_LOW, SEED_HIGH = 0, 1
FIRST_DRAW = 2
AT = {field.name: FIRST_DRAW + place for place, field in enumerate((*DRAWS, *PENALTIES))}  # f32; WHOLE fields i32
DRAW_WIDTH = FIRST_DRAW + len(DRAWS)  # numbers of a draw
TEMPERATURE = AT["temperature"]  # 0 = greedy
PRESENCE, FREQUENCY, REPETITION = (AT[field.name] for field in PENALTIES)
NUM_BIASED = DRAW_WIDTH + len(PENALTIES)  # ids in the slot's list of biased tokens
NUM_ENDS = NUM_BIASED + 1  # ids in the slot's list of tokens that may not be chosen before END_POSITION
END_POSITION = NUM_BIASED + 2  # absolute position from which they may be chosen
assert END_POSITION < WIDTH, "more sampling fields than a row has room for"

MAX_COUNT = 0x7FFF  # the count of a token stops here
IN_PROMPT = -0x8000  # the remaining bit of a count: the token occurs in the prompt


def pack(
    *, seed: int = 0, num_biased: int = 0, num_ends: int = 0, end_position: int = 0, **values: float
) -> NDArray[np.int32]:
    """The row of a slot, [WIDTH] i32. `seed` is taken modulo 2 ** 64.

    `values` are sampling fields by name; the others ask for nothing: greedy, no cuts, no penalties.
    """
    row = np.zeros(WIDTH, np.int32)
    given = {field.name: field.default for field in (*DRAWS, *PENALTIES)} | {"temperature": 0.0} | values
    assert len(given) == len(AT), f"no sampling fields of rows: {', '.join(given.keys() - AT.keys())}"
    row[:DRAW_WIDTH] = draw_words(seed, [field.row_value(given[field.name]) for field in DRAWS])
    row[DRAW_WIDTH:NUM_BIASED] = _words(PENALTIES, [given[field.name] for field in PENALTIES])
    row[[NUM_BIASED, NUM_ENDS, END_POSITION]] = num_biased, num_ends, end_position
    return row


def draw_words(seed: int, draws: Iterable[float]) -> NDArray[np.int32]:
    """The beginning of a row, [DRAW_WIDTH] i32, from the values of `DRAWS`."""
    seeds = np.array([seed % 2**64], np.uint64).view(np.int32)
    return np.concatenate([seeds, _words(DRAWS, draws)])


def _words(fields: tuple[SamplingField, ...], values: Iterable[float]) -> NDArray[np.int32]:
    each = list(values)
    words = np.array(each, np.float32).view(np.int32)
    for place, field in enumerate(fields):
        if field.kind is Kind.WHOLE:
            words[place] = int(each[place])
    return words


def count(token_ids: NDArray[np.int32], num_prompt: int, vocab_size: int) -> NDArray[np.int16]:
    """Token counts [V] i16 of a sequence that starts: occurrences after the prompt, and IN_PROMPT for those in it."""
    counts = np.minimum(np.bincount(token_ids[num_prompt:], minlength=vocab_size), MAX_COUNT).astype(np.int16)
    counts[token_ids[:num_prompt]] |= np.int16(IN_PROMPT)
    return counts
