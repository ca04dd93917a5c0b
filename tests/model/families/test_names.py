"""Where canonical tensors lie in a checkpoint: orders of rows, fused and transposed ones, prefixes, refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from millrace.model.checkpoint.canonical import CanonicalTensors, TensorSources
from millrace.model.checkpoint.stored_tensors import StoredTensors
from millrace.model.checkpoint.tensor_shapes import open_source
from millrace.model.errors import CheckpointError
from millrace.model.families import registry
from millrace.model.families.building import Family
from millrace.model.families.names import (
    EXPERT_GATE,
    EXPERT_UP,
    ROUTER,
    Rows,
    Target,
    fused_qkv,
    halves,
    split,
    stacked,
    tensors_of,
)
from millrace.model.families.registry import parse_config
from millrace.model.spec import AttentionSpec, DecoderSpec, FeedSpec, MoeSpec, RouterSpec
from tests.model.checkpoints import SHAPE

LLAMA: dict[str, Any] = {"model_type": "llama", **SHAPE, "num_hidden_layers": 2, "tie_word_embeddings": True}
QKV = tuple(f"model.layers.*.self_attn.{name}_proj" for name in "qkv")


def tensors(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """Every canonical tensor, with numbers of its own."""
    numbers = torch.Generator().manual_seed(1)
    return {target.name: torch.randn(target.shape, generator=numbers) for target in tensors_of(spec)}


def save(root: Path, stored: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> DecoderSpec:
    (root / "config.json").write_text(json.dumps(config or LLAMA))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, root / "model.safetensors")
    return registry.read_spec(root)


def use(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Llama's spec with other names from here on."""
    family = Family(spec=registry.family_of("llama").spec, **fields)
    monkeypatch.setattr("millrace.model.checkpoint.tensor_shapes.family_of", lambda model_type: family)


def test_rows_of_neighbours_that_rotate_become_rows_of_halves() -> None:
    assert halves(2, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert halves(1, 4).tolist() == [0, 2, 1, 3]


def test_the_rows_of_a_fused_matrix_are_each_taken_once() -> None:
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=2, scale=1.0)
    q, k, v = fused_qkv(attention)
    assert (q, k, v) == (slice(0, 8), slice(8, 12), slice(12, 16)) == tuple(stacked(8, 4, 4))
    q, k, v = fused_qkv(attention, is_by_group=True)
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15])


def test_fused_transposed_and_renamed_tensors_give_the_canonical_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parse_config(LLAMA, "")
    expected = tensors(spec)
    rows = fused_qkv(spec.attention, is_by_group=True)
    names = split("h.*.attn.qkv", QKV, rows, is_transposed=True)
    use(monkeypatch, prefix="h", names=lambda spec: {**names, "model.norm": "ln_f"})
    stored = {name.replace("model.norm", "ln_f"): t for name, t in expected.items() if "self_attn.q_" not in name}
    for layer in range(2):
        fused = torch.empty(spec.qkv_size, spec.hidden_size)
        for stem, index in zip(QKV, rows, strict=True):
            name = f"{stem.replace('*', str(layer))}.weight"
            fused[index] = expected[name]
            stored.pop(name, None)
        stored[f"h.{layer}.attn.qkv.weight"] = fused.T
    source, _ = open_source(tmp_path, save(tmp_path, stored), "auto")
    assert all(np.array_equal(source.array(name), tensor.numpy()) for name, tensor in expected.items())
    assert source.stored_name("model.layers.1.self_attn.k_proj.weight") == "h.1.attn.qkv.weight"
    assert source.is_mapped("model.norm.weight") and not source.is_mapped("model.layers.0.self_attn.k_proj.weight")


def test_parts_are_stacked_and_changed_in_float32() -> None:
    twice = {"a.*.b": (Rows("x.*", apply=lambda x: 2 * x, suffix=""), Rows("y.*", suffix=""))}
    sources = TensorSources([Target("a.3.b", (2,))], twice)
    assert sources.stored_shapes() == {"x.3": (1,), "y.3": (1,)}
    assert sources.canonical_name("y.3") == "a.3.b"


