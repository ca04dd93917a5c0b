"""Steps on a cache of several kinds of blocks: the bits of one kind, from blocks that are freed behind windows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout.kv_layout import KVKind, KVLayout
from millrace.kernels.native import build
from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import CacheDType, NativeHeads, NativeNorm, NativeShape
from millrace.kernels.native.slot_step import SlotStep
from tests.kernels.native.test_native import AVAILABLE, error, tokens
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

WINDOWS = (40, None, 7, 40, None)  # of layers: of three kinds
GONE = -1  # in tables: a block that is not there


def layout_of(shape: NativeShape, block_size: int, num_bytes: int, dtype: CacheDType) -> KVLayout:
    """Of all layers of one window, which have heads of one size, one kind, the full one first."""
    windows = [layer.window for layer in shape.layers]
    kinds = []
    for window in sorted(set(windows), key=lambda window: (window is not None, -(window or 0))):
        layers = tuple(i for i, each in enumerate(windows) if each == window)
        name: Any = "full" if window is None else "window"
        heads = shape.heads_of(shape.layers[layers[0]])
        sizes = (heads.num_kv_heads, heads.head_dim, heads.head_dim)
        kinds.append(KVKind(name, layers, window, *sizes, len(layers) * heads.block_bytes(block_size, dtype)))
    return KVLayout.of(kinds, block_size, num_bytes)


class KindRun:
    """Sequences in blocks of several kinds. What no later query sees is freed at once, and then holds NaN."""

    def __init__(self, model: NativeModel, block_size: int, num_bytes: int = 2_000_000) -> None:
        self.model, dtype = model, model.cache_dtype
        self.layout = layout_of(model.shape, block_size, num_bytes, dtype)
        self.cache = NativeCache(model.shape, self.layout, dtype)
        self.nan: Any = np.nan if dtype == "float32" else 0x7FC0 if dtype == "bfloat16" else -1
        self.cache.memory[:] = self.nan
        self._slabs = np.random.default_rng(2).permutation(self.layout.num_slabs).tolist()
        self._free: list[list[int]] = [[] for _ in self.layout.kinds]
        self.tables: dict[int, list[list[int]]] = {}  # by sequence, of each kind
        self.lengths: dict[int, int] = {}
        self.num_freed = 0

    def take(self, kind: int) -> int:
        """A free block of a kind, of a slab that is lent to it if there is none."""
        if not self._free[kind]:
            first = self._slabs.pop() * (size := self.layout.blocks_per_slab[kind])
            self._free[kind] = list(range(first, first + size))
        return self._free[kind].pop(len(self._free[kind]) // 2)

    def place(self, sequence: int, count: int) -> None:
        """Blocks for `count` further tokens."""
        tables = self.tables.setdefault(sequence, [[] for _ in self.layout.kinds])
        end = self.lengths[sequence] = self.lengths.get(sequence, 0) + count
        for kind, table in enumerate(tables):
            while len(table) * self.layout.block_size < end:
                table.append(self.take(kind))

    def free(self, sequence: int) -> None:
        """Frees what the next query does not see."""
        length = self.lengths[sequence]
        for kind, table in enumerate(self.tables[sequence]):
            window = self.layout.kinds[kind].window or length + 1
            for place in range(max(0, length - window + 1) // self.layout.block_size):
                if table[place] != GONE:
                    self.cache.data_of[kind][self.cache.at(table[place], kind)] = self.nan
                    self._free[kind].append(table[place])
                    table[place] = GONE
                    self.num_freed += 1

    def table(self, sequences: list[int], width: int) -> Array:
        """[K, S, width]"""
        found = np.full((len(self.layout.kinds), len(sequences), width), GONE, np.int32)
        for row, sequence in enumerate(sequences):
            for kind, table in enumerate(self.tables[sequence]):
                found[kind, row, : len(table)] = table
        return found

    def step(self, parts: dict[int, list[int]]) -> dict[int, Array]:
        """The next tokens of each sequence. Returns all their logits."""
        starts = [self.lengths.get(sequence, 0) for sequence in parts]
        for sequence, ids in parts.items():
            self.place(sequence, len(ids))
        positions = [np.arange(start, self.lengths[each]) for start, each in zip(starts, parts, strict=True)]
        size = self.layout.block_size
        tables = self.table(list(parts), max(-(-self.lengths[each] // size) for each in parts))
        mapping = np.concatenate(
            [tables[:, row, at // size] * size + at % size for row, at in enumerate(positions)], axis=1
        )
        ends = np.cumsum([len(ids) for ids in parts.values()])
        logits = np.empty((ends[-1], self.model.shape.vocab_size), np.float32)
        self.model.step(
            self.cache,
            input_ids=np.concatenate([np.array(ids, np.int64) for ids in parts.values()]),
            positions=np.concatenate(positions),
            slot_mapping=np.ascontiguousarray(mapping, np.int64),
            block_tables=tables,
            query_starts=np.array([0, *ends], np.int32),
            lengths=np.array([self.lengths[each] for each in parts], np.int32),
            logits_rows=np.arange(ends[-1]),
            logits=logits,
        )
        for sequence in parts:
            self.free(sequence)
        return dict(zip(parts, np.split(logits, ends[:-1]), strict=True))


def load(dtype: Any, **settings: Any) -> NativeModel:
    made = Checkpoint.random(num_layers=len(WINDOWS), sliding_windows=WINDOWS)
    return made.load(dtype, num_threads=2, worth_a_thread=1, **settings)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_two_sizes_give_the_logits_of_float64_in_any_pieces(dtype: Any, block_size: int) -> None:
    made = Checkpoint.random(num_layers=3, sliding_windows=(40, None, 40), has_qk_norm=True, rotary_dims=(32, 50))
    full = {"heads": NativeHeads(num_heads=5, num_kv_heads=1, head_dim=50), "is_k_v": True, "v_norm": NativeNorm()}
    layers = made.shape.layers
    shape = replace(made.shape, layers=(layers[0], replace(layers[1], rope=1, **full), layers[2]))
    made = Checkpoint.random(shape=shape)
    model = made.load(dtype, num_threads=2, worth_a_thread=1)
    prompt = tokens(300)
    whole = KindRun(model, block_size).step({0: prompt})[0]
    assert error(whole, made.logits(prompt)) < {"float32": 3e-6, "bfloat16": 0.02}[dtype]
    run, rows = KindRun(made.load(dtype, num_threads=1), block_size), []
    for first, end in itertools.pairwise([0, 1, 100, 117, *range(118, 130), 300]):
        rows.append(run.step({1: prompt[first % 7 :][:3], 0: prompt[first:end]})[0])
    assert np.array_equal(np.concatenate(rows), whole)


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize(
    ("dtype", "settings"), [("float32", {}), ("bfloat16", {}), ("bfloat16", {"cache_dtype": "int8"})]
)
def test_logits_are_those_of_one_kind_with_a_part_of_the_blocks(
    dtype: Any, settings: dict[str, Any], block_size: int
) -> None:
    model = load(dtype, **settings)
    one, several = Run(model, block_size), KindRun(model, block_size)
    assert len(several.layout.kinds) == 3 and several.layout.kinds[0].window is None
    first, second = tokens(330), tokens(70, seed=3)
    parts = [{0: first[:100]}, {0: first[100:101], 1: second[:33]}, {1: second[33:], 0: first[101:320]}]
    parts += [{0: [first[320 + i]], 1: [7 * i]} for i in range(5)]
    for part in parts:
        expected, found = one.step(part), several.step(part)
        for sequence in part:
            assert np.array_equal(found[sequence], expected[sequence])
    assert several.num_freed > 2 * 250 // block_size


def test_decoding_from_slots_reads_the_tables_of_all_kinds() -> None:
    model = load("bfloat16")
    one, several = Run(model), KindRun(model, 16)
    columns: dict[str, Any] = {"last_tokens": np.zeros(3, np.int64), "num_known": np.zeros(3, np.int64)}
    tables = np.full((3, 3, 20), GONE, np.int32)
    slots = SlotStep(model, several.cache, tables=tables, **columns)
    for sequence, length in ((0, 90), (2, 17)):
        prompt = tokens(length, seed=sequence)
        one.step({sequence: prompt})
        several.step({sequence: prompt})
    for i in range(40):
        expected = one.step({0: [i], 2: [i + 1]})
        columns["last_tokens"][[0, 2]] = i, i + 1
        starts = np.array([several.lengths[0], several.lengths[2]], np.int32)
        for sequence in (0, 2):
            several.place(sequence, 1)
        tables[:, [0, 2]] = several.table([0, 2], 20)
        logits = slots.step(np.array([0, 2]), starts)
        assert logits is not None and np.array_equal(logits, np.concatenate([expected[0], expected[2]]))
        for sequence in (0, 2):
            several.free(sequence)
    assert several.num_freed > 2 * 90 // 16


def test_a_block_is_missed_from_the_first_that_a_query_sees() -> None:
    run = KindRun(load("float32"), 4)
    run.step({0: tokens(60)})
    tables = run.tables[0]
    seen = [(60 - (run.layout.kinds[kind].window or 61) + 1) // 4 for kind in (1, 2)]
    assert [table.count(GONE) for table in tables] == [0, *seen]
    for kind, place in itertools.chain([(0, 0)], zip((1, 2), seen, strict=True)):
        kept, tables[kind][place] = tables[kind][place], GONE
        run.lengths[0] = 60
        with pytest.raises(ValueError, match="a block table has a block id outside the cache"):
            run.step({0: [1]})
        tables[kind][place] = kept
    run.lengths[0] = 60
    run.step({0: [1]})


def test_blocks_of_a_kind_are_copied_alone_and_come_back_from_the_host() -> None:
    model = load("bfloat16")
    run, other = KindRun(model, 16), KindRun(model, 16)
    for each in (run, other):
        each.step({0: tokens(90)})
    expected = other.step({0: tokens(30, seed=5)})
    for kind, table in enumerate(run.tables[0]):
        blocks = np.array([block for block in table if block != GONE], np.int64)
        host = run.cache.make_host_blocks(len(blocks) + 1, kind)
        run.cache.copy_out(blocks, host, np.arange(1, len(blocks) + 1), kind)
        run.cache.data_of[kind][run.cache.at(blocks, kind)] = run.nan
        moved = np.array([run.take(kind) for _ in blocks])
        run.cache.copy_in(host, np.arange(1, len(blocks) + 1), moved, kind)
        forked = np.array([run.take(kind) for _ in blocks])
        run.cache.copy_blocks(moved, forked, kind)
        table[len(table) - len(blocks) :] = forked.tolist()
    assert np.array_equal(run.step({0: tokens(30, seed=5)})[0], expected[0])
