"""Quantized checkpoints: the weights that their packed tensors stand for, and refusals of those that are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.model.checkpoint.tensor_shapes import expected_shapes, open_source
from millrace.model.errors import CheckpointError
from millrace.model.families.registry import read_spec
from millrace.model.grouped_matrix import GroupedMatrix
from millrace.model.quantized.codes import e4m3, e8m0
from tests.families.checkpoint import make_model
from tests.families.row import row
from tests.model.quantized.packers import PACKERS, group

# columns are whole groups of 32; 192 and 320 are no whole blocks of 128
SHAPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 1, "head_dim": 48}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    make_model(row("plain", "llama", attention_bias=True, **SHAPE)).save_pretrained(root)
    return root


def quantize(plain: Path, root: Path, name: str) -> dict[str, np.ndarray]:
    """Writes a checkpoint whose linear layers are packed. Returns their weights by name."""
    config, pack = PACKERS[name]
    tensors, dice, weights = load_file(plain / "model.safetensors"), np.random.default_rng(5), {}
    for stored, tensor in list(tensors.items()):
        if stored.endswith("_proj.weight"):
            packed = pack(dice, *tensor.shape)
            del tensors[stored]
            tensors |= {stored.removesuffix(".weight") + suffix: part for suffix, part in packed.tensors.items()}
            weights[stored] = packed.weight
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, root / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return weights


@pytest.mark.parametrize("name", PACKERS)
def test_packed_layers_are_the_weights_that_were_packed(name: str, plain: Path, tmp_path: Path) -> None:
    weights = quantize(plain, tmp_path, name)
    source, spec = open_source(tmp_path, read_spec(tmp_path), "auto")
    unpacked, _ = open_source(plain, read_spec(plain), "auto")
    assert set(weights) < set(expected_shapes(spec))
    for tensor in expected_shapes(spec):
        expected = weights.get(tensor)
        if expected is None:
            assert source.grouped(tensor) is None
            assert np.array_equal(source.array(tensor), unpacked.array(tensor)), tensor
        else:
            numbers = source.array(tensor)
            np.testing.assert_allclose(numbers, expected, rtol=3e-7, atol=1e-9, err_msg=tensor)
            check_codes(name, source.grouped(tensor), numbers)


def check_codes(name: str, matrix: GroupedMatrix | str | None, numbers: np.ndarray) -> None:
    """Rows of codes stand for the numbers of the unpacked weight, whatever rows are taken."""
    if "fp8" in name or name == "fbgemm":
        assert matrix == "its codes are 8-bit floating-point numbers, which no product here multiplies"
        return
    if name == "fp4":
        assert matrix == "its table of 16 numbers is not that of nf4"
        return
    assert isinstance(matrix, GroupedMatrix) and matrix.shape == numbers.shape
    for first, last in ((0, 3), (3, 40), (40, len(numbers))):
        codes = matrix.rows(first, last)
        codes.check()
        found, expected = codes.dequantize(), numbers[first:last]
        assert codes.format == matrix.format
        if name == "ct-nvfp4":  # divided by a factor of the matrix, by whose inverse the codes are multiplied
            np.testing.assert_allclose(found, expected, rtol=2.4e-7)
        else:
            assert np.array_equal(found, expected), first


def test_orders_of_columns_are_kept_and_unequal_groups_are_told(plain: Path, tmp_path: Path) -> None:
    quantize(plain, tmp_path, "gptq-4-order")
    tensors, stem = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj"
    source, _ = open_source(tmp_path, read_spec(tmp_path), "auto")
    matrix = source.grouped(f"{stem}.weight")
    assert isinstance(matrix, GroupedMatrix) and matrix.format.group == 32
    columns = matrix.rows(0, 1).columns
    assert columns is not None and (tensors[f"{stem}.g_idx"].numpy()[columns] == np.arange(192) // 32).all()
    groups = tensors[f"{stem}.g_idx"].clone()
    groups[groups == 1] = 0
    save_file(tensors | {f"{stem}.g_idx": groups}, tmp_path / "model.safetensors")
    told = open_source(tmp_path, read_spec(tmp_path), "auto")[0].grouped(f"{stem}.weight")
    assert told == "its groups of columns (g_idx) are of different sizes"


def test_small_floats_are_those_of_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for ours, dtype in ((e4m3, torch.float8_e4m3fn), (e8m0, torch.float8_e8m0fnu)):
        theirs = torch.from_numpy(codes).view(dtype).float().numpy()
        number = codes[:255] if ours is e8m0 else codes
        assert np.array_equal(ours(number), theirs[: len(number)], equal_nan=True), dtype


REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "aqlm"}, "quant_method = 'aqlm' is not read; read are awq, gptq"),
    ({"quant_method": "mxfp8"}, "quant_method = 'mxfp8' is not read"),
    ("x\ny", "must be an object, not"),
    ({"quant_method": "awq", "bits": 8}, "bits = 8: awq has 4"),
    ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv': only gemm is read"),
    ({"quant_method": "gptq", "bits": 5}, "bits = 5: gptq is read with 2, 3, 4 and 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    ({"quant_method": "compressed-tensors"}, "config_groups: must be an object"),
    (group(num_bits=4) | {"format": "marlin-24"}, "format = 'marlin-24' is not read"),
    (group(num_bits=4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format ="),
    (group(num_bits=4) | {"transform_config": {"a": 1}}, "transform_config: rotations"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ': of modelopt's FP8, FP8_PER"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size = 32: NVFP4 has 16"),
    (group(num_bits=0), "num_bits = 0: weights of 1 to 8 bits"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": 5}}, "a value of another kind than compressed"),
    ({"quant_method": "fp8", "weight_block_size": ["a", "b"]}, "a value of another kind than fp8 has"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size = \[128\]: must be two counts"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_format_that_is_not_read_is_refused_by_its_key(
    config: Any, message: str, plain: Path, tmp_path: Path
) -> None:
    values = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_spec(tmp_path)
    assert str(caught.value).startswith(f"config.json ({tmp_path}): quantization_config: ")


BROKEN: list[tuple[str, str, Any, str]] = [
    ("gptq-4-order", ".g_idx", lambda tensor: tensor + 99, "g_idx holds 192 groups up to"),
    ("awq", ".scales", lambda tensor: tensor[:1], "qweight, qzeros and scales are for"),
    ("fp8-block", ".weight_scale_inv", lambda tensor: tensor[:1], r"its scales are \[1, 2\]"),
    ("fp8-tensor", ".weight", lambda tensor: (tensor.view(torch.uint8) * 0 + 127).view(tensor.dtype), "holds NaN"),
    ("nf4", ".weight.absmax", lambda tensor: tensor[1:], "do not make"),
    ("nf4", ".weight.quant_state.bitsandbytes__nf4", lambda tensor: tensor[1:], "is not the JSON of a quant_state"),
    ("gptq-8", ".qzeros", None, "qzeros is missing"),
    ("awq", ".qweight", lambda tensor: tensor[0], r"do not fit each other: .qweight I32 \[24\]"),
    ("nf4", ".weight.quant_map", lambda tensor: tensor[:4], "do not fit each other"),
]


@pytest.mark.parametrize(("name", "suffix", "change", "message"), BROKEN, ids=[row[3] for row in BROKEN])
def test_parts_that_do_not_fit_each_other_are_refused(
    name: str, suffix: str, change: Any, message: str, plain: Path, tmp_path: Path
) -> None:
    quantize(plain, tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stem = "model.layers.0.mlp.down_proj" if name == "awq" else "model.layers.0.self_attn.q_proj"
    if change is None:
        del tensors[stem + suffix]
    else:
        tensors[stem + suffix] = change(tensors[stem + suffix]).contiguous()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_source(tmp_path, read_spec(tmp_path), "auto")[0].array(f"{stem}.weight")
    assert stem in str(caught.value)


def test_scales_of_attention_and_biases_of_zeros_change_nothing(plain: Path, tmp_path: Path) -> None:
    weights = quantize(plain, tmp_path, "gptq-8")
    tensors, layer = load_file(tmp_path / "model.safetensors"), "model.layers.0"
    extra = {f"{layer}.self_attn.{name}": torch.ones(1) for name in ("k_scale", "attn.v_scale")}
    extra |= {f"{layer}.mlp.down_proj.bias": torch.zeros(192)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    source, _ = open_source(tmp_path, read_spec(tmp_path), "auto")
    name = f"{layer}.mlp.down_proj.weight"
    np.testing.assert_allclose(source.array(name), weights[name], rtol=3e-7)
    save_file(tensors | {f"{layer}.mlp.down_proj.bias": torch.ones(192)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.bias is not part of a llama model"):
        open_source(tmp_path, read_spec(tmp_path), "auto")


def test_weights_that_compressed_tensors_left_uncompressed_are_refused(plain: Path, tmp_path: Path) -> None:
    name, tensors = "model.layers.0.self_attn.q_proj", load_file(plain / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"quantization_config": group(num_bits=8) | {"format": "dense"}})
    )
    save_file(tensors | {f"{name}.weight_scale": torch.ones(192, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"its weight is F32, not in codes"):
        open_source(tmp_path, read_spec(tmp_path), "auto")[0].array(f"{name}.weight")


def test_an_older_file_of_modelopt_beside_config_json_names_the_format(plain: Path, tmp_path: Path) -> None:
    weights = quantize(plain, tmp_path, "nvfp4-modelopt")
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    name = "model.layers.0.mlp.down_proj.weight"
    source, _ = open_source(tmp_path, read_spec(tmp_path), "auto")
    np.testing.assert_allclose(source.array(name), weights[name], rtol=3e-7)


def test_a_config_without_a_packed_tensor_is_refused(plain: Path, tmp_path: Path) -> None:
    config, _ = PACKERS["awq"]
    values = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    save_file(load_file(plain / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="says awq, 4 bits, and no tensor ends in .qweight"):
        open_source(tmp_path, read_spec(tmp_path), "auto")
