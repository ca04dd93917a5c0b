"""Layers whose heads have two sizes, in the largest step and in the memory that is planned for them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from millrace.kernels import kernel_set
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.stages.backends.memory_needs import layouts
from millrace.stages.backends.torch.fitted_runner import largest_step
from millrace.stages.config import EngineConfig

CONFIG = {
    "model_type": "gemma4_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 9,
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 0,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
}
ENGINE = EngineConfig(block_size=4, max_num_batched_tokens=50, max_num_seqs=3)


def decoder_in(folder: Path) -> Decoder:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec = read_spec(folder)
    weights = load_weights(folder, spec, torch.device("cpu"), torch.float32, "dummy")
    return Decoder(spec, weights, kernel_set.load("torch"), 64)


def test_a_block_of_each_kind_has_the_bytes_of_its_own_heads(tmp_path: Path) -> None:
    shape = decoder_in(tmp_path).spec
    by_block = KVCache.bytes_per_block(shape, 4, torch.float32)
    assert by_block == 4 * 4 * (3 * 2 * 2 * 8 + 2 * 24)  # the last layer has none
    for length in (8, 64):  # however short sequences are, as only one kind keeps all
        layout = layouts(ENGINE, shape, by_block, runs_kinds=True)(100_000, length)
        assert layout is not None
        found = [(kind.window, kind.num_kv_heads, kind.key_dim, kind.layers) for kind in layout.kinds]
        assert found == [(None, 1, 24, (2,)), (9, 2, 8, (0, 1, 3))]
        assert [kind.block_bytes for kind in layout.kinds] == [4 * 4 * 2 * 24, 4 * 4 * 3 * 2 * 2 * 8]
        assert layout.place[4] == layout.place[2] == (0, 0)


def test_the_largest_step_runs_on_a_cache_of_both_sizes(tmp_path: Path) -> None:
    decoder = decoder_in(tmp_path)
    runner, grant = largest_step(ENGINE, decoder.spec, decoder, 40)
    assert grant.num_tokens.tolist() == [39, 11] and len(grant.more_tables) == 1
    assert runner.cache.blocks_of_kinds[0] >= len(grant.table_blocks)
    runner.forward(grant)
    runner.wait()
