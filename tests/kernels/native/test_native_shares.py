"""How a step's attention is shared among threads: whichever thread sees which chunk of keys, and whether chunks leave
their results behind or are put together at once, no bit changes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, Ints, Longs
from millrace.kernels.native.thread_throttle import ThreadThrottle
from tests.counts import FULL
from tests.kernels.native.test_native import AVAILABLE, DTYPES, SETS, tokens
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

# Of one token: 2 rows that share keys; 7; and 18, which are more than are seen together.
MODELS: dict[str, dict[str, Any]] = {
    "heads of 80": {"head_dim": 80, "rotary_dim": 80, "num_heads": 4, "hidden_size": 90},
    "heads of 96, a window": {
        "head_dim": 96,
        "rotary_dim": 24,
        "num_heads": 7,
        "num_kv_heads": 1,
        "sliding_windows": (300, None),
    },
    "18 heads a key": {"head_dim": 18, "rotary_dim": 18, "num_heads": 18, "num_kv_heads": 1},
}
NUM_KNOWN = 800  # tokens in the cache: four chunks of keys


class Still(ThreadThrottle):
    """Leaves all threads where they are, whatever else the machine does."""

    def note(self, shares: Longs) -> bool:
        return False


@cache
def checkpoint(name: str) -> Checkpoint:
    return Checkpoint.random(**MODELS[name])


@dataclass
class Forks:
    """Sequences that have the beginning of one prompt in common, and so its blocks; each goes on by itself."""

    model: NativeModel
    block_size: int
    starts: list[int]  # of each sequence: how many tokens of the prompt it has
    counts: list[int]  # and how many of its own are computed

    def __post_init__(self) -> None:
        self.own_blocks = [-(-(start % self.block_size + count) // self.block_size) for start, count in self._sizes]
        num_shared = -(-NUM_KNOWN // self.block_size)
        self.run = Run(self.model, self.block_size, num_blocks=num_shared + sum(self.own_blocks))
        self.run.step({0: tokens(NUM_KNOWN)})
        self.shared = self.run._tables[0]
        free = iter(self.run._free)
        self.tables = []
        for (start, _), num in zip(self._sizes, self.own_blocks, strict=True):
            own, num_whole = [next(free) for _ in range(num)], start // self.block_size
            if start % self.block_size:
                self.run.cache.copy_blocks(np.array([self.shared[num_whole]]), np.array(own[:1]))
            self.tables.append(self.shared[:num_whole] + own)

    @property
    def _sizes(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, self.counts, strict=True))

    def logits(self, model: NativeModel, chosen: list[int]) -> Array:
        """[T, V] of the chosen sequences' own tokens, computed in one step of `model`."""
        counts = [self.counts[i] for i in chosen]
        places = [np.arange(self.starts[i], self.starts[i] + self.counts[i]) for i in chosen]
        slots = [
            np.array(self.tables[i])[at // self.block_size] * self.block_size + at % self.block_size
            for i, at in zip(chosen, places, strict=True)
        ]
        tables: Ints = np.zeros((len(chosen), max(len(self.tables[i]) for i in chosen)), np.int32)
        for row, i in enumerate(chosen):
            tables[row, : len(self.tables[i])] = self.tables[i]
        found = np.empty((sum(counts), model.shape.vocab_size), np.float32)
        model.step(
            self.run.cache,
            input_ids=np.concatenate([np.array(tokens(self.counts[i], seed=i + 1), np.int64) for i in chosen]),
            positions=np.concatenate(places),
            slot_mapping=np.concatenate(slots),
            block_tables=tables,
            query_starts=np.cumsum([0, *counts], dtype=np.int32),
            lengths=np.array([self.starts[i] + self.counts[i] for i in chosen], np.int32),
            logits_rows=np.arange(sum(counts)),
            logits=found,
        )
        return found


def check(
    name: str, batches: list[int], starts: list[int], counts: list[int], block_size: int = 16, **settings: Any
) -> None:
    """The first so many of the sequences, in one step of 1 to 8 threads, have the logits of each alone on one."""

    def load(num_threads: int) -> NativeModel:
        neighbours = Still(num_threads)
        return checkpoint(name).load(num_threads=num_threads, worth_a_thread=1, thread_throttle=neighbours, **settings)

    models = {num_threads: load(num_threads) for num_threads in (range(1, 9) if FULL else (1, 2, 3, 5, 8))}
    forks = Forks(models[1], block_size, starts, counts)
    alone = [forks.logits(models[1], [i]) for i in range(len(starts))]
    for size in batches:
        expected = np.concatenate(alone[:size])
        for num_threads, model in models.items():
            found = forks.logits(model, list(range(size)))
            assert np.array_equal(found, expected), f"{size} sequences on {num_threads} threads"


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_few_and_many_decoding_sequences_have_the_bits_of_each_alone_on_any_number_of_threads(
    instruction_set: str, dtype: DType, cache_dtype: str | None
) -> None:
    """What the chunks of 5 and of 20 sequences leave behind is under 1 MiB, so they are seen in the order of memory;
    that of 200, of which each has 4 chunks of 2 kB (AVX2), 3.9 (AVX-512) or 5.2 (AMX) in the mean, is not."""
    draw = random.Random(8)
    starts = [0, 255, 256, 257, 799, *(draw.randrange(NUM_KNOWN) for _ in range(195))]
    batches, settings = [1, 2, 5, 20, 200], {"instruction_set": instruction_set, "cache_dtype": cache_dtype}
    check("heads of 80", batches, starts, [1] * len(starts), dtype=dtype, **settings)


@pytest.mark.parametrize("block_size", [4, 16, 48])
@pytest.mark.parametrize("name", list(MODELS)[1:])
@pytest.mark.parametrize("instruction_set", SETS)
def test_prompts_beside_decoding_sequences_have_the_bits_of_each_alone_on_any_number_of_threads(
    instruction_set: str, name: str, block_size: int
) -> None:
    """Pieces of 1 to 13 tokens, on both sides of the ends of chunks, and some cost much more than others."""
    starts, counts = [799, 250, 0, 511, 3, 300, 640], [1, 13, 1, 2, 5, 1, 4]
    check(name, [1, 2, 3, 7], starts, counts, block_size, dtype="bfloat16", instruction_set=instruction_set)


def test_more_threads_than_chunks_leave_some_without_any() -> None:
    """One sequence with one key and one head of keys, and up to eight threads."""
    check("18 heads a key", [1], [0], [1], dtype="float32")


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize("name", list(MODELS))
def test_whenever_threads_come_to_a_step_its_bits_are_those_of_one_thread(name: str, num_threads: int) -> None:
    """From each phase on, of two layers; and not before all is over. Few sequences are split, many not."""
    starts, counts = [799, 250, 0, 511, 3, 300, 640], [1, 13, 1, 2, 5, 1, 4]
    alone, model = (
        checkpoint(name).load("bfloat16", num_threads=number, worth_a_thread=1, thread_throttle=Still(number))
        for number in (1, num_threads)
    )
    forks = Forks(alone, 16, starts, counts)
    hidden = np.random.default_rng(1).standard_normal((5, alone.shape.hidden_size)).astype(np.float32)
    wanted_logits = alone.logits(hidden)
    batches = [[0], [0, 2, 5], list(range(7))]
    wanted = [forks.logits(alone, chosen) for chosen in batches]
    for lateness in (*range(27), 1000, -1):  # -1: when they will
        model._library.millrace_set_join_delay(model._model, lateness)
        for chosen, expected in zip(batches, wanted, strict=True):
            found = forks.logits(model, chosen)
            assert np.array_equal(found, expected), f"sequences {chosen}, threads come {lateness} phases late"
        assert np.array_equal(model.logits(hidden), wanted_logits), f"the head, {lateness} phases late"
