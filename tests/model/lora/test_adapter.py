"""Adapters for the run time: which rows of which linear an adapter changes, and by what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millrace.model.checkpoint.canonical import widened
from millrace.model.errors import AdapterError
from millrace.model.families.registry import parse_config, read_spec
from millrace.model.lora import matrices, tensor_file
from millrace.model.lora.adapter import AdaptableModel, Adapter, read_adapter
from millrace.model.lora.matrices import rounded
from millrace.model.spec import DecoderSpec
from tests.model.checkpoints import SHAPE
from tests.model.lora.peft_formats import ALPHA, KINDS, PREFIX, RANK, save_adapter, write_adapter, write_base


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of checkpoints, made when first needed."""
    return tmp_path_factory.mktemp("bases")


def base(root: Path, name: str = "llama") -> tuple[Path, DecoderSpec]:
    """A tiny checkpoint with its spec."""
    folder = root / name
    if not folder.exists():
        write_base(name, folder)
    return folder, read_spec(folder)


def delta(adapter: Adapter, layer: int, linear: str, rows: int, columns: int) -> np.ndarray:
    """What an adapter adds to the weight of a linear, [rows, columns]."""
    found = np.zeros((rows, columns), np.float32)
    for one in adapter.linears.get((layer, linear), ()):  # type: ignore[call-overload]
        found[one.row_start : one.row_start + one.num_rows] += one.b @ one.a
    return found


def test_every_projection_lands_on_its_rows_of_the_fused_linear(bases: Path, tmp_path: Path) -> None:
    folder, spec = base(bases)
    tensors = load_file(write_adapter("plain", folder, tmp_path / "x") / "adapter_model.safetensors")
    adapter = read_adapter(tmp_path / "x", spec, "float32")

    def stored(path: str) -> np.ndarray:
        a, b = (tensors[f"{PREFIX}model.layers.1.{path}.lora_{which}.weight"] for which in "AB")
        return np.asarray(b * np.float32(ALPHA / RANK)) @ a

    qkv = np.concatenate([stored(f"self_attn.{one}_proj") for one in "qkv"])
    gate_up = np.concatenate([stored(f"mlp.{one}_proj") for one in ("gate", "up")])
    for linear, expected in {
        "qkv": qkv,
        "output": stored("self_attn.o_proj"),
        "gate_up": gate_up,
        "down": stored("mlp.down_proj"),
    }.items():
        assert np.array_equal(delta(adapter, 1, linear, *expected.shape), expected), linear
    assert adapter.rank == RANK and adapter.parent == "base" and len(adapter.linears) == 4 * spec.num_layers
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_fused_matrix_is_one_slice_in_the_order_of_the_linear(bases: Path, tmp_path: Path) -> None:
    folder, spec = base(bases, "gpt_neox")
    path, hidden, rows = "gpt_neox.layers.0.attention.query_key_value", spec.hidden_size, spec.qkv_size
    draws = np.random.default_rng(0)
    a, b = draws.standard_normal((3, hidden), np.float32), draws.standard_normal((rows, 3), np.float32)
    tensors = {f"{PREFIX}{path}.lora_A.weight": a, f"{PREFIX}{path}.lora_B.weight": b}
    adapter = read_adapter(
        save_adapter(tmp_path, tensors, r=3, lora_alpha=3, target_modules=["query_key_value"]), spec, "float32"
    )
    (one,) = adapter.linears[0, "qkv"]
    heads, dim = spec.num_heads, spec.head_dim
    order = np.arange(rows).reshape(heads, 3, dim).transpose(1, 0, 2).reshape(-1)  # stored [H, 3, D]
    assert one.row_start == 0 and np.array_equal(one.b, b[order]) and np.array_equal(one.a, a)


def test_attention_beside_experts_is_changed_and_experts_are_refused_by_name(tmp_path: Path) -> None:
    shape = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
    spec, draws = parse_config({"model_type": "mixtral", **shape}, ""), np.random.default_rng(0)

    def adapter(name: str, path: str, rows: int, columns: int) -> Path:
        a, b = draws.standard_normal((3, columns), np.float32), draws.standard_normal((rows, 3), np.float32)
        tensors = {f"{PREFIX}{path}.lora_A.weight": a, f"{PREFIX}{path}.lora_B.weight": b}
        (tmp_path / name).mkdir()
        return save_adapter(tmp_path / name, tensors, r=3, lora_alpha=3, target_modules=[path.rpartition(".")[2]])

    hidden, inner = spec.hidden_size, shape["intermediate_size"]
    found = read_adapter(
        adapter("q", "model.layers.1.self_attn.q_proj", spec.num_heads * spec.head_dim, hidden), spec, "float32"
    )
    assert set(found.linears) == {(1, "qkv")}
    expert = "model.layers.1.block_sparse_moe.experts.2.w1"
    with pytest.raises(
        AdapterError, match=rf"changes {expert}; run-time adapters change .* of attention and feed only"
    ):
        read_adapter(adapter("w", expert, inner, hidden), spec, "float32")


