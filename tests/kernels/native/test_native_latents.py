"""Layers whose cache keeps latents: against float64, and no bit depends on what else is in a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build
from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.errors import UnsupportedModelError
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, NativeHeads, NativeLatents, NativeQkNorm
from tests.kernels.native.test_native import AVAILABLE, DTYPES, SETS, error, tokens
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import LATENT_NORM, Array

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

# Heads and ranks: some in groups of rows that share keys, with odd ends; sizes within a vector, and over a panel
SIZES: dict[str, tuple[int, NativeLatents]] = {
    "direct": (5, NativeLatents(q_rank=None, kv_rank=40, nope_dim=12, rope_dim=8, value_dim=34)),
    "compressed": (18, NativeLatents(q_rank=26, kv_rank=64, nope_dim=16, rope_dim=32, value_dim=16)),
}


@cache
def checkpoint(name: str) -> Checkpoint:
    num_heads, latents = SIZES[name]
    heads = NativeHeads(num_heads=num_heads, num_kv_heads=1, head_dim=latents.kv_rank + latents.rope_dim)
    layer = {"heads": heads, "latents": latents, "attention_scale": 0.3, "qk_norm": NativeQkNorm(norm=LATENT_NORM)}
    return Checkpoint.random(layer=layer, rotary_dims=(latents.rope_dim,))


def load(name: str, dtype: DType, instruction_set: str | None = None, num_threads: int = 2) -> NativeModel:
    return checkpoint(name).load(dtype, instruction_set=instruction_set, num_threads=num_threads, worth_a_thread=1)


@cache
def exact(name: str) -> Array:
    return checkpoint(name).logits(tokens(300))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_over_latents_are_those_of_expanded_keys_in_float64(name: str, instruction_set: str) -> None:
    wide = Run(load(name, "float32", instruction_set)).whole(tokens(300), [7])
    half = Run(load(name, "bfloat16", instruction_set)).whole(tokens(300), [7])
    assert error(wide, exact(name)) < 3e-6
    assert error(half, exact(name)) < 0.02


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_over_latents_depends_on_cuts_blocks_threads_or_neighbours(name: str, dtype: DType) -> None:
    prompt, model = tokens(300), load(name, dtype)
    whole = Run(model).whole(prompt)
    for run, chunks in {
        "in odd pieces": (Run(model), [1, 15, 2, 100, 13]),
        "blocks of 4": (Run(model, block_size=4), [77, *[1] * 10]),
        "one thread": (Run(load(name, dtype, num_threads=1)), [100]),
        "five threads": (Run(load(name, dtype, num_threads=5)), [298]),
    }.values():
        assert np.array_equal(run.whole(prompt, chunks), whole)
    run = Run(model)
    run.step({0: prompt[:18], 1: tokens(9, 1), 2: tokens(4, 2)})
    while len(run.logits[0]) < 24:
        run.step({1: tokens(1, 3), 0: prompt[len(run.logits[0]) :][:1], 2: tokens(2, 4)})
    assert np.array_equal(np.array(run.logits[0]), whole[:24])
    last = Run(model).step({0: prompt}, {0: [299]})[0]  # the others end with the last layer's cache
    assert np.array_equal(last[0], whole[299])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_leave_what_makes_keys_and_values_as_it_is(quantization: Any) -> None:
    largest = {"int8": 1e-5, "int4": 3e-4}[quantization]  # rows of 16 bits are multiplied with int4
    for name in SIZES:
        model = checkpoint(name).load(quantization=quantization, num_threads=1)
        assert model.weights.type_of("model.layers.0.self_attn.kv_b_proj.weight") == "float32"
        assert model.weights.type_of("model.layers.0.self_attn.kv_a_proj_with_mqa.weight") == quantization
        kept = checkpoint(name).kept_by(model)
        assert error(Run(model).whole(tokens(40)), kept.logits(tokens(40))) < largest, name


def test_rows_of_the_matrix_of_keys_and_values_may_come_in_parts() -> None:
    made = checkpoint("direct")
    model = made.load(num_threads=2, worth_a_thread=1)
    whole = Run(model).whole(tokens(9))
    for index in (0, 1):
        name = f"model.layers.{index}.self_attn.kv_b_proj.weight"
        for first in range(0, len(made.tensors[name]), 7):
            model.weights.set_tensor_rows(name, first, made.tensors[name][first : first + 7])
    assert np.array_equal(Run(model).whole(tokens(9)), whole)


def test_a_block_holds_one_row_of_each_token_and_layer() -> None:
    """Of 48 numbers, padded to 64."""
    shape = checkpoint("direct").shape
    assert shape.bytes_per_block(16, "bfloat16") == 2 * 16 * 64 * 2
    cache = NativeCache.uniform(shape, 40, 16, "bfloat16")
    assert cache.data.shape == (3, 2, 1, 16, 16 * 64)
    (kind,) = cache.layout.kinds
    assert (kind.name, kind.num_kv_heads, kind.key_dim, kind.value_dim) == ("latent", 1, 48, 40)


def test_odd_sizes_of_latents_are_refused_by_name() -> None:
    layer = checkpoint("direct").shape.layers[0]
    odd = NativeLatents(q_rank=None, kv_rank=40, nope_dim=13, rope_dim=8, value_dim=34)
    with pytest.raises(UnsupportedModelError, match="nope_dim of latents = 13: must be even"):
        Checkpoint.random(
            layer={"heads": layer.heads, "latents": odd, "attention_scale": 0.3}, rotary_dims=(8,)
        ).shape.check()
