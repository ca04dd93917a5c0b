"""The inputs of one decoder step, besides weights and cache."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

Array = TypeVar("Array", bound=Sized)  # tensors, or numpy arrays for a model that runs without torch


@dataclass(frozen=True, slots=True, eq=False)
class KindTables(Generic[Array]):
    """Where the step's sequences lie in blocks of one kind: see `KVLayout`. As in `StepInputs`."""

    slot_mapping: Array  # [T] i64
    block_tables: Array  # [S, M] i32; what lies before the window of a sequence's first new token is not valid


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
    more_kinds: tuple[KindTables[Array], ...] = ()  # of blocks after the first, which the fields above have
    slots: Array | None = None  # [S] i64, of each sequence's recurrent state; None: no layer has one

    @property
    def is_decode(self) -> bool:
        return self.num_decode == len(self.lengths) == len(self.input_ids)

    def tables_of(self, kind: int) -> tuple[Array, Array]:
        """Slot mapping [T] and block tables [S, M] of a kind of blocks."""
        if kind == 0:
            return self.slot_mapping, self.block_tables
        more = self.more_kinds[kind - 1]
        return more.slot_mapping, more.block_tables