def test_a_stored_tensor_reaches_to_the_last_row_that_is_taken() -> None:
    targets = [Target("q.weight", (2, 3)), Target("k.weight", (2, 3)), Target("v.weight", (2, 3))]
    places = {"q": Rows("qkv", slice(4, 6)), "k": Rows("qkv", np.array([7, 0])), "v": Rows("qkv", slice(4, 6))}
    assert TensorSources(targets, places).stored_shapes() == {"qkv.weight": (8, 3)}


MOE = MoeSpec(
    num_experts=3,
    top_k=2,
    expert=FeedSpec(intermediate_size=2, has_bias=True),
    router=RouterSpec(has_bias=True, has_choice_bias=True),
    shared=FeedSpec(intermediate_size=4),
    has_shared_gate=True,
    dense_beside=FeedSpec(intermediate_size=6, is_gated=False),
)


def with_experts(moe: MoeSpec) -> list[Target]:
    """The canonical tensors of two layers of experts, without those outside of them."""
    spec = parse_config(LLAMA, "")
    layers = tuple(replace(layer, feed=moe) for layer in spec.layers)
    return [target for target in tensors_of(replace(spec, layers=layers)) if ".mlp." in target.name]


def test_experts_have_a_router_and_tensors_of_their_own() -> None:
    shapes = {target.name: target.shape for target in with_experts(MOE)}
    assert len(shapes) == 2 * (3 + 3 * 6 + 3 + 1 + 2)
    expected = {
        "gate.weight": (3, 64),
        "gate.bias": (3,),
        "gate.e_score_correction_bias": (3,),
        "experts.2.gate_proj.weight": (2, 64),
        "experts.2.up_proj.bias": (2,),
        "experts.0.down_proj.weight": (64, 2),
        "shared_experts.up_proj.weight": (4, 64),
        "shared_expert_gate.weight": (1, 64),
        "down_proj.weight": (64, 6),
    }
    assert {name: shapes[f"model.layers.1.mlp.{name}"] for name in expected} == expected


def test_experts_by_number_are_found_under_other_names() -> None:
    sources = TensorSources(with_experts(MOE), {EXPERT_UP: "layers.*.moe.experts.*.w3", ROUTER: "layers.*.moe.gate"})
    assert sources.stored_name("model.layers.1.mlp.experts.2.up_proj.bias") == "layers.1.moe.experts.2.w3.bias"
    assert sources.stored_name("model.layers.1.mlp.gate.weight") == "layers.1.moe.gate.weight"
    assert sources.stored_shapes()["layers.0.moe.experts.1.w3.weight"] == (2, 64)


def test_stacked_experts_are_taken_one_by_one() -> None:
    stem = "model.layers.*.mlp.experts.gate_up"
    halves_of = {EXPERT_GATE: slice(0, 4, 2), EXPERT_UP: slice(1, 4, 2)}
    places: dict[str, Rows] = {
        f"{name}.weight": Rows(stem, rows, is_transposed=True, suffix="", num_stacked=3)
        for name, rows in halves_of.items()
    }
    places |= {f"{name}.bias": Rows(f"{stem}_bias", rows, suffix="", num_stacked=3) for name, rows in halves_of.items()}
    sources = TensorSources(with_experts(MOE), places)
    shapes = sources.stored_shapes()
    assert shapes["model.layers.0.mlp.experts.gate_up"] == (3, 64, 4)
    assert shapes["model.layers.0.mlp.experts.gate_up_bias"] == (3, 4)
    stored = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in shapes.items()}
    source = CanonicalTensors(cast(StoredTensors, Plain(stored)), sources)
    wanted = stored["model.layers.1.mlp.experts.gate_up"]
    assert np.array_equal(source.array("model.layers.1.mlp.experts.2.up_proj.weight"), wanted[2].T[1::2])
    bias = stored["model.layers.1.mlp.experts.gate_up_bias"]
    assert np.array_equal(source.array("model.layers.1.mlp.experts.1.gate_proj.bias"), bias[1, ::2])
    assert not source.is_mapped("model.layers.1.mlp.experts.1.gate_proj.bias")


@dataclass
class Plain:
    """Arrays as a checkpoint."""

    arrays: dict[str, Any]
    warnings: tuple[str, ...] = ()
    packing: str = ""

    def array(self, name: str) -> Any:
        return self.arrays[name]

    def is_mapped(self, name: str) -> bool:
        return True


