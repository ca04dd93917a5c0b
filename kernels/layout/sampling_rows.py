"""What a slot asked of the sampler, as the sampling kernels read it: one row of 16 int32 numbers, 64 bytes, a slot.

A row is packed on the host when a sequence starts, and stays on the device while it runs. Floats are kept by their
bits. Kernels that only choose read the first six numbers, wherever rows of those lie. Plain numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH = 16

SEED_LOW, SEED_HIGH = 0, 1
TEMPERATURE = 2  # f32; 0 = the likeliest
TOP_K = 3  # 0 = off
TOP_P = 4  # f32; 1 = off
MIN_P = 5  # f32; 0 = off
REPETITION, FREQUENCY, PRESENCE = 6, 7, 8  # f32 penalties; 1, 0, 0 = off
NUM_BIASED = 9  # entries of the slot's lists of biased ids
NUM_ENDS = 10  # ids in the slot's list of those that may not be chosen yet
END_POSITION = 11  # absolute position of the first token that may be one of them

MAX_COUNT = 0x7FFF  # a count of one token goes no further
IN_PROMPT = -0x8000  # the other bit of a count: the token stands in the prompt


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
    """[16] the row of a slot. `seed` is taken modulo 2 ** 64."""
    row = np.zeros(WIDTH, np.int32)
    row[[TOP_K, NUM_BIASED, NUM_ENDS, END_POSITION]] = max(top_k, 0), num_biased, num_ends, end_position
    row[[SEED_LOW, SEED_HIGH]] = np.array([seed % 2**64], np.uint64).view(np.int32)
    floats = row.view(np.float32)
    floats[[TEMPERATURE, TOP_P, MIN_P]] = temperature, top_p, min_p
    floats[[REPETITION, FREQUENCY, PRESENCE]] = repetition, frequency, presence
    return row


def count(token_ids: NDArray[np.int32], num_prompt: int, vocab_size: int) -> NDArray[np.int16]:
    """[V] counts of a sequence that starts: of each token, how often it stands behind the prompt, and if in the prompt,
    too."""
    counts = np.minimum(np.bincount(token_ids[num_prompt:], minlength=vocab_size), MAX_COUNT).astype(np.int16)
    counts[token_ids[:num_prompt]] |= np.int16(IN_PROMPT)
    return counts
