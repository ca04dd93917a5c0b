"""Experts in the codes of their file, for kernels that multiply codes: the numbers that the file's format gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from millrace.kernels.layout.grouped_codes import STORED, GroupedCodes, GroupedFormat
from millrace.model.errors import CheckpointError
from millrace.model.grouped_matrix import GroupedMatrix
from millrace.model.quantized.expert_codes import bits_per_number, coded_format, load_coded

K, ROWS, CPU = 96, 5, torch.device("cpu")
FORMATS = {
    "Q4_0": GroupedFormat(bits=4, group=32, zero=8),
    "Q4_K": GroupedFormat(bits=4, group=32, offset="f16", super_group=96),
    "Q8_0": GroupedFormat(bits=8, group=32, zero=128),
    "AWQ": GroupedFormat(bits=4, group=48, has_zeros=True),
    "MXFP4": GroupedFormat(bits=4, group=32, table="e2m1", scale="e8m0"),
    "nf4": GroupedFormat(bits=4, group=64, table="nf4", scale="f32"),
    "int3": GroupedFormat(bits=3, group=K, zero=4, scale="bf16"),
}


def drawn(form: GroupedFormat, seed: int) -> GroupedCodes:
    dice = np.random.default_rng(seed)

    def scales(columns: int) -> Any:
        if form.scale == "e8m0":
            return dice.integers(120, 130, (ROWS, columns)).astype(np.uint8)
        if form.scale == "bf16":
            return (dice.random((ROWS, columns), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return dice.random((ROWS, columns)).astype(STORED[form.scale])

    groups, supers = form.num_groups(K), form.num_supers(K)
    found = GroupedCodes(
        format=form,
        num_columns=K,
        codes=dice.integers(0, 1 << form.bits, (ROWS, K)).astype(np.uint8),
        scales=scales(supers),
        zeros=dice.integers(0, 16, (ROWS, groups)).astype(np.uint8) if form.has_zeros else None,
        offsets=-dice.random((ROWS, supers)).astype(np.float16) if form.offset else None,
        sub_scales=dice.integers(1, 64, (ROWS, groups)).astype(np.uint8) if form.super_group else None,
        sub_offsets=dice.integers(1, 64, (ROWS, groups)).astype(np.uint8) if form.super_group else None,
    )
    found.check()
    return found


class Source:
    """Matrices by name."""

    packing = "a test"

    def __init__(self, matrices: dict[str, GroupedCodes]) -> None:
        self.codes = matrices

    def grouped(self, name: str) -> GroupedMatrix:
        codes = self.codes[name]
        return GroupedMatrix(codes.format, ROWS, K, lambda index: codes.rows(index.start, index.stop))  # type: ignore[union-attr]

    def stored_name(self, name: str) -> str:
        return name

    def forget(self, name: str) -> None: ...


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_experts_stand_for_the_numbers_of_their_format(name: str) -> None:
    form, names = FORMATS[name], [["gate 0", "up 0"], ["gate 1", "up 1"], ["gate 2", "up 2"]]
    codes = {each: drawn(form, seed) for seed, each in enumerate(each for joined in names for each in joined)}
    source: Any = Source(codes)
    assert coded_format(source, names) == form
    stack = load_coded(source, names, form, CPU)
    want = [np.concatenate([codes[each].dequantize() for each in joined]) for joined in names]
    assert stack.shape == (3, 2 * ROWS, K)
    assert torch.equal(stack.numbers(), torch.from_numpy(np.stack(want)))
    held = sum(part.nbytes for part in stack.tensors() if part is not stack.table)
    assert held == bits_per_number(form, K) / 8 * 3 * 2 * ROWS * K


def test_experts_of_two_formats_are_unpacked() -> None:
    source: Any = Source({"a": drawn(FORMATS["Q4_0"], 0), "b": drawn(FORMATS["Q8_0"], 1)})
    assert coded_format(source, [["a"], ["b"]]) is None and coded_format(source, [["b"]]) == FORMATS["Q8_0"]


def test_scales_that_are_no_numbers_are_refused_by_name() -> None:
    codes = drawn(FORMATS["Q4_0"], 0)
    codes.scales[1, 1] = np.inf
    source: Any = Source({"blk.0.ffn": codes})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn: its scales hold NaN or infinity"):
        load_coded(source, [["blk.0.ffn"]], codes.format, CPU)