def test_a_matrix_of_weights_of_heads_is_read_as_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tensors(parse_config(LLAMA, ""))
    use(monkeypatch, names=lambda spec: {"model.norm": Rows("model.norm", halves(16, 4), shape=(16, 4))})
    matrix = expected["model.norm.weight"].view(16, 4)
    source, _ = open_source(tmp_path, save(tmp_path, {**expected, "model.norm.weight": matrix}), "auto")
    assert np.array_equal(source.array("model.norm.weight"), matrix[:, [0, 2, 1, 3]].reshape(-1).numpy())


def test_a_stored_constant_must_hold_the_number_of_the_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, constants={"model.layers.*.mlp.act_fn.beta": 0.5})
    stored, name = tensors(parse_config(LLAMA, "")), "model.layers.1.mlp.act_fn.beta"
    source, _ = open_source(tmp_path, save(tmp_path, {**stored, name: torch.tensor(0.5).bfloat16()}), "auto")
    assert not source.warnings
    spec = save(tmp_path, {**stored, name: torch.tensor([0.6])})
    with pytest.raises(CheckpointError, match=r"act_fn\.beta: must hold 0\.5 in a llama model, not \[0\.6"):
        open_source(tmp_path, spec, "auto")


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model.", "language_model."])
def test_the_decoder_is_found_behind_the_prefix_of_any_wrapper(prefix: str, tmp_path: Path) -> None:
    expected = tensors(parse_config(LLAMA, ""))
    stored = {prefix + name.removeprefix("model."): tensor for name, tensor in expected.items()}
    if "language" in prefix:
        stored |= {"model.vision_tower.patch.weight": torch.ones(4, 4), "visual.blocks.0.weight": torch.ones(4, 4)}
    source, spec = open_source(tmp_path, save(tmp_path, stored), "auto")
    assert spec.num_layers == 2
    assert all(np.array_equal(source.array(name), tensor.numpy()) for name, tensor in expected.items())
    assert len(source.warnings) == ("language" in prefix)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_norm.weight", "layers.1.mlp.extra.weight", "norm.bias"])
def test_a_weight_that_the_spec_does_not_have_is_refused_with_any_prefix(name: str, tmp_path: Path) -> None:
    spec = save(tmp_path, {**tensors(parse_config(LLAMA, "")), name: torch.ones(4)})
    with pytest.raises(CheckpointError, match="is not part of a llama model"):
        open_source(tmp_path, spec, "auto")


@pytest.mark.parametrize(("allows", "number"), [(True, 2), (False, 2), (True, 1)])
def test_only_layers_that_guess_further_tokens_may_follow_the_last(
    allows: bool, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, has_guessing_layers=allows)
    spec = save(tmp_path, {**tensors(parse_config(LLAMA, "")), f"model.layers.{number}.eh_proj.weight": torch.ones(4)})
    if allows and number == 2:
        assert open_source(tmp_path, spec, "auto")[1].num_layers == 2
        return
    with pytest.raises(CheckpointError, match="num_hidden_layers: must be 3|is not part of a llama model"):
        open_source(tmp_path, spec, "auto")


def test_a_missing_tensor_is_named_as_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, names=lambda spec: {"model.norm": "model.ln_f"})
    spec = save(tmp_path, tensors(parse_config(LLAMA, "")))
    with pytest.raises(CheckpointError, match=r"tensor model\.ln_f\.weight is missing"):
        open_source(tmp_path, spec, "auto")


def test_one_is_added_in_float32_to_norms_that_are_stored_without_it(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "gemma", "head_dim": 16}
    stored = {
        name: tensor.bfloat16() / 300 if "norm" in name else tensor
        for name, tensor in tensors(parse_config(config, "")).items()
    }
    source, _ = open_source(tmp_path, save(tmp_path, stored, config), "auto")
    found = source.array("model.layers.1.input_layernorm.weight")
    assert found.dtype == np.float32 and not source.is_mapped("model.norm.weight")
    assert np.array_equal(found, 1 + stored["model.layers.1.input_layernorm.weight"].float().numpy())
