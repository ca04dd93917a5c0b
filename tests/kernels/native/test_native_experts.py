"""Experts in the native step: every way to choose them against float64, and no bit of a token depends on what else is
in its step."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout.grouped_codes import GroupedCodes
from millrace.kernels.native import build, grouped, loading, structs
from millrace.kernels.native.errors import UnsupportedModelError
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, NativeExperts, NativeNorm
from tests.counts import FULL
from tests.kernels.layout.test_grouped_codes import random_codes
from tests.kernels.native.test_native import AVAILABLE, DTYPES, SETS, error, tokens
from tests.kernels.native.test_native_grouped import FORMATS
from tests.kernels.native_oracle import Checkpoint, routed
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array, small_shape

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

RMS = NativeNorm(eps=1e-5)


def experts(num_experts: int = 7, top_k: int = 3, intermediate_size: int = 40, **fields: Any) -> NativeExperts:
    return NativeExperts(num_experts=num_experts, top_k=top_k, intermediate_size=intermediate_size, **fields)


def only(its: NativeExperts, **fields: Any) -> dict[str, Any]:
    """Layers with these experts alone."""
    return {"intermediate_size": 0, "layer": {"experts": its, **fields}}


DEEPSEEK: dict[str, Any] = {"score": "sigmoid", "num_groups": 4, "num_groups_kept": 2, "group_score": "top2"}
RULES: dict[str, NativeExperts] = {
    "softmax": experts(),
    "softmax, divided": experts(divides_by_sum=True, scale=2.5),
    "softmax of the chosen": experts(is_softmax_of_chosen=True),
    "sigmoid": experts(score="sigmoid"),
    "sigmoid, divided by at least 2": experts(score="sigmoid", divides_by_sum=True, norm_eps=0.25, norm_min=2.0),
    "groups by their best": experts(12, 3, num_groups=4, num_groups_kept=2),
    "groups by their best two": experts(12, 3, divides_by_sum=True, **DEEPSEEK),
    "groups of one": experts(6, 2, **{**DEEPSEEK, "num_groups": 6, "num_groups_kept": 3}),
    "all experts": experts(3, 3),
    "one expert": experts(1, 1),
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: only(rule) for name, rule in RULES.items()},
    "groups and a bias of the choice": only(experts(12, 3, **DEEPSEEK)) | {"has_choice_bias": True},
    "inputs by weight": only(experts(top_k=1, score="sigmoid", scales_input=True)),
    "biases, clamped": only(experts(activation="swiglu_clamped", is_softmax_of_chosen=True)) | {"has_bias": True},
    "a shared network": {"layer": {"experts": experts(), "is_shared": True}},
    "a shared network with a gate": {"layer": {"experts": experts(has_shared_gate=True), "is_shared": True}},
    "a gate of 33 rows": {"layer": {"experts": experts(32, 5, has_shared_gate=True), "is_shared": True}},
    "a network beside, of another kind": {
        "layer": {"experts": experts(is_gated=False, activation="gelu"), "activation": "relu2"},
    },
    "norms behind": {"layer": {"experts": experts(), "post_mixer": RMS, "post_feed": RMS, "residual_scale": 0.25}},
    "a router with a norm of its own": only(experts(router_norm=RMS)),
    "norms of experts and of a network beside": {
        "layer": {"experts": experts(divides_by_sum=True, router_norm=RMS, own_norms=RMS), "post_feed": RMS},
    },
    "parallel, scaled": only(experts(), is_parallel=True, residual_scale=0.25),
    "a layer without": {"num_layers": 3, "layer": {"experts": experts()}, "last": {"experts": None}},
    "odd sizes": {**only(experts(5, 2, 22)), "hidden_size": 46},
    "clamped without experts": {"layer": {"activation": "swiglu_clamped", "clamp": (1.5, 0.5)}},
}
SOME = ["softmax, divided", "groups and a bias of the choice", "a shared network with a gate", "norms behind"]


@cache
def checkpoint(name: str) -> Checkpoint:
    return Checkpoint.random(**MODELS[name])


@cache
def exact(name: str) -> Array:
    return checkpoint(name).logits(tokens(40))


def load(name: str, dtype: DType = "float32", num_threads: int = 2, **settings: Any) -> NativeModel:
    return checkpoint(name).load(dtype, num_threads=num_threads, worth_a_thread=1, **settings)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_with_experts_are_those_of_float64(name: str, instruction_set: str) -> None:
    """Routing is the same code in every set."""
    if not FULL and instruction_set != AVAILABLE[0] and name not in SOME:
        pytest.skip("the best set has all")
    found = Run(load(name, instruction_set=instruction_set)).whole(tokens(40), [7])
    assert error(found, exact(name)) < 3e-6


@pytest.mark.parametrize("name", ["all experts", "one expert", "clamped without experts"])
def test_logits_in_bfloat16_are_near_those_of_float64(name: str) -> None:
    found = Run(load(name, "bfloat16")).whole(tokens(40), [7])
    assert error(found, exact(name)) < 0.02


@pytest.mark.parametrize("name", SOME if FULL else SOME[-2:])
@pytest.mark.parametrize("dtype", [*DTYPES, "int8", "int4"])
def test_no_bit_with_experts_depends_on_cuts_threads_or_neighbours(name: str, dtype: Any) -> None:
    """90 tokens are more than a tile of rows for each of 7 experts."""
    settings: dict[str, Any] = {"dtype": dtype} if dtype in DTYPES else {"quantization": dtype}
    prompt, model = tokens(90), load(name, **settings)
    whole = Run(model).whole(prompt)
    assert np.array_equal(Run(model, block_size=4).whole(prompt, [1, 15, 2, 50, *[1] * 10]), whole)
    assert np.array_equal(Run(load(name, num_threads=1, **settings)).whole(prompt, [30]), whole)
    run = Run(model)
    run.step({0: prompt[:18], 1: tokens(9, 1), 2: tokens(4, 2)})
    while len(run.logits[0]) < 24:
        run.step({1: tokens(1, 3), 0: prompt[len(run.logits[0]) :][:1], 2: tokens(2, 4)})
    assert np.array_equal(np.array(run.logits[0]), whole[:24])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_requested_logits_leave_those_of_experts_as_they_are(dtype: DType) -> None:
    model, prompt = load("a shared network with a gate", dtype), tokens(40)
    whole, last = Run(model).whole(prompt), Run(model).step({0: prompt}, {0: [39]})[0]
    assert np.array_equal(last[0], whole[39])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("instruction_set", SETS)
def test_quantized_experts_compute_with_the_numbers_they_keep(quantization: Any, instruction_set: str) -> None:
    largest = {"int8": 1e-5, "int4": 3e-4}[quantization]  # rows of 16 bits are multiplied with int4
    for name in ("all experts", "biases, clamped"):
        model = load(name, quantization=quantization, instruction_set=instruction_set)
        kept = checkpoint(name).kept_by(model)
        assert error(Run(model).whole(tokens(40)), kept.logits(tokens(40))) < largest, name


def test_experts_in_12_bits_give_the_bits_of_bfloat16() -> None:
    model, coded = load("a shared network", "bfloat16"), load("a shared network", "bfloat16")
    coded.weights.encode_bf16_12bit()
    assert np.array_equal(Run(coded).whole(tokens(40)), Run(model).whole(tokens(40)))


@cache
def packed_checkpoint() -> tuple[Checkpoint, dict[str, GroupedCodes]]:
    """Each expert in a format of its own, some with a factor or an order of columns, and the rest as it is.

    Its tensors are the numbers that the codes stand for."""
    its = experts(len(FORMATS), 5, 64, activation="relu")
    made = Checkpoint.random(layer={"experts": its, "is_shared": True}, num_layers=1, num_positions=100)
    codes = {}
    for expert, (seed, form) in zip(range(len(FORMATS)), enumerate(FORMATS.values()), strict=True):
        columns = np.random.default_rng(seed).permutation(64).astype(np.int32) if expert % 3 == 0 else None
        for name in (f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")):
            one = random_codes(form, *made.tensors[name].shape, seed=len(codes))
            codes[name] = replace(one, factor=0.25 if expert % 4 == 0 else 1.0, columns=columns)
    numbers = {name: one.dequantize() for name, one in codes.items()}
    return replace(made, tensors=made.tensors | numbers), codes


def load_packed(num_threads: int = 2, **settings: Any) -> NativeModel:
    made, codes = packed_checkpoint()
    formats = {name: one.format for name, one in codes.items()}
    assert grouped.packable(made.shape, formats) == formats
    plain = {name: tensor for name, tensor in made.tensors.items() if name not in codes}
    settings |= {"formats": formats, "num_threads": num_threads, "worth_a_thread": 1}
    model = replace(made, tensors=plain).load("float32", **settings)
    for name, one in codes.items():
        middle = one.num_rows // 3
        model.weights.set_rows(name, middle, one.rows(middle, one.num_rows))
        model.weights.set_rows(name, 0, one.rows(0, middle))
    return model


@pytest.mark.parametrize("instruction_set", SETS)
def test_each_expert_may_be_packed_in_a_format_of_its_own(instruction_set: str) -> None:
    made, codes = packed_checkpoint()
    model = load_packed(instruction_set=instruction_set)
    for name, one in codes.items():
        kept = model.weights.matrix(name, *made.tensors[name].shape)
        np.testing.assert_allclose(kept, one.dequantize(), atol=1e-5, err_msg=name)  # the values of nf4 in 16 bits
    whole = Run(model).whole(tokens(40))
    assert error(whole, made.logits(tokens(40))) < 1e-3
    assert np.array_equal(Run(model).whole(tokens(40), [1, 9, 1, 20]), whole)
    assert np.array_equal(Run(load_packed(1, instruction_set=instruction_set)).whole(tokens(40), [1] * 12), whole)


def test_gate_and_up_of_an_expert_are_packed_alike_or_not_at_all() -> None:
    made, codes = packed_checkpoint()
    formats = {name: one.format for name, one in codes.items()}
    gate, up = (f"model.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up"))
    kept = grouped.packable(made.shape, formats | {up: FORMATS["Q8_0"]})
    assert formats.keys() - kept.keys() == {gate, up}
    order = np.arange(64, dtype=np.int32)[::-1]
    assert formats.keys() - grouped.packable(made.shape, formats, {}, {up: order}).keys() == {gate, up}


def test_a_token_reads_its_own_experts_only() -> None:
    model = Checkpoint.random(layer={"experts": experts(8, 3, 64)}, num_layers=3).load(num_threads=1)
    assert model.weights.num_bytes - model.weights.num_token_bytes == 3 * 5 * 3 * 64 * 64 * 4


@pytest.mark.parametrize("bias", [None, -1.0])
@pytest.mark.parametrize("name", RULES)
def test_experts_are_chosen_by_the_reference_rule_among_ties_and_below_zero(name: str, bias: float | None) -> None:
    draw, rule = np.random.default_rng(5), RULES[name]
    logits = draw.standard_normal((200, rule.num_experts)).astype(np.float32)
    logits[50:100] -= 30  # all of them negative
    logits[100:150] = np.round(logits[100:150])  # many of them equal
    logits[150:] = 0
    biases = None if bias is None else bias + np.round(draw.standard_normal(rule.num_experts)).astype(np.float32)
    ids, weights = route_natively(logits, rule, biases)
    wanted, by = routed(logits, rule, biases)
    assert np.array_equal(ids, wanted)
    np.testing.assert_allclose(weights, by, rtol=2e-6, atol=1e-30)


def route_natively(logits: Array, rule: NativeExperts, bias: Array | None) -> tuple[Array, Array]:
    found = loading.load_best()[1]
    ids = np.zeros((len(logits), rule.top_k), np.int32)
    weights = np.zeros(ids.shape, np.float32)
    found.millrace_route(
        ctypes.byref(structs.of_experts(rule)),
        logits.ctypes.data,
        None if bias is None else bias.ctypes.data,
        len(logits),
        ids.ctypes.data,
        weights.ctypes.data,
    )
    return ids, weights


def test_logits_that_are_no_numbers_choose_each_expert_once() -> None:
    logits = np.full((1, 7), np.nan, np.float32)
    ids, _ = route_natively(logits, RULES["softmax"], None)
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("its", "problem"),
    [
        (experts(4, 5), "5 experts a token of 4"),
        (experts(12, 3, num_groups=5), "5 groups of 12 experts"),
        (experts(12, 4, num_groups=4), "1 groups: must have the 4 experts"),
        (experts(intermediate_size=41), "size of experts = 41: must be even"),
        (experts(activation="xielu"), "experts with the activation xielu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes_of_experts_that_do_not_fit_are_named(its: NativeExperts, problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        small_shape(layer={"experts": its}).check()