def test_two_names_of_one_content_have_one_digest_and_another_scale_another(bases: Path, tmp_path: Path) -> None:
    folder, spec = base(bases)
    digests = {
        read_adapter(write_adapter("q_v", folder, tmp_path / name, lora_alpha=alpha), spec, "bfloat16").digest
        for name, alpha in (("one", 10), ("other", 10), ("third", 11))
    }
    assert len(digests) == 2


def test_bfloat16_is_rounded_to_nearest_with_ties_to_even() -> None:
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(0).standard_normal(4001).astype(np.float32)
    numbers[:3] = [1 + 2**-8, 1 + 3 * 2**-8, -0.0]  # two ties
    expected = torch.from_numpy(numbers).bfloat16().float().numpy()
    assert np.array_equal(widened(rounded(numbers, "bfloat16")), expected)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.at_run_time and not kind.needs_bias])
def test_what_is_no_update_of_a_linear_names_the_merge(bases: Path, tmp_path: Path, kind: str) -> None:
    folder, spec = base(bases)
    with pytest.raises(AdapterError, match=r"^adapter 'mine'[:] .*; merge it with --merge-adapter$"):
        read_adapter(write_adapter(kind, folder, tmp_path), spec, "float32", name="mine")


def test_a_rank_above_the_limit_names_the_setting(bases: Path, tmp_path: Path) -> None:
    folder, spec = base(bases)
    with pytest.raises(AdapterError) as caught:
        read_adapter(write_adapter("plain", folder, tmp_path), spec, "float32", name="x", max_rank=3)
    said = "adapter 'x': has rank 4; this server takes up to 3: start it with --max-lora-rank 4"
    assert str(caught.value) == said


def test_a_module_that_the_model_lacks_names_both_models(bases: Path, tmp_path: Path) -> None:
    folder, spec = base(bases)
    write_adapter("plain", folder, tmp_path)
    with pytest.raises(AdapterError, match="changes model.layers.2.*which this model has not: it was made for 'base'"):
        read_adapter(tmp_path, replace(spec, layers=spec.layers[:2]), "float32", model_name="other")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_of_any_size_give_the_numbers_of_single_tensors(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    folder, spec = base(bases, "gpt_neox")
    draws, rank, heads, dim = np.random.default_rng(0), 3, spec.num_heads, spec.head_dim
    order = np.arange(spec.qkv_size).reshape(heads, 3, dim).transpose(1, 0, 2).reshape(-1)  # its rows are copied
    tensors, expected = {}, {}
    for layer in range(2):
        for linear, path, rows in (("qkv", "query_key_value", spec.qkv_size), ("output", "dense", spec.hidden_size)):
            a = draws.standard_normal((rank, spec.hidden_size), np.float32)
            b = draws.standard_normal((rows, rank), np.float32)
            module = f"{PREFIX}gpt_neox.layers.{layer}.attention.{path}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            expected[layer, linear] = rounded(a, dtype), rounded(b * np.float32(7 / 3), dtype)
    root = save_adapter(tmp_path, tensors, r=rank, lora_alpha=7, target_modules=["query_key_value", "dense"])
    model = AdaptableModel(spec)
    for size in (1, 2000, 1 << 20):
        monkeypatch.setattr(matrices, "BLOCK_BYTES", size)
        adapter = read_adapter(root, model, dtype)
        for (layer, linear), (a, b) in expected.items():
            (one,) = adapter.linears[layer, linear]  # type: ignore[index]
            assert np.array_equal(one.a, a) and np.array_equal(one.b, b[order] if linear == "qkv" else b)


def test_numbers_that_are_too_large_for_the_dtype_name_their_module(bases: Path, tmp_path: Path) -> None:
    folder, spec = base(bases)
    root = write_adapter("plain", folder, tmp_path / "x")
    tensors = load_file(root / "adapter_model.safetensors")
    name = f"{PREFIX}model.layers.1.self_attn.o_proj.lora_A.weight"
    tensors[name][2, 1] = 7e4  # more than float16 holds
    save_file(tensors, root / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"layer 1 o_proj: its numbers are too large for float16$"):
        read_adapter(root, spec, "float16")
    assert read_adapter(root, spec, "bfloat16").rank == RANK


def test_reading_pauses_between_tensors_so_that_steps_get_the_lock(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = base(bases)
    root = write_adapter("plain", folder, tmp_path / "x")
    num_tensors, slept = len(load_file(root / "adapter_model.safetensors")), list[float]()
    monkeypatch.setattr(tensor_file, "EVERY_S", -1.0)
    monkeypatch.setattr("time.sleep", slept.append)
    read_adapter(root, spec, "bfloat16")
    assert len(slept) >= 3 * num_tensors and set(slept) == {tensor_file.PAUSE_S}
