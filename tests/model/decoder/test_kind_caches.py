"""Steps of the torch decoder on a cache of several kinds of blocks, which are freed behind windows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.kernels import kernel_set
from millrace.kernels.layout.kv_layout import KVLayout
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.step_inputs import KindTables, StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.model.kv_kinds import kv_layout
from tests.model.stepping import greedy

BLOCK_SIZE = 4
GONE = 1 << 20  # in tables: a block that is not there
CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 9,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
}


SHARED = {  # the last two layers read the caches of the second and third
    **CONFIG,
    "model_type": "gemma4_text",
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "per_layer_config": {},
}


@pytest.fixture(scope="module", params=[CONFIG, SHARED], ids=["gemma3", "gemma4"])
def decoder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Decoder:
    folder = tmp_path_factory.mktemp("gemma")
    (folder / "config.json").write_text(json.dumps(request.param))
    spec = read_spec(Path(folder))
    weights = load_weights(folder, spec, torch.device("cpu"), torch.float32, "dummy")
    return Decoder(spec, weights, kernel_set.load("torch"))


def layout_of(decoder: Decoder, num_bytes: int) -> KVLayout:
    per_layer = KVCache.bytes_per_block(decoder.spec, BLOCK_SIZE, torch.float32) // len(decoder.spec.kv_layers)
    return kv_layout(decoder.spec, BLOCK_SIZE, num_bytes, lambda _: per_layer)


class KindSequences:
    """As `greedy`: freed blocks hold 1e30, and tables name no block before a window."""

    def __init__(self, decoder: Decoder, prompts: list[list[int]]) -> None:
        self.decoder, self.layout = decoder, layout_of(decoder, 150_000)
        sizes = (self.layout.num_blocks[0], BLOCK_SIZE, torch.float32, decoder.device)
        self.cache = KVCache(decoder.spec, *sizes, layout=self.layout)
        self.slabs = np.random.default_rng(1).permutation(self.layout.num_slabs).tolist()
        self.free: list[list[int]] = [[] for _ in self.layout.kinds]
        self.tokens = [list(prompt) for prompt in prompts]
        self.lengths = [0] * len(prompts)
        self.tables: list[list[list[int]]] = [[[] for _ in prompts] for _ in self.layout.kinds]

    def take(self, kind: int) -> int:
        if not self.free[kind]:
            size = self.layout.blocks_per_slab[kind]
            first = self.slabs.pop() * size
            self.free[kind] = list(range(first, first + size))
        return self.free[kind].pop()

    def step(self, chunk: int) -> None:
        rows = sorted(range(len(self.tokens)), key=lambda row: self.count(row, chunk) != 1)
        counts = [self.count(row, chunk) for row in rows]
        ends = np.cumsum(counts)
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
            for kind, tables in enumerate(self.tables):
                while len(tables[row]) * BLOCK_SIZE < self.lengths[row]:
                    tables[row].append(self.take(kind))
        places = [
            np.arange(self.lengths[row] - count, self.lengths[row]) for row, count in zip(rows, counts, strict=True)
        ]
        kinds = [self.kind_tables(kind, rows, places) for kind in range(len(self.tables))]
        inputs = StepInputs(
            input_ids=torch.tensor([self.tokens[row][i] for row, at in zip(rows, places, strict=True) for i in at]),
            positions=torch.from_numpy(np.concatenate(places)),
            slot_mapping=kinds[0].slot_mapping,
            block_tables=kinds[0].block_tables,
            query_starts=torch.tensor([0, *ends], dtype=torch.int32),
            lengths=torch.tensor([self.lengths[row] for row in rows], dtype=torch.int32),
            logits_rows=torch.from_numpy(ends - 1),
            num_decode=counts.count(1),
            more_kinds=tuple(kinds[1:]),
        )
        logits = self.decoder.forward(inputs, self.cache)
        for row, likeliest in zip(rows, logits.argmax(1).tolist(), strict=True):
            if self.lengths[row] == len(self.tokens[row]):
                self.tokens[row].append(likeliest)
            self.give_back(row)

    def count(self, row: int, chunk: int) -> int:
        return min(chunk, len(self.tokens[row]) - self.lengths[row])

    def kind_tables(self, kind: int, rows: list[int], places: list[np.ndarray]) -> KindTables[torch.Tensor]:  # type: ignore[type-arg]
        width = max(len(self.tables[kind][row]) for row in rows)
        tables = np.full((len(rows), width), GONE, np.int32)
        for i, row in enumerate(rows):
            tables[i, : len(self.tables[kind][row])] = self.tables[kind][row]
        slots = [
            tables[i, at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE for i, at in enumerate(places)
        ]
        return KindTables(torch.from_numpy(np.concatenate(slots)), torch.from_numpy(tables))

    def give_back(self, row: int) -> None:
        for kind, tables in enumerate(self.tables):
            window = self.layout.kinds[kind].window
            for place in range(0 if window is None else max(0, self.lengths[row] - window + 1) // BLOCK_SIZE):
                if tables[row][place] != GONE:
                    self.cache.data_of[kind][tables[row][place]] = 1e30
                    self.free[kind].append(tables[row][place])
                    tables[row][place] = GONE


@pytest.mark.parametrize("chunk", [7, 1000])
def test_answers_are_those_of_one_kind_though_blocks_behind_windows_are_gone(decoder: Decoder, chunk: int) -> None:
    prompts = [[(7 * i + 3) % 97 for i in range(count)] for count in (1, 9, 40)]
    expected = greedy(decoder, prompts, 16, BLOCK_SIZE, chunk)
    found = KindSequences(decoder, prompts)
    while len(found.tokens[2]) < 56:
        found.step(chunk)
    for sequence, tokens in zip(expected, found.tokens, strict=True):
        assert tokens[: len(sequence.tokens)] == sequence.tokens
    assert sum(table.count(GONE) for table in found.tables[1]) >= 17


def test_a_copied_block_is_that_of_its_kind_and_no_other_changes(decoder: Decoder) -> None:
    layout = layout_of(decoder, 60_000)
    cache = KVCache(decoder.spec, layout.num_blocks[0], BLOCK_SIZE, torch.float32, decoder.device, layout=layout)
    generator = torch.Generator().manual_seed(4)
    for data in cache.data_of:
        data.copy_(torch.randn(data.shape, generator=generator))
    for kind, last in enumerate(count - 1 for count in layout.num_blocks):
        memory = cache.data_of[1 - kind].clone()
        host = cache.make_host_blocks(3, kind)
        block = cache.data_of[kind][1].clone()
        cache.copy_out(np.array([1]), host, np.array([2]), kind)
        cache.copy_in(host, np.array([2]), np.array([last]), kind)
        assert torch.equal(cache.data_of[kind][last], block)
        cache.copy_blocks(np.array([0]), np.array([last]), kind)
        assert torch.equal(cache.data_of[kind][last], cache.data_of[kind][0])
        is_same = (cache.data_of[1 - kind] == memory).flatten(1).all(1)
        ratio = layout.blocks_per_slab[1 - kind]
        assert is_same[: (layout.num_slabs - 1) * ratio].all()
