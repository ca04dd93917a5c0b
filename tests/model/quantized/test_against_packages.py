"""Layers that the formats' own packages pack are unpacked to the numbers that the packages give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from millrace.model.checkpoint.safetensors import Checkpoint
from millrace.model.quantized.formats import read_format
from millrace.model.quantized.unpacked import UnpackedCheckpoint

WEIGHT = torch.randn(96, 192, generator=torch.Generator().manual_seed(3))


def unpacked(tensors: dict[str, torch.Tensor], config: dict[str, Any], root: Path) -> np.ndarray:
    save_file({f"l.{name}": tensor.contiguous() for name, tensor in tensors.items()}, root / "model.safetensors")
    weights = read_format({"quantization_config": config}, root)
    assert weights is not None
    return np.asarray(UnpackedCheckpoint(Checkpoint(root), weights).array("l.weight"))


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_integers_are_those_of_compressed_tensors(bits: int, is_symmetric: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="not installed: compressed-tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": is_symmetric}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    state = {
        "weight": WEIGHT,
        "weight_scale": WEIGHT.reshape(96, 6, 32).abs().amax(-1) / (2 ** (bits - 1) - 1),
        "weight_zero_point": torch.full((96, 6), 0 if is_symmetric else 2, dtype=torch.int8),
    }
    packed = PackedQuantizationCompressor.compress(dict(state), scheme)
    theirs = PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"].float().numpy()
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    assert np.array_equal(unpacked(packed, config | {"format": "pack-quantized"}, tmp_path), theirs)


@pytest.mark.parametrize("is_nested", [False, True])
def test_nf4_is_that_of_bitsandbytes(is_nested: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="not installed: bitsandbytes")
    packed, state = functional.quantize_4bit(WEIGHT, blocksize=64, quant_type="nf4", compress_statistics=is_nested)
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    ours = unpacked({"weight": packed} | parts, {"quant_method": "bitsandbytes", "load_in_4bit": True}, tmp_path)
    assert np.array_equal(ours, functional.dequantize_4bit(packed, state).numpy())
