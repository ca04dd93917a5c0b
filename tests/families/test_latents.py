"""Models whose cache keeps latents: their logits, the bytes of the cache, and settings that do not go with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.model.decoder.kv_cache import KVCache
from millrace.model.errors import CheckpointError, ModelError
from millrace.model.families.registry import parse_config, read_spec
from millrace.model.kv_kinds import kv_kinds
from millrace.model.sharding.shard import why_not_cut
from millrace.model.spec import DecoderSpec
from millrace.stages import LLM
from millrace.stages.errors import ConfigError
from tests.families.ways import BLOCK_SIZE
from tests.families.zoo import Entry, Zoo, chosen
from tests.model.stepping import greedy, load_decoder

NUM_NEW, LENGTHS = 5, (5, 41)
SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "block_size": BLOCK_SIZE, "max_model_len": 64}
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"), NUM_NEW, LENGTHS)


@pytest.fixture(scope="module")
def entry(zoo: Zoo) -> Entry:
    return zoo.entry(row_of("minicpm3"))


def row_of(name: str) -> Any:
    return next(row for row in chosen([name]) if row.name == name)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", ["minicpm3-bias", "deepseek-v2", "deepseek-v3"])
def test_logits_are_those_of_the_expanded_form(name: str, chunk: int | None, zoo: Zoo) -> None:
    entry = zoo.entry(row_of(name))
    sequences = greedy(load_decoder(entry.folder), [one.prompt for one in entry.answers], NUM_NEW, BLOCK_SIZE, chunk)
    for sequence, answer in zip(sequences, entry.answers, strict=True):
        torch.testing.assert_close(torch.stack(sequence.logits), answer.logits, rtol=1e-4, atol=1e-4)


def expanded_bytes(spec: DecoderSpec, item_size: int) -> int:
    """Bytes of a token if the cache kept the keys and values of all heads."""
    return sum(
        item_size * latent.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim) for latent in spec.latents
    )


def test_a_cache_of_v2_lite_holds_8_9_times_the_tokens() -> None:
    spec = parse_config(V2_LITE, "config.json")
    each = KVCache.bytes_per_block(spec, 16, torch.bfloat16)
    assert each == 16 * 27 * 576 * 2
    assert expanded_bytes(spec, 2) * 16 / each == pytest.approx(8.9, abs=0.02)


def test_scores_of_v2_lite_have_the_square_of_the_sharpness_of_yarn() -> None:
    spec = parse_config(V2_LITE, "config.json")
    assert spec.latents[0].scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)
    assert spec.ropes[0].attention_factor == 1.0


def test_the_cache_is_of_one_kind_with_one_head_of_latents(entry: Entry) -> None:
    spec = read_spec(entry.folder)
    (kind,) = kv_kinds(spec, lambda _: 4 * BLOCK_SIZE * 20)
    assert (kind.name, kind.num_kv_heads, kind.key_dim, kind.value_dim) == ("latent", 1, 20, 16)
    assert kind.block_bytes == KVCache.bytes_per_block(spec, BLOCK_SIZE, torch.float32)


@pytest.mark.parametrize(("backend", "numbers"), [("torch", 20), ("native", 32)])
def test_the_memory_table_counts_latents(backend: Any, numbers: int, entry: Entry) -> None:
    """The native library pads 20 numbers to 32."""
    settings = {**SETTINGS, "attention_backend": backend}
    with LLM(str(entry.folder), dtype="float32", num_gpu_blocks=16, **settings) as llm:
        memory = llm.info.memory
        assert memory is not None and memory.row("kv_cache").num_bytes == 16 * BLOCK_SIZE * 3 * numbers * 4


def test_blocks_move_to_the_host_and_back(entry: Entry) -> None:
    spec = read_spec(entry.folder)
    for is_block_major in (False, True):
        cache = KVCache(spec, 3, BLOCK_SIZE, torch.float32, torch.device("cpu"), is_block_major=is_block_major)
        keys, values = cache.layer(2)
        assert keys.data_ptr() == values.data_ptr() and keys.shape == (3, 1, BLOCK_SIZE, 20)
        keys[1] = torch.arange(BLOCK_SIZE * 20.0).view(1, BLOCK_SIZE, 20)
        host = cache.make_host_blocks(2)
        host.zero_()
        cache.copy_out(ids(1), host, ids(0))
        cache.copy_in(host, ids(0), ids(2))
        cache.copy_blocks(ids(2), ids(0))
        assert torch.equal(keys[0], keys[1]) and torch.equal(keys[2], keys[1])


def ids(block: int) -> Any:
    return torch.tensor([block]).numpy()


REFUSED = [
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype = fp8: is not supported for model = .*minicpm3.* keeps latents"),
    ({"kv_cache_dtype": "int8"}, "kv_cache_dtype = int8: is not supported for model = .* keeps latents"),
    ({"enable_lora": True}, "enable_lora = True: is not supported for model = .* keeps latents"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size = 2: minicpm3 keeps latents of all heads together"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda value: next(iter(value), "") if value else "")
def test_what_latents_do_not_go_with_is_refused(entry: Entry, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(entry.folder), **SETTINGS, **settings)


def test_ranks_do_not_share_latents(entry: Entry) -> None:
    assert "keeps latents" in (why_not_cut(read_spec(entry.folder), 2) or "")


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"norm_topk_prob": True}, "norm_topk_prob: True is not supported; supported: False"),
    ({"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid' is not supported; supported: 'softmax'"),
    ({"attention_bias": True}, "attention_bias: true beside q_lora_rank = null"),
    ({"num_key_value_heads": 4}, "num_key_value_heads: 4 is not supported; supported: 16"),
    ({"topk_method": "best"}, "topk_method: 'best' is not supported; supported: greedy, group_limited_greedy"),
    ({"topk_method": "group_limited_greedy"}, "n_group: is missing"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda value: next(iter(value)) if value else "")
def test_keys_of_another_computation_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**V2_LITE, **change}, "config.json")


def test_a_tensor_of_another_shape_is_told_with_the_keys_of_latents(entry: Entry, tmp_path: Path) -> None:
    for file in entry.folder.iterdir():
        shutil.copy(file, tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**keys, "v_head_dim": 7}))
    with pytest.raises(CheckpointError, match=r"kv_b_proj.weight .*qk_nope_head_dim = 8, v_head_dim = 7, kv_lora_rank"):
        load_decoder(tmp_path)
