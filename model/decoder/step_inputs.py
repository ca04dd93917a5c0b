"""The inputs of one decoder step, besides weights and cache."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

Array = TypeVar("Array", bound=Sized)  # tensors, or numpy arrays for a model that runs without torch


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs(Generic[Array]):
    """The T new tokens of S sequences, one sequence after another, and the L of them that need logits.

    All arrays are on the decoder's device. The first `num_decode` sequences have exactly one new token each. If all do
    (num_decode == S == T), the step uses the decode kernel, otherwise the kernel for mixed lengths.
    """

    input_ids: Array  # [T] i64
    # [T] i64, from 0 in each sequence; from `short_length` in one with the rotary factors of long sequences (`rope.py`)
    positions: Array
    slot_mapping: Array  # [T] i64, each token's place in the cache, block * block_size + offset; -1 = none
    block_tables: Array  # [S, M] i32, block ids in token order
    query_starts: Array  # [S + 1] i32, sequence s has the new tokens [query_starts[s], query_starts[s + 1])
    lengths: Array  # [S] i32, tokens in the cache, the new ones included
    logits_rows: Array  # [L] i64, which of the T tokens
    num_decode: int

    @property
    def is_decode(self) -> bool:
        return self.num_decode == len(self.lengths) == len(self.input_ids)
