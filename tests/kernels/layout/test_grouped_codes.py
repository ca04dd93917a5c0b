"""Groups of codes as their file has them, against their formula number by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout.grouped_codes import TABLES, GroupedCodes, GroupedFormat, Packing, as_floats


def random_codes(form: GroupedFormat, rows: int, k: int, seed: int = 0, packing: Packing = "bytes") -> GroupedCodes:
    """Random codes and scales of that format, of both signs and some zeros."""
    rng = np.random.default_rng(seed)
    groups, supers = form.num_groups(k), form.num_supers(k)

    def numbers(kind: str) -> Any:
        drawn = rng.normal(0, 0.05, (rows, supers)).astype(np.float32)
        if kind == "e8m0":
            return rng.integers(115, 125, (rows, supers)).astype(np.uint8)
        return (
            (drawn.view(np.uint32) >> 16).astype(np.uint16)
            if kind == "bf16"
            else drawn.astype({"f16": "f2"}.get(kind, "f4"))
        )

    codes = rng.integers(0, 1 << form.bits, (rows, k)).astype(np.uint8)
    if packing != "bytes":
        half = {"pairs": 1, "halves_of_32": 16, "halves_of_64": 32}[packing]
        parts = codes.reshape(rows, -1, 2, half)
        codes = (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(rows, k // 2)
    low, high, kind = (-128, 128, np.int8) if form.has_signed_scales else (0, 64, np.uint8)
    has_subs = form.super_group is not None
    return GroupedCodes(
        format=form,
        num_columns=k,
        codes=codes,
        packing=packing,
        scales=numbers(form.scale),
        zeros=rng.integers(0, 1 << form.bits, (rows, groups)).astype(np.uint8) if form.has_zeros else None,
        offsets=numbers(form.offset) if form.offset else None,
        sub_scales=rng.integers(low, high, (rows, groups)).astype(kind) if has_subs else None,
        sub_offsets=rng.integers(0, 64, (rows, groups)).astype(np.uint8) if has_subs and form.offset else None,
    )


FORMATS = {
    "q4_1": GroupedFormat(bits=4, group=32, offset="f16"),
    "q6_k": GroupedFormat(bits=6, group=16, zero=32, super_group=256, has_signed_scales=True),
    "q4_k": GroupedFormat(bits=4, group=32, super_group=256, offset="f16"),
    "awq": GroupedFormat(bits=4, group=128, has_zeros=True),
    "int8 rows": GroupedFormat(bits=8, group=1 << 20, zero=128, scale="bf16"),
    "mxfp4": GroupedFormat(bits=4, group=32, table="e2m1", scale="e8m0"),
    "nf4": GroupedFormat(bits=4, group=64, table="nf4", scale="f32"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_number_is_what_its_formula_says(name: str) -> None:
    form, k = FORMATS[name], 320
    codes = random_codes(form, 3, k)
    codes.check()
    numbers = codes.dequantize()
    scales, offsets = as_floats(codes.scales, form.scale), codes.offsets
    for i in range(3):
        for j in range(0, k, 7):
            g, s = j // form.group, j // (form.super_group or form.group)
            scale = scales[i, s] * np.float32(1 if codes.sub_scales is None else codes.sub_scales[i, g])
            value = TABLES[form.table][codes.codes[i, j]] - (form.zero if codes.zeros is None else codes.zeros[i, g])
            number = scale * np.float32(value)
            if offsets is not None:
                by = np.float32(1 if codes.sub_offsets is None else codes.sub_offsets[i, g])
                number = number + offsets[i, s].astype(np.float32) * by
            assert numbers[i, j] == number


@pytest.mark.parametrize("packing", ["pairs", "halves_of_32", "halves_of_64"])
def test_packed_halves_hold_the_codes_of_bytes(packing: Packing) -> None:
    form = FORMATS["q4_1"]
    plain, packed = random_codes(form, 2, 128), random_codes(form, 2, 128, packing=packing)
    packed.check()
    assert np.array_equal(plain.codes, packed.unpacked())
    assert np.array_equal(plain.dequantize(), packed.dequantize())


def test_columns_in_another_order_are_put_back() -> None:
    plain = random_codes(FORMATS["awq"], 2, 256)
    columns = np.random.default_rng(1).permutation(256).astype(np.int32)
    assert np.array_equal(replace(plain, columns=columns).dequantize()[:, columns], plain.dequantize())


def test_bits_of_a_weight_are_those_of_the_files() -> None:
    bits = {name: FORMATS[name].bits_per_weight(1024) for name in ("q4_1", "awq", "mxfp4")}
    assert bits == {"q4_1": 5.0, "awq": 4 + 24 / 128, "mxfp4": 4.25}
    assert FORMATS["q6_k"].bits_per_weight(256) == 210 * 8 / 256
    assert FORMATS["q4_k"].bits_per_weight(256) == 148 * 8 / 256  # the file packs the bytes of groups in 6 bits


def test_arrays_that_do_not_fit_are_named() -> None:
    codes = random_codes(FORMATS["q4_1"], 3, 64)
    with pytest.raises(ValueError, match=r"scales: float16 \(3, 1\)"):
        replace(codes, scales=codes.scales[:, :1].copy()).check()
    with pytest.raises(ValueError, match="offsets: must be given"):
        replace(codes, offsets=None).check()
    with pytest.raises(ValueError, match="packing pairs"):
        replace(codes, packing="pairs", num_columns=63).check()
    with pytest.raises(ValueError, match="bits = 9"):
        GroupedFormat(bits=9, group=32).check()


def test_rows_are_a_part_of_all_arrays() -> None:
    codes = random_codes(FORMATS["q4_k"], 5, 512)
    assert np.array_equal(codes.rows(2, 4).dequantize(), codes.dequantize()[2:4])
