"""Recurrent layers in the native step against float64, and no bit of a token depends on what else is in its step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build
from millrace.kernels.native.errors import UnsupportedModelError
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, NativeNorm, NativeQkNorm, NativeRecurrent
from tests.counts import FULL
from tests.kernels.native.test_native import AVAILABLE, DTYPES, SETS, error, tokens
from tests.kernels.native_run import Run, state_of
from tests.kernels.native_weights import Array
from tests.kernels.recurrent_oracle import RecurrentCheckpoint

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

RMS = NativeNorm(eps=1e-5)
ATTENTION: dict[str, Any] = {"qk_norm": NativeQkNorm(norm=RMS), "has_output_gate": True}
COUNT = 75  # tokens: more than a recurrence takes at once


def net(kind: Any, **sizes: Any) -> dict[str, Any]:
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 32, "conv_width": 4} | sizes
    return {"recurrent": NativeRecurrent(kind=kind, **({"norm": RMS} | sizes))}


def conv(**sizes: Any) -> dict[str, Any]:
    return {"recurrent": NativeRecurrent(kind="short_conv", **({"value_dim": 64, "conv_width": 3} | sizes))}


NO_MIXER: dict[str, Any] = {"has_mixer": False, "pre_mixer": None}
NO_FEED: dict[str, Any] = {"intermediate_size": 0, "pre_feed": None}
MODELS: dict[str, dict[str, Any]] = {
    "delta nets and gated attention": {"layers": (net("gdn"), ATTENTION), "rotary_dim": 8},
    "delta nets, odd sizes": {
        "layers": (ATTENTION, net("gdn", num_value_heads=6, key_dim=11, value_dim=41, conv_width=3)),
        "hidden_size": 46,
        "head_dim": 26,
        "rotary_dim": 26,
    },
    "mamba2, groups normed together": {
        "layers": (net("mamba2", norm_group=64, step_limit=(0.4, 0.9)), {}, net("mamba2", norm_group=64)),
        "has_bias": True,
    },
    "mamba2, odd sizes, without a norm": {
        "layers": ({}, net("mamba2", key_dim=21, value_dim=35, num_key_heads=1, norm=None)),
    },
    "short convolutions": {"layers": (conv(), {"qk_norm": NativeQkNorm(norm=RMS)}, conv()), "has_bias": True},
    "short convolutions, odd sizes": {"layers": (conv(value_dim=74, conv_width=16), {}), "hidden_size": 46},
    "layers of one part": {
        "layers": (
            net("mamba2") | NO_FEED,
            {**NO_MIXER, "is_gated": False, "activation": "relu2"},
            {"rope": None, **NO_FEED},
            NO_MIXER,
        ),
    },
}


@cache
def checkpoint(name: str) -> RecurrentCheckpoint:
    found: RecurrentCheckpoint = RecurrentCheckpoint.random(**MODELS[name])
    return found


def load(name: str, dtype: DType, instruction_set: str | None = None, num_threads: int = 2) -> NativeModel:
    return checkpoint(name).load(dtype, instruction_set=instruction_set, num_threads=num_threads, worth_a_thread=1)


@cache
def exact(name: str) -> Array:
    return checkpoint(name).logits(tokens(COUNT))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_are_those_of_float64(name: str, instruction_set: str) -> None:
    wide = Run(load(name, "float32", instruction_set)).whole(tokens(COUNT), [7])
    half = Run(load(name, "bfloat16", instruction_set)).whole(tokens(COUNT), [7])
    assert error(wide, exact(name)) < 1e-5
    assert error(half, exact(name)) < 0.03


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES if FULL else DTYPES[1:])
def test_no_bit_depends_on_cuts_threads_or_neighbours(name: str, dtype: DType) -> None:
    prompt, model = tokens(COUNT), load(name, dtype)
    whole = Run(model).whole(prompt)
    for run, chunks in {
        "in odd pieces": (Run(model), [1, 2, 1, 15, 40]),
        "token by token": (Run(model, block_size=4), [20, *[1] * 20]),
        "five threads": (Run(load(name, dtype, num_threads=5)), [64]),
    }.values():
        assert np.array_equal(run.whole(prompt, chunks), whole)
    run = Run(model)
    run.step({0: prompt[:18], 1: tokens(9, 1), 2: tokens(4, 2)})
    while len(run.logits[0]) < 24:
        run.step({1: tokens(1, 3), 0: prompt[len(run.logits[0]) :][:1], 2: tokens(2, 4)})
    assert np.array_equal(np.array(run.logits[0]), whole[:24])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_is_as_large_as_the_library_lays_it_out(dtype: DType) -> None:
    for name in ("delta nets, odd sizes", "mamba2, odd sizes, without a norm", "short convolutions, odd sizes"):
        model = load(name, dtype, num_threads=1)
        assert model._library.millrace_state_bytes(model._model) == model.shape.state_bytes(dtype) > 0, name


@pytest.mark.parametrize("name", MODELS)
def test_rows_without_logits_change_the_state_of_their_sequence(name: str) -> None:
    prompt, model = tokens(COUNT), load(name, "float32")
    whole, run = Run(model).whole(prompt), Run(model)
    run.step({0: prompt[:30], 1: prompt[:21]}, {0: [29]})
    asked = run.step({1: prompt[21:40], 0: prompt[30:60]}, {1: [17, 18], 0: [29]})
    assert np.array_equal(asked[1], whole[38:40]) and np.array_equal(asked[0], whole[59:60])
    assert np.array_equal(run.step({0: prompt[60:61]})[0], whole[60:61])


def test_the_rows_of_a_step_may_be_split_between_two_threads() -> None:
    name = "delta nets and gated attention"
    model, other = load(name, "float32", "avx2"), load(name, "float32", "avx2")
    model.in_library.assume_split(True)
    runs = [Run(model), Run(other)]
    for run in runs:
        run.step({sequence: tokens(3 + sequence, sequence) for sequence in range(9)})
    for step in range(3):
        parts = {sequence: tokens(1, 100 * step + sequence) for sequence in range(9)}
        found, wanted = (run.step(parts) for run in runs)
        assert all(np.array_equal(found[sequence], wanted[sequence]) for sequence in parts)


@pytest.mark.parametrize("name", ["delta nets, odd sizes", "mamba2, groups normed together", "short convolutions"])
def test_a_copied_state_goes_on_as_its_own(name: str) -> None:
    prompt, model = tokens(COUNT), load(name, "bfloat16")
    whole, run = Run(model).whole(prompt), Run(model)
    states = run.cache.states
    assert states is not None and states.layout.state_bytes == model.shape.state_bytes("bfloat16")
    run.step({0: prompt[:30]})
    own, other = np.array([state_of(0)]), np.array([state_of(1)])
    host = np.zeros((2, states.memory.shape[1]), np.uint8)
    states.copy_out(own, host, np.array([1]))
    states.copy(own, other)
    run.step({0: tokens(9, 8)}, {})  # of another answer
    run._tables[1], run._lengths[1] = list(run._tables[0]), 30
    run._lengths[0] = 30
    states.memory[own] = 0x7F
    states.copy_in(host, np.array([1]), own)
    run.step({0: prompt[30:31]})
    assert np.array_equal(run.logits[0][-1], whole[30])
    assert np.array_equal(run.step({1: prompt[30:33]})[1], whole[30:33])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "name", ["delta nets and gated attention", "mamba2, groups normed together", "short convolutions"]
)
def test_quantized_matrices_give_what_their_numbers_give(name: str, quantization: Any) -> None:
    model = checkpoint(name).load("float32", quantization=quantization, num_threads=2, worth_a_thread=1)
    kept = checkpoint(name).kept_by(model)
    assert error(Run(model).whole(tokens(40), [7]), kept.logits(tokens(40))) < 3e-3


def test_a_step_without_valid_slots_is_refused_before_it_computes_anything() -> None:
    run = Run(load("short convolutions", "float32"))
    assert run.cache.states is not None
    run.cache.slabs.num_states = state_of(0)
    before = run.cache.states.memory.copy()
    with pytest.raises(ValueError, match="has no slot, or one past the states"):
        run.step({0: [1, 2, 3]})
    assert np.array_equal(run.cache.states.memory, before)


def test_sizes_that_the_library_lacks_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a convolution over 17 tokens: must be at most 16"):
        RecurrentCheckpoint.random(layers=(conv(conv_width=17), {})).load()
    with pytest.raises(UnsupportedModelError, match="recurrent layers of 33 numbers: must be even"):
        RecurrentCheckpoint.random(layers=(conv(value_dim=33), {})).load()
