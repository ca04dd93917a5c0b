"""A slot's sampling parameters as the sampling kernels read them: one row of 16 i32 numbers, 64 bytes.

The host packs a row when a sequence starts; it stays on the device while the sequence runs. Floats are stored by their
bits. `choose`, `choose_truncated` and `score` read only the first six numbers, so any table that holds those will do.
numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH = 16

SEED_LOW, SEED_HIGH = 0, 1
TEMPERATURE = 2  # f32; 0 = greedy
TOP_K = 3  # 0 = off
TOP_P = 4  # f32; 1 = off
MIN_P = 5  # f32; 0 = off
REPETITION, FREQUENCY, PRESENCE = 6, 7, 8  # f32 penalties; 1, 0, 0 = off
NUM_BIASED = 9  # ids in the slot's list of biased tokens
NUM_ENDS = 10  # ids in the slot's list of tokens that may not be chosen before END_POSITION
END_POSITION = 11  # absolute position from which they may be chosen

MAX_COUNT = 0x7FFF  # the count of a token stops here
IN_PROMPT = -0x8000  # the remaining bit of a count: the token occurs in the prompt


def pack(
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    num_biased: int = 0,
    num_ends: int = 0,
    end_position: int = 0,
) -> NDArray[np.int32]:
    """The row of a slot, [WIDTH] i32. `seed` is taken modulo 2 ** 64. The defaults disable each parameter."""
    row = np.zeros(WIDTH, np.int32)
    row[[TOP_K, NUM_BIASED, NUM_ENDS, END_POSITION]] = max(top_k, 0), num_biased, num_ends, end_position
    row[[SEED_LOW, SEED_HIGH]] = np.array([seed % 2**64], np.uint64).view(np.int32)
    floats = row.view(np.float32)
    floats[[TEMPERATURE, TOP_P, MIN_P]] = temperature, top_p, min_p
    floats[[REPETITION, FREQUENCY, PRESENCE]] = repetition, frequency, presence
    return row


def count(token_ids: NDArray[np.int32], num_prompt: int, vocab_size: int) -> NDArray[np.int16]:
    """Token counts [V] i16 of a sequence that starts: occurrences after the prompt, and IN_PROMPT for those in it."""
    counts = np.minimum(np.bincount(token_ids[num_prompt:], minlength=vocab_size), MAX_COUNT).astype(np.int16)
    counts[token_ids[:num_prompt]] |= np.int16(IN_PROMPT)
    return counts
