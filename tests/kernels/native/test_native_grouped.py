"""Matrices in groups of codes: their products against the twin in numpy, to the bit, and whole steps with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout.grouped_codes import GroupedCodes, GroupedFormat
from millrace.kernels.native import build, grouped
from millrace.kernels.native.errors import NonFiniteError
from millrace.kernels.native.model import NativeModel
from millrace.kernels.reference.grouped import fused, grouped_product
from tests.counts import FULL
from tests.kernels.layout.test_grouped_codes import random_codes
from tests.kernels.native.test_native import AVAILABLE, SETS, error, tokens
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import small_shape

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

DOWN = "model.layers.0.mlp.down_proj.weight"
TWO_LEVEL: dict[str, Any] = {"super_group": 256}
FORMATS = {
    "Q4_0": GroupedFormat(bits=4, group=32, zero=8),
    "Q4_1": GroupedFormat(bits=4, group=32, offset="f16"),
    "Q5_0": GroupedFormat(bits=5, group=32, zero=16),
    "Q5_1": GroupedFormat(bits=5, group=32, offset="f16"),
    "Q8_0": GroupedFormat(bits=8, group=32, zero=128),
    "Q2_K": GroupedFormat(bits=2, group=16, offset="f16", **TWO_LEVEL),
    "Q3_K": GroupedFormat(bits=3, group=16, zero=4, has_signed_scales=True, **TWO_LEVEL),
    "Q4_K": GroupedFormat(bits=4, group=32, offset="f16", **TWO_LEVEL),
    "Q5_K": GroupedFormat(bits=5, group=32, offset="f16", **TWO_LEVEL),
    "Q6_K": GroupedFormat(bits=6, group=16, zero=32, has_signed_scales=True, **TWO_LEVEL),
    "IQ4_NL": GroupedFormat(bits=4, group=32, table="iq4"),
    "IQ4_XS": GroupedFormat(bits=4, group=32, table="iq4", has_signed_scales=True, **TWO_LEVEL),
    "MXFP4": GroupedFormat(bits=4, group=32, table="e2m1", scale="e8m0"),
    "NVFP4": GroupedFormat(bits=4, group=16, table="e2m1"),
    "nf4": GroupedFormat(bits=4, group=64, table="nf4", scale="f32"),
    "AWQ": GroupedFormat(bits=4, group=128, has_zeros=True),
    "GPTQ, 3 bits": GroupedFormat(bits=3, group=64, has_zeros=True),
    "7 bits": GroupedFormat(bits=7, group=32, zero=64, scale="bf16"),
    "int8 rows": GroupedFormat(bits=8, group=1 << 20, zero=128, scale="bf16"),
    "groups of 256": GroupedFormat(bits=4, group=256, zero=8, scale="f32", offset="bf16"),
}
KERNELS = ["byte dots", "plain"]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    library = model_of(FORMATS["Q4_0"], 32, 32)._library
    library.millrace_use_plain_kernels(request.param == "plain")
    yield request.param
    library.millrace_use_plain_kernels(False)


def model_of(form: GroupedFormat, n: int, k: int, instruction_set: str | None = None, threads: int = 1) -> NativeModel:
    """A model whose matrix DOWN is [n, k]."""
    shape = small_shape(hidden_size=n, intermediate_size=k, num_layers=1)
    tables = [(np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32))]
    settings: Any = {"formats": {DOWN: form}, "instruction_set": instruction_set, "num_threads": threads}
    return NativeModel(shape, "float32", tables, 1, **settings, worth_a_thread=1)


def packed(codes: GroupedCodes, **settings: Any) -> NativeModel:
    model = model_of(codes.format, codes.num_rows, codes.num_columns, **settings)
    middle = codes.num_rows // 3
    model.weights.set_rows(DOWN, middle, codes.rows(middle, codes.num_rows))
    model.weights.set_rows(DOWN, 0, codes.rows(0, middle))
    return model


def rows(count: int, k: int, seed: int = 0) -> Any:
    """Normal rows, with one of zeros, one of ones and one whose largest number is far from the others."""
    x = np.random.default_rng(seed).standard_normal((count, k)).astype(np.float32)
    if count > 4:
        x[1], x[2], x[3, 5] = 0, 1, -3000
    return x


@pytest.mark.parametrize("name", FORMATS)
def test_packed_rows_read_back_as_the_file_has_them(name: str) -> None:
    for n, k in ((70, 320), (32, 64), (34, 608)):
        if k % 32 == 0 or FORMATS[name].group >= k:
            codes = random_codes(FORMATS[name], n, k, seed=n)
            read, wanted = packed(codes).weights.matrix(DOWN, n, k), codes.dequantize()
            if name in ("AWQ", "GPTQ, 3 bits", "nf4"):  # a zero is an offset here, and nf4 has 16 bits
                assert np.abs(read - wanted).max() < 4e-5 * np.abs(wanted).max()
            else:
                assert np.array_equal(read, wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_twin_to_the_bit(name: str, kernels: str) -> None:
    sizes = [(70, 320), (34, 48 if FORMATS[name].group == 16 else 96)]
    for n, k in sizes + ([(32, 32), (130, 1088)] if FULL else []):
        codes = replace(random_codes(FORMATS[name], n, k, seed=k), factor=1.0 if name != "NVFP4" else 0.37)
        x = rows(7, k)
        assert np.array_equal(packed(codes).weights.product(DOWN, x, n), grouped_product(x, codes))


@pytest.mark.parametrize("instruction_set", SETS)
def test_every_instruction_set_gives_the_bits_of_the_twin(instruction_set: str) -> None:
    for name in ("Q4_1", "Q5_0", "Q6_K", "Q8_0", "IQ4_XS"):
        codes = random_codes(FORMATS[name], 70, 352, seed=3)
        for count in (1, 2, 5, 17, 33, 70):
            x = rows(count, 352, seed=count)
            model = packed(codes, instruction_set=instruction_set, threads=2)
            assert np.array_equal(model.weights.product(DOWN, x, 70), grouped_product(x, codes))


@pytest.mark.parametrize("instruction_set", SETS)
def test_columns_in_another_order_give_the_bits_of_the_twin(instruction_set: str) -> None:
    columns = np.random.default_rng(2).permutation(352).astype(np.int32)
    codes = replace(random_codes(FORMATS["GPTQ, 3 bits"], 70, 352, seed=3), columns=columns)
    model = packed(codes, instruction_set=instruction_set, threads=2)
    for count in (1, 7, 17, 33):
        x = rows(count, 352, seed=count)
        assert np.array_equal(model.weights.product(DOWN, x, 70), grouped_product(x, codes))
    wanted = codes.dequantize()
    assert np.abs(model.weights.matrix(DOWN, 70, 352) - wanted).max() < 4e-5 * np.abs(wanted).max()


def test_a_product_has_one_order_of_columns() -> None:
    codes = random_codes(FORMATS["Q4_0"], 40, 64)
    columns = np.arange(64, dtype=np.int32)[::-1].copy()
    model = packed(replace(codes, columns=columns))
    for other in (None, np.arange(64, dtype=np.int32)):
        with pytest.raises(ValueError, match="its columns are in another order than those of its product"):
            model.weights.set_rows(DOWN, 0, replace(codes, columns=other))
    for wrong in (np.zeros(64, np.int32), columns.astype(np.int64), columns + 1):
        with pytest.raises(ValueError, match="columns: must be each of 64 once, as int32"):
            packed(replace(codes, columns=wrong))
    shape = small_shape(hidden_size=64, intermediate_size=64, num_layers=1)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    formats = dict.fromkeys(names, FORMATS["Q4_0"])
    assert grouped.packable(shape, formats, columns=dict.fromkeys(names, columns)).keys() == set(names)
    assert not grouped.packable(shape, formats, columns={names[0]: columns})


@pytest.mark.parametrize("scale", ["f16", "bf16", "f32"])
def test_a_scale_of_exactly_a_row_is_that_of_the_row_at_any_width(scale: Any, kernels: str) -> None:
    for k in (96, 160, 192, 224, 288):
        codes = random_codes(GroupedFormat(bits=8, group=k, zero=128, scale=scale), 34, k, seed=k)
        model, x = packed(codes), rows(7, k)
        assert np.array_equal(model.weights.matrix(DOWN, 34, k), codes.dequantize())
        assert np.array_equal(model.weights.product(DOWN, x, 34), grouped_product(x, codes))


def test_formats_that_products_do_not_follow_are_refused() -> None:
    zeros: dict[str, Any] = {"bits": 4, "group": 32, "has_zeros": True}
    assert grouped.why_not(GroupedFormat(**zeros), 256) is None
    assert grouped.why_not(GroupedFormat(**zeros, table="e2m1"), 256) == "zeros of groups with e2m1"
    assert grouped.why_not(GroupedFormat(**zeros, **TWO_LEVEL), 256) == "zeros of groups with two levels of scales"
    codes = replace(random_codes(FORMATS["nf4"], 32, 64), factor=0.5)
    with pytest.raises(ValueError, match="factor = 0.5: must be 1 with the table nf4"):
        packed(codes)


@pytest.mark.parametrize("packing", ["pairs", "halves_of_32", "halves_of_64"])
def test_codes_may_come_in_halves_of_bytes(packing: Any) -> None:
    codes = random_codes(FORMATS["Q4_1"], 40, 128, packing=packing)
    assert np.array_equal(packed(codes).weights.matrix(DOWN, 40, 128), codes.dequantize())


def test_the_largest_codes_and_rows_do_not_overflow(kernels: str) -> None:
    for name in ("int8 rows", "Q8_0", "Q4_1", "Q5_0", "Q6_K"):
        codes = random_codes(FORMATS[name], 32, 512)
        for code in (0, (1 << codes.format.bits) - 1):
            extreme = replace(codes, codes=np.full_like(codes.codes, code))
            x = np.stack([np.ones(512), -np.ones(512), np.tile([1, -1], 256)] * 6).astype(np.float32)  # tiles, too
            assert np.array_equal(packed(extreme).weights.product(DOWN, x, 32), grouped_product(x, extreme))


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    codes = random_codes(FORMATS["Q4_K"], 96, 512)
    model, x = packed(codes, threads=2), rows(70, 512)
    together = model.weights.product(DOWN, x, 96)
    for count in (1, 2, 3, 4, 5, 12, 16, 17, 32, 33, 69):
        assert np.array_equal(model.weights.product(DOWN, x[70 - count :], 96), together[70 - count :])


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other() -> None:
    codes = random_codes(FORMATS["Q8_0"], 32, 64)
    x = rows(3, 64)
    x[0, 3], x[2, 7] = np.nan, np.inf
    y = packed(codes).weights.product(DOWN, x, 32)
    assert np.isnan(y[0]).all() and np.isnan(y[2]).all() and np.array_equal(y[1:2], grouped_product(x[1:2], codes))


def test_a_scale_that_is_not_finite_is_refused() -> None:
    codes = random_codes(FORMATS["Q4_0"], 32, 64)
    codes.scales[5, 1] = np.inf
    with pytest.raises(NonFiniteError, match="down_proj"):
        packed(codes)


def test_fused_rounds_once() -> None:
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(2000).astype(np.float32) for _ in "ab")
    c = (-(a.astype(np.float64) * b) * (1 + draw.choice([0.0, 1e-7, 3e-8], 2000))).astype(np.float32)
    exact = a.astype(np.longdouble) * b + c
    assert np.array_equal(fused(a, b, c), exact.astype(np.float32))


# -- whole steps


def formats_of(shape: Any, **differing: str) -> dict[str, GroupedFormat]:
    """Formats of all matrices: Q4_1, and of those whose name ends so another."""
    names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "qkvo"]
    names += [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(2) for part in ("gate", "up", "down")]
    names += ["model.embed_tokens.weight"] + ([] if shape.is_tied else ["lm_head.weight"])
    chosen = {name: next((f for part, f in differing.items() if part in name), "Q4_1") for name in names}
    return {name: FORMATS[form] for name, form in chosen.items()}


def quantized(checkpoint: Checkpoint, formats: dict[str, GroupedFormat]) -> dict[str, GroupedCodes]:
    found = {}
    for seed, (name, form) in enumerate(formats.items()):
        codes = random_codes(form, *checkpoint.tensors[name].shape, seed=seed)
        if form.offset is None:
            found[name] = codes
        else:  # numbers around 0
            offsets = (-7.5 * codes.scales.astype(np.float32)).astype(np.float16)
            found[name] = replace(codes, offsets=offsets)
    return found


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_is_that_of_the_dequantized_checkpoint(is_tied: bool, dtype: Any) -> None:
    checkpoint = Checkpoint.random(is_tied=is_tied, hidden_size=64, has_bias=True)
    formats = formats_of(checkpoint.shape, v_proj="Q8_0", down="Q5_0")
    assert grouped.packable(checkpoint.shape, formats) == formats
    codes = quantized(checkpoint, formats)
    plain = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in codes}
    model = replace(checkpoint, tensors=plain).load(dtype, formats=formats, num_threads=2, worth_a_thread=1)
    for name, one in codes.items():
        model.weights.set_rows(name, 0, one)
    numbers = {name: one.dequantize() for name, one in codes.items()}
    exact = replace(checkpoint, tensors=plain | numbers).logits(tokens(60))
    whole = Run(model).whole(tokens(60))
    assert error(whole, exact) < (1e-3 if dtype == "float32" else 2e-2)
    assert np.array_equal(Run(model).whole(tokens(60), [1] * 60), whole)


def test_q_k_and_v_with_other_factors_are_set_as_numbers() -> None:
    checkpoint = Checkpoint.random(hidden_size=64)
    formats = {name: FORMATS["NVFP4"] for name in formats_of(checkpoint.shape)}
    factors = {name: {"q": 3.0, "k": 0.5, "v": 2.0}.get(name[-13], 1.0) for name in formats}
    assert set(factors.values()) == {3.0, 0.5, 2.0, 1.0}
    codes = {name: replace(one, factor=factors[name]) for name, one in quantized(checkpoint, formats).items()}
    numbers = {name: one.dequantize() for name, one in codes.items()}
    formats = grouped.packable(checkpoint.shape, formats, factors)
    assert {name[-13] for name in codes.keys() - formats.keys()} == set("qkv")
    plain = {name: numbers.get(name, one) for name, one in checkpoint.tensors.items() if name not in formats}
    model = replace(checkpoint, tensors=plain).load("float32", formats=formats, num_threads=2, worth_a_thread=1)
    for name in formats:
        model.weights.set_rows(name, 0, codes[name])
    exact = replace(checkpoint, tensors=plain | numbers).logits(tokens(40))
    whole = Run(model).whole(tokens(40))
    assert error(whole, exact) < 1e-3
    assert np.array_equal(Run(model).whole(tokens(40), [1] * 40), whole)


def test_another_factor_in_one_product_is_refused() -> None:
    checkpoint = Checkpoint.random(hidden_size=64)
    formats = {name: FORMATS["NVFP4"] for name in formats_of(checkpoint.shape)}
    gate, up, v = (f"model.layers.0.{name}_proj.weight" for name in ("mlp.gate", "mlp.up", "self_attn.v"))
    kept = grouped.packable(checkpoint.shape, formats, {up: 2.0})
    assert set(formats) - set(kept) == {gate, up}
    model, codes = checkpoint.load("float32", formats=formats, num_threads=1), quantized(checkpoint, formats)
    model.weights.set_rows(gate, 0, codes[gate])
    with pytest.raises(ValueError, match=r"up_proj.weight: factor = 2.0: rows of the same product have 1.0"):
        model.weights.set_rows(up, 0, replace(codes[up], factor=2.0))
    odd = small_shape(head_dim=26, rotary_dim=26, num_heads=7, num_kv_heads=1)
    formats = formats_of(odd)
    assert v not in grouped.packable(odd, formats, {v: 2.0}) and v in grouped.packable(odd, formats)


def test_matrices_that_are_one_product_keep_formats_together_or_not_at_all() -> None:
    shape = small_shape()
    formats = formats_of(shape)
    assert grouped.packable(shape, formats) == formats
    without = {name: form for name, form in formats.items() if "0.self_attn.k_proj" not in name}
    assert set(formats) - set(grouped.packable(shape, without)) == {
        f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"
    }
    differing = formats_of(shape, up_proj="Q8_0")
    assert not any("gate" in name or "up_proj" in name for name in grouped.packable(shape, differing))
    odd = small_shape(head_dim=26, rotary_dim=26, num_heads=7, num_kv_heads=1)
    assert not any("v_proj" in name for name in grouped.packable(odd, formats_of(odd, v_proj="Q8_0")))
    assert any("v_proj" in name for name in grouped.packable(odd, formats_of(odd)))


@pytest.mark.parametrize("kept", ["lm_head", "down_proj", "qkv"])
def test_matrices_without_a_format_are_multiplied_beside_packed_ones(kept: str) -> None:
    checkpoint = Checkpoint.random(is_tied=False)
    formats = formats_of(checkpoint.shape)
    is_kept = {name for name in formats if kept in name or (kept == "qkv" and any(f"{p}_proj" in name for p in "qkv"))}
    formats = {name: form for name, form in formats.items() if name not in is_kept}
    codes = quantized(checkpoint, formats)
    plain = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in codes}
    model = replace(checkpoint, tensors=plain).load("float32", formats=formats, num_threads=2, worth_a_thread=1)
    for name, one in codes.items():
        model.weights.set_rows(name, 0, one)
    numbers = {name: one.dequantize() for name, one in codes.items()}
    exact = replace(checkpoint, tensors=plain | numbers).logits(tokens(30))
    whole = Run(model).whole(tokens(30))
    assert error(whole, exact) < 1e-3
    assert np.array_equal(Run(model).whole(tokens(30), [1] * 30), whole)
