"""Merging adapters while loading: the tokens that PEFT says, tied embeddings, scales, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millrace.model.checkpoint.tensor_shapes import TensorSource, open_source
from millrace.model.errors import AdapterError
from millrace.model.families.registry import read_spec
from millrace.model.lora.merge import Merging
from millrace.model.spec import DecoderSpec
from millrace.stages.config import EngineConfig, parse_merge
from millrace.stages.errors import ConfigError
from tests.model.lora.greedy import EXPECTED, merged_tokens, prompts, recorded
from tests.model.lora.peft_formats import EMBEDDING, KINDS, PREFIX, save_adapter, write_adapter, write_base

QUERY = "model.layers.0.self_attn.q_proj"


def opened(base: Path, *adapters: tuple[Path, float]) -> tuple[TensorSource, DecoderSpec]:
    return open_source(base, read_spec(base), "auto", Merging(adapters) if adapters else None)


def made(tmp_path: Path, base: str, *kinds: str) -> tuple[Path, list[Path]]:
    """A base and adapters of these kinds for it."""
    folder = write_base(base, tmp_path / base)
    return folder, [write_adapter(kind, folder, tmp_path / kind) for kind in kinds]


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_says_the_tokens_that_peft_said(tmp_path: Path, kind: str) -> None:
    base, expected = recorded(kind)
    folder, adapters = made(tmp_path, base, kind)
    asked = prompts(len(expected))
    assert merged_tokens(folder, [(adapters[0], 1.0)], asked, len(expected[0])) == expected


def test_every_kind_has_recorded_tokens() -> None:
    assert set(json.loads(EXPECTED.read_text())) == set(KINDS)


@pytest.mark.parametrize("kind", ["embedding", "head", "saved_head", "saved_embedding"])
def test_a_tied_output_layer_is_untied_if_one_of_both_changes(tmp_path: Path, kind: str) -> None:
    folder, adapters = made(tmp_path, "qwen2", kind)
    base, before = opened(folder)
    source, spec = opened(folder, (adapters[0], 1.0))
    assert before.head.is_tied and not spec.head.is_tied
    embedding, head = (source.array(f"{stem}.weight") for stem in (EMBEDDING, "lm_head"))
    changed, kept = (head, embedding) if "head" in kind else (embedding, head)
    stored = base.array(f"{EMBEDDING}.weight")
    assert np.array_equal(kept, stored) and not np.array_equal(changed, stored)


def test_new_rows_of_tokens_are_for_both_ends_of_a_tied_model(tmp_path: Path) -> None:
    folder, adapters = made(tmp_path, "qwen2", "tokens")
    _, spec = opened(folder, (adapters[0], 1.0))
    assert spec.head.is_tied


@pytest.mark.parametrize("kind", ["embedding", "head", "saved_head", "saved_embedding"])
def test_rows_of_tokens_of_one_adapter_and_an_untied_head_of_another_are_refused(tmp_path: Path, kind: str) -> None:
    folder, (tokens, other) = made(tmp_path, "qwen2", "tokens", kind)
    for pair in ((tokens, other), (other, tokens)):
        with pytest.raises(AdapterError, match=r"which are one in this model; merge one of them|and one replaces it"):
            opened(folder, *((path, 1.0) for path in pair))


def test_adapters_are_added_in_their_order_each_with_its_scale(tmp_path: Path) -> None:
    folder, (one, other) = made(tmp_path, "llama", "plain", "q_v")
    name = f"{QUERY}.weight"
    base, _ = opened(folder)
    first, second, both = (
        opened(folder, *adapters)[0].array(name)
        for adapters in ([(one, 1.0)], [(other, 1.0)], [(one, 0.5), (other, -2.0)])
    )
    stored = base.array(name).astype(np.float64)
    assert np.allclose(both - stored, 0.5 * (first - stored) - 2.0 * (second - stored), atol=1e-5)
    assert opened(folder, (one, 1.0))[0].is_mapped("model.norm.weight")


def test_a_transposed_matrix_gets_the_transposed_update(tmp_path: Path) -> None:
    folder = write_base("gpt2", tmp_path / "gpt2")
    draws = np.random.default_rng(0)
    a, b = draws.standard_normal((2, 32), np.float32), draws.standard_normal((96, 2), np.float32)
    path = "transformer.h.1.attn.c_attn"
    tensors = {f"{PREFIX}{path}.lora_A.weight": a, f"{PREFIX}{path}.lora_B.weight": b}
    save_adapter(tmp_path / "x", tensors, r=2, lora_alpha=2, target_modules=["c_attn"], fan_in_fan_out=True)
    base, _ = opened(folder)
    source, _ = opened(folder, (tmp_path / "x", 1.0))
    name = "model.layers.1.self_attn.k_proj.weight"
    assert np.allclose(source.array(name) - base.array(name), (b @ a)[32:64], atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "base", "said"),
    [
        ("dora", "llama", "lora_magnitude_vector, which no scale multiplies: leave out the 0.5"),
        ("saved_head", "llama", "lm_head is changed by weight, which no scale multiplies"),
        ("bias_all", "qwen2", "which no scale multiplies"),
    ],
)
def test_only_updates_have_a_scale(tmp_path: Path, kind: str, base: str, said: str) -> None:
    folder, adapters = made(tmp_path, base, kind)
    with pytest.raises(AdapterError, match=said):
        opened(folder, (adapters[0], 0.5))


def test_two_adapters_do_not_replace_one_tensor(tmp_path: Path) -> None:
    folder, (one, other) = made(tmp_path, "llama", "head", "saved_head")
    for pair in ((one, other), (other, one)):
        with pytest.raises(AdapterError, match=r"both change lm_head.weight, and one replaces it"):
            opened(folder, *((path, 1.0) for path in pair))


def test_a_bias_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    folder = write_base("llama", tmp_path / "llama")
    biased = write_base("qwen2", tmp_path / "qwen2")
    adapter = write_adapter("lora_bias", biased, tmp_path / "x")
    with pytest.raises(AdapterError, match="has a bias for layer 0 q_proj, and this model has none there"):
        opened(folder, (adapter, 1.0))


def test_a_copy_of_another_base_is_refused_while_it_is_read(tmp_path: Path) -> None:
    folder, adapters = made(tmp_path, "llama", "embedding")
    tensors = load_file(adapters[0] / "adapter_model.safetensors")
    tensors[f"{PREFIX}{EMBEDDING}.base_layer.weight"][7, 3] += 0.5
    save_file(tensors, adapters[0] / "adapter_model.safetensors")
    source, _ = opened(folder, (adapters[0], 1.0))
    with pytest.raises(AdapterError, match="its copy of model.embed_tokens differs from this model's"):
        source.array(f"{EMBEDDING}.weight")


def test_quantized_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder, adapters = made(tmp_path, "llama", "plain")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{QUERY}.weight_scale"] = np.ones((), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AdapterError, match="merge before quantization: start from the bfloat16 checkpoint"):
        opened(folder, (adapters[0], 1.0))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a/b", ("a/b", 1.0)),
        ("a/b=0.5", ("a/b", 0.5)),
        ("a=b/c", ("a=b/c", 1.0)),
        ("a=b=-2", ("a=b", -2.0)),
    ],
)
def test_a_scale_stands_behind_the_last_equals_sign(text: str, found: tuple[str, float]) -> None:
    assert parse_merge(text) == found
    assert EngineConfig(merge_adapter=text).merge_adapter == (text,)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["=1", "a=nan", "a=inf", "a=1e7"])
def test_a_scale_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a folder or Hub id, or one with a number"):
        EngineConfig(merge_adapter=(text,))
