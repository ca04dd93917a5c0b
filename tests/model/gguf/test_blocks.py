"""Blocks of packed numbers: equal to those of the `gguf` package, to the bit."""

from __future__ import annotations

import os

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="not installed: gguf")

from millrace.model.gguf.blocks import BLOCKS, NAMES, unpack  # noqa: E402

COUNT = 4096 if os.environ.get("MILLRACE_FULL") else 64  # blocks of each type
PACKED = [name for name in BLOCKS if name not in ("F32", "F16")]


@pytest.mark.parametrize("name", PACKED)
def test_random_blocks_are_the_numbers_of_the_gguf_package(name: str) -> None:
    kind, block = getattr(gguf.GGMLQuantizationType, name), BLOCKS[name]
    raw = np.random.default_rng(3).integers(0, 256, (COUNT, block.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours = unpack(name, raw, (COUNT * block.size,))
        theirs = gguf.dequantize(raw, kind).reshape(-1).astype(np.float32)
    is_equal = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert is_equal.all(), f"{np.count_nonzero(~is_equal)} of {len(ours)} numbers differ"


def test_sizes_and_numbers_of_types_are_those_of_the_gguf_package() -> None:
    for name, block in BLOCKS.items():
        kind = getattr(gguf.GGMLQuantizationType, name)
        assert gguf.GGML_QUANT_SIZES[kind] == (block.size, block.num_bytes) and NAMES[int(kind)] == name


def test_a_tensor_of_many_blocks_is_unpacked_in_parts_without_a_seam() -> None:
    raw = np.random.default_rng(4).integers(0, 128, ((1 << 16) + 3, 34), dtype=np.uint8)
    whole = unpack("Q8_0", raw, (len(raw), 32))
    assert np.array_equal(whole[-5:], unpack("Q8_0", raw[-5:], (5, 32)), equal_nan=True)
