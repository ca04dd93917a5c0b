"""What a layer of the native step may compute besides Llama's: each piece against float64, and no bit of a token
depends on what else is in its step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build
from millrace.kernels.native.errors import UnsupportedModelError
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, NativeLayerInputs, NativeNorm, NativeQkNorm
from tests.kernels.native.test_native import AVAILABLE, DTYPES, SETS, error, tokens
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array, round_to_bfloat16, small_shape

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

RMS, LAYER = NativeNorm(eps=1e-5), NativeNorm(kind="layer", eps=1e-3)
INPUTS = NativeLayerInputs(rows=130, width=20, activation="gelu_tanh", norm=RMS, scale=4.5, projection_scale=0.2)
NO_NORMS: dict[str, Any] = {"pre_mixer": None, "pre_feed": None}
PIECES: dict[str, dict[str, Any]] = {
    "gelu": {"layer": {"activation": "gelu"}},
    "gelu by tanh": {"layer": {"activation": "gelu_tanh"}},
    "relu": {"layer": {"activation": "relu"}},
    "squared relu": {"layer": {"activation": "relu2"}},
    "xielu, not gated": {"layer": {"activation": "xielu", "is_gated": False}},
    "not gated, biases": {"layer": {"activation": "gelu_tanh", "is_gated": False}, "has_bias": True},
    "not gated, odd sizes": {"layer": {"is_gated": False}, "intermediate_size": 46, "hidden_size": 46},
    "layers of two widths": {"last": {"intermediate_size": 40, "is_gated": False, "activation": "gelu"}},
    "layer norms": {"layer": {"pre_mixer": LAYER, "pre_feed": LAYER}, "final_norm": LAYER, "has_norm_bias": True},
    "layer norms, odd sizes": {"layer": {"pre_mixer": LAYER, "pre_feed": LAYER}, "hidden_size": 46},
    "rms norms with a bias": {"has_norm_bias": True},
    "norms without weights": {"has_norm_weight": False, "has_qk_norm": True},
    "norms of branches alone": {"layer": {**NO_NORMS, "post_mixer": RMS, "post_feed": RMS}},
    "norms before and behind": {"layer": {"post_mixer": RMS, "post_feed": LAYER}, "has_norm_bias": True},
    "scaled residuals": {"layer": {"residual_scale": 0.22}},
    "scaled residuals behind norms": {"layer": {"residual_scale": 0.22, "post_mixer": RMS}},
    "parallel, one norm": {"layer": {"is_parallel": True, "pre_feed": None, "pre_mixer": LAYER}},
    "parallel, two norms": {"layer": {"is_parallel": True}, "last": {"is_parallel": False}},
    "parallel, norms behind": {"layer": {"is_parallel": True, "post_mixer": RMS, "post_feed": RMS}},
    "two tables, a layer without": {
        "num_layers": 3,
        "sliding_windows": (None, 40, None),
        "rotary_dims": (32, 16),
        "layer": {"rope": 1},
        "last": {"rope": None},
    },
    "tempered queries": {"layer": {"query_temper": (0.5, 16)}},
    "scaled scores": {"layer": {"attention_scale": 0.3}},
    "capped scores": {"layer": {"soft_cap": 2.0}, "sliding_windows": (40, None)},
    "sinks": {"has_sinks": True, "sliding_windows": (40, None)},
    "head norms behind the rotation": {"layer": {"qk_norm": NativeQkNorm(norm=RMS, is_after_rope=True)}},
    "head norms over rows": {"layer": {"qk_norm": NativeQkNorm(norm=RMS, is_over_row=True)}},
    "head norms with weights per head": {
        "layer": {"qk_norm": NativeQkNorm(norm=LAYER, has_weight_per_head=True)},
        "has_norm_bias": True,
        "head_dim": 26,
        "rotary_dim": 26,
    },
    "learned positions": {
        "layer": {"rope": None},
        "rotary_dims": (),
        "num_learned_positions": 302,
        "position_offset": 2,
        "num_positions": 300,
    },
    "a scaled embedding with a norm": {"embedding_scale": 8.0, "embedding_norm": LAYER, "has_norm_bias": True},
    "a scaled, untied embedding": {"embedding_scale": 0.5, "is_tied": False},
    "a capped head with a bias": {"head_scale": 0.5, "head_soft_cap": 3.0, "has_head_bias": True},
    "a scaled head": {"head_scale": 0.125, "is_tied": False},
    "keys that are values": {"layer": {"is_k_v": True, "v_norm": RMS}, "has_qk_norm": True, "last": {"is_k_v": False}},
    "a layer that reads another's cache": {
        "num_layers": 3,
        "sliding_windows": (40, None, 40),
        "has_qk_norm": True,
        "last": {"kv_of": 0},
    },
    "scaled outputs": {"layer": {"has_output_scale": True}},
    "inputs of each layer": {"layer_inputs": INPUTS, "layer": {"has_output_scale": True}},
}


@cache
def checkpoint(name: str) -> Checkpoint:
    return Checkpoint.random(**PIECES[name])


def load(name: str, dtype: DType, instruction_set: str | None = None, num_threads: int = 2) -> NativeModel:
    return checkpoint(name).load(dtype, instruction_set=instruction_set, num_threads=num_threads, worth_a_thread=1)


@cache
def exact(name: str) -> Array:
    return checkpoint(name).logits(tokens(300))


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_are_those_of_float64_with_each_piece(name: str, instruction_set: str) -> None:
    wide = Run(load(name, "float32", instruction_set)).whole(tokens(300), [7])
    half = Run(load(name, "bfloat16", instruction_set)).whole(tokens(300), [7])
    assert error(wide, exact(name)) < 3e-6
    assert error(half, exact(name)) < 0.02


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_cuts_blocks_threads_or_neighbours_with_any_piece(name: str, dtype: DType) -> None:
    """300 tokens pass a chunk of 256 keys. The first run of several sequences has 31 rows, more than a tile."""
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


@pytest.mark.parametrize(
    "name", ["parallel, one norm", "norms before and behind", "sinks", "a capped head with a bias"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_requested_logits_leave_those_that_are_requested_as_they_are(name: str, dtype: DType) -> None:
    model, prompt = load(name, dtype), tokens(60)
    whole, last = Run(model).whole(prompt), Run(model).step({0: prompt}, {0: [59]})[0]
    assert np.array_equal(last[0], whole[59])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_take_all_pieces(quantization: Any) -> None:
    largest = {"int8": 1e-5, "int4": 3e-4}[quantization]  # rows of 16 bits are multiplied with int4
    names = ("xielu, not gated", "parallel, one norm", "a capped head with a bias", "learned positions")
    for name in (*names, "keys that are values", "inputs of each layer"):
        model = checkpoint(name).load(quantization=quantization, num_threads=1)
        kept = checkpoint(name).kept_by(model)
        assert error(Run(model).whole(tokens(40)), kept.logits(tokens(40))) < largest, name


@pytest.mark.parametrize("is_exact", [True, False])
def test_an_exact_norm_keeps_its_weight_in_float32(is_exact: bool) -> None:
    norm = NativeNorm(eps=1e-5, is_exact=is_exact)
    made = Checkpoint.random(final_norm=norm)
    made.tensors["model.norm.weight"] = 1 + made.tensors["model.norm.weight"] / 1000
    model = made.load("bfloat16", num_threads=1)
    kept = made.tensors["model.norm.weight"] if is_exact else round_to_bfloat16(made.tensors["model.norm.weight"])
    hidden = np.ones((1, 64), np.float32)
    np.testing.assert_allclose(model.normed(hidden)[0], kept / np.sqrt(1 + 1e-5), rtol=1e-6)


def test_an_embeddings_scale_is_rounded_to_the_dtype_first() -> None:
    made = Checkpoint.random(embedding_scale=55.42562584220407)  # the root of 3,072: 55.5 in bfloat16
    hidden = {dtype: _first_hidden(made, dtype) for dtype in DTYPES}
    embedding = made.tensors["model.embed_tokens.weight"][5]
    scale = {"float32": np.float32(55.42562584220407), "bfloat16": np.float32(55.5)}
    for dtype in DTYPES:
        assert np.array_equal(hidden[dtype], embedding * scale[dtype])


def _first_hidden(made: Checkpoint, dtype: DType) -> Array:
    """The residual of token 5 through layers that add nothing."""
    for name, tensor in made.tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
    model, hidden = made.load(dtype, num_threads=1), np.empty((1, 64), np.float32)
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int32)
    model.step(
        Run(model, num_blocks=1).cache,
        input_ids=np.array([5]),
        positions=zero,
        slot_mapping=zero,
        block_tables=np.zeros((1, 1), np.int32),
        query_starts=np.array([0, 1], np.int32),
        lengths=one,
        hidden=hidden,
    )
    return hidden[0]


@pytest.mark.parametrize("change", [{"head_soft_cap": 2.0, "head_scale": 0.25}, {"has_head_bias": True}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_likeliest_token_is_that_of_the_logits_with_a_cap_and_with_a_bias(
    dtype: DType, change: dict[str, Any]
) -> None:
    made = Checkpoint.random(vocab_size=40_000, is_tied=False, **change)  # large enough for a screen
    model = made.load(dtype, num_threads=2, worth_a_thread=1)
    assert (model.weights.screen_bytes > 0) == ("has_head_bias" not in change)
    run, prompt = Run(model), tokens(20)
    logits = run.whole(prompt)
    found, inputs = (np.zeros(20, np.int64), np.zeros(20, np.bool_)), np.arange(20)
    fresh = Run(model)
    model.step(
        fresh.cache,
        input_ids=np.array(prompt),
        positions=inputs,
        slot_mapping=inputs,
        block_tables=np.array([[0, 1]], np.int32),
        query_starts=np.array([0, 20], np.int32),
        lengths=np.array([20], np.int32),
        logits_rows=inputs,
        likeliest=found,
    )
    assert np.array_equal(found[0], logits.argmax(1)) and not found[1].any()


def test_positions_past_the_learned_ones_and_tables_of_other_sizes_are_refused() -> None:
    made = checkpoint("learned positions")
    with pytest.raises(ValueError, match="301 positions: the model has learned 300"):
        made.load().set_positions([], 301)
    two = checkpoint("two tables, a layer without").load(num_threads=1)
    (cos, sin), short = two_tables = checkpoint("two tables, a layer without").ropes
    with pytest.raises(ValueError, match=r"must be \(1200, 16\), \(1200, 8\)"):
        two.set_positions([(cos, sin)], 1200)
    with pytest.raises(ValueError, match=r"must be \(7, 16\), \(7, 8\)"):
        two.set_positions(two_tables, 7)
    two.set_positions([(cos[:7], sin[:7]), (short[0][:7], short[1][:7])], 7)
    assert two.max_positions == 7
    with pytest.raises(ValueError, match="position is past"):
        Run(two).whole(tokens(8))


def test_what_the_native_step_lacks_is_named() -> None:
    assert small_shape().gaps() == []
    shape = small_shape(hidden_size=63, last={"intermediate_size": 41}, head_scale=0.0)
    assert [gap.partition(":")[0] for gap in shape.gaps()] == [
        "hidden_size = 63",
        "intermediate_size = 41",
        "scale of logits = 0",
    ]
    with pytest.raises(UnsupportedModelError, match=r"hidden_size = 63: must be even.*; intermediate_size = 41"):
        shape.check()
