"""Blocks of packed numbers: equal to those of the `gguf` package, to the bit."""

from __future__ import annotations

import os

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="not installed: gguf")

from millrace.model.gguf.blocks import BLOCKS, NAMES, matrix, unpack  # noqa: E402

COUNT = 4096 if os.environ.get("MILLRACE_FULL") else 64  # blocks of each type
PACKED = [name for name in BLOCKS if name not in ("F32", "F16")]


def blocks_of(name: str, count: int) -> np.ndarray:
    raw = np.random.default_rng(3).integers(0, 256, (count, BLOCKS[name].num_bytes), dtype=np.uint8)
    if name == "MXFP4":
        raw[raw[:, 0] == 255, 0] = 0  # an exponent that is no number
    return raw


@pytest.mark.parametrize("name", PACKED)
def test_random_blocks_are_the_numbers_of_the_gguf_package(name: str) -> None:
    kind, block = getattr(gguf.GGMLQuantizationType, name), BLOCKS[name]
    raw = blocks_of(name, COUNT)
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


@pytest.mark.parametrize("name", [name for name in PACKED if BLOCKS[name].format])
def test_rows_of_codes_are_the_numbers_of_the_tensor_in_any_order(name: str) -> None:
    block, shape = BLOCKS[name], (7, 2 * BLOCKS[name].size)
    raw = blocks_of(name, 14).reshape(-1)
    found = matrix(name, raw, shape)
    assert found is not None and found.shape == shape
    order = np.array([3, 2, 6, 0, 1])
    with np.errstate(all="ignore"):
        numbers = unpack(name, raw, shape)
        picked = (found.picked(order).rows(1, 5), found.picked(slice(2, 6)).rows(1, 3))
        parts = (found.rows(0, 3), found.rows(3, 7), *picked)
        for part, rows in zip(parts, ([0, 1, 2], [3, 4, 5, 6], [2, 6, 0, 1], [3, 4]), strict=True):
            part.check()
            assert np.array_equal(part.dequantize(), numbers[rows], equal_nan=True), rows
    assert block.format is not None
    bits = block.format.bits_per_weight(shape[1])
    assert bits >= 8 * block.num_bytes / block.size and bits - 8 * block.num_bytes / block.size < 0.8, "bytes of scales"


def test_an_exponent_that_is_no_number_is_infinite_or_none() -> None:
    assert not np.isfinite(unpack("MXFP4", np.full(17, 255, np.uint8), (32,))).any()


def test_vectors_and_numbers_of_16_bits_are_no_packed_matrices() -> None:
    assert matrix("F16", np.zeros(64, np.uint8), (1, 32)) is None
    assert matrix("Q8_0", np.zeros(34, np.uint8), (32,)) is None
