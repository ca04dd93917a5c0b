"""The native step with weights, keys and values of 8 and 4 bits: what is kept, what is computed with it in float64, and
that no bit of a token's logits depends on its company, as with whole numbers."""

from __future__ import annotations

import random
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build
from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.errors import NonFiniteError
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, Quantization
from tests.kernels.native.test_native import AVAILABLE, DTYPES, MODELS, SETS, error, tokens
from tests.kernels.native_oracle import Checkpoint, in_int8
from tests.kernels.native_run import Run

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

# A group of 20 divides none of the sizes; the rows are 46, 64, 72, 182, 192 and 264 numbers long.
FORMS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4 in groups of 20": {"quantization": "int4", "group_size": 20},
    "int8 KV": {"cache_dtype": "int8"},
    "int4, int8 KV": {"quantization": "int4", "cache_dtype": "int8"},
}
DOWN = "model.layers.1.mlp.down_proj.weight"


@cache
def checkpoint(name: str) -> Checkpoint:
    return Checkpoint.random(**MODELS[name])


@lru_cache(maxsize=4)  # a model keeps its threads until it is dropped
def load(
    name: str, form: str, dtype: DType = "bfloat16", instruction_set: str | None = None, num_threads: int = 2
) -> NativeModel:
    settings = {"instruction_set": instruction_set, "num_threads": num_threads, "worth_a_thread": 1}
    return checkpoint(name).load(dtype, **settings, **FORMS[form])


# -- what is kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_int8_rows_are_the_nearest_multiples_of_a_scale_that_reaches_their_largest_number(
    instruction_set: str, dtype: DType
) -> None:
    for name in ("tied", "untied, biases", "odd sizes"):
        model = load(name, "int8", dtype, instruction_set)
        for tensor_name, tensor in checkpoint(name).tensors.items():
            if tensor.ndim == 2 and model.weights.type_of(tensor_name) == "int8":
                assert np.array_equal(model.weights.matrix(tensor_name, *tensor.shape), in_int8(tensor))


def test_an_embedding_that_is_not_the_head_stays_as_it_is_and_the_head_of_int4_is_int8() -> None:
    untied, tied = load("untied, biases", "int4"), load("tied", "int4")
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", DOWN)
    assert [untied.weights.type_of(name) for name in names] == ["bfloat16", "int8", "bfloat16", "int4"]
    assert tied.weights.type_of("model.embed_tokens.weight") == "int8"
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight: not a matrix"):
        untied.weights.matrix("model.embed_tokens.weight", 70, 64)


@pytest.mark.parametrize("group_size", [20, 32, 72, 400])
def test_int4_groups_are_levels_of_one_scale_and_nearer_than_by_their_largest_number_alone(group_size: int) -> None:
    tensor = checkpoint("tied").tensors[DOWN]
    model = checkpoint("tied").load("bfloat16", quantization="int4", group_size=group_size, num_threads=1)
    kept = model.weights.matrix(DOWN, *tensor.shape)
    for begin in range(0, tensor.shape[1], group_size):
        group, found = tensor[:, begin : begin + group_size], kept[:, begin : begin + group_size]
        largest = np.take_along_axis(group, np.abs(group).argmax(1)[:, None], 1)
        plain = np.clip(np.rint(group / (largest / -8)), -8, 7) * (largest / -8)
        errors, plain_errors = ((group - near) ** 2 for near in (found, plain))
        assert (errors.sum(1) <= plain_errors.sum(1) * 1.02 + 1e-12).all()  # the scale is rounded to bfloat16
        assert errors.sum() <= plain_errors.sum()
        assert all(len(np.unique(row)) <= 16 for row in found)


def test_all_instruction_sets_keep_the_same_numbers() -> None:
    for model in ("odd sizes", "untied, biases"):
        for form in ("int8", "int4", "int4 in groups of 20"):
            shape = checkpoint(model).tensors[DOWN].shape
            kept = [load(model, form, "bfloat16", name).weights.matrix(DOWN, *shape) for name in AVAILABLE]
            assert all(np.array_equal(numbers, kept[0]) for numbers in kept)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rows_of_zeros_and_of_next_to_nothing_become_zeros(quantization: Quantization) -> None:
    made = Checkpoint.random()
    tensor = made.tensors[DOWN].copy()
    tensor[3], tensor[4], tensor[5, :40], tensor[6] = 0.0, 1e-39, 0.0, 1e20
    model = made.load("float32", quantization=quantization, num_threads=1)
    model.weights.set_tensor(DOWN, tensor)
    kept = model.weights.matrix(DOWN, *tensor.shape)
    assert not kept[3:5].any() and not kept[5, :32].any() and kept[5, 40:].any()
    np.testing.assert_allclose(kept[6], tensor[6], rtol=0.01)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_holds_no_number_is_refused_by_name(quantization: Quantization, bad: float) -> None:
    made = Checkpoint.random()
    model = NativeModel(made.shape, "float32", made.ropes, made.num_positions, quantization=quantization, num_threads=1)
    for column in (0, 71):  # in a whole vector, and past the last one
        tensor = made.tensors[DOWN].copy()
        tensor[63, column] = bad
        with pytest.raises(NonFiniteError, match=DOWN):
            model.weights.set_tensor(DOWN, tensor)


def test_weights_are_counted_with_their_scales() -> None:
    made = Checkpoint.random(hidden_size=64, intermediate_size=64, vocab_size=96, num_heads=2, num_kv_heads=2)
    names = {name: tensor for name, tensor in made.tensors.items() if tensor.ndim == 2}
    head = names.pop("model.embed_tokens.weight")
    rows, numbers = (sum(part(tensor) for tensor in names.values()) for part in (len, np.size))
    norms = 4 * sum(tensor.size for tensor in made.tensors.values() if tensor.ndim == 1)
    by_row, by_group = head.size + 2 * len(head), head.size + 2 * head.size / 32
    for settings, expected, in_head in (
        ({"quantization": "int8"}, numbers + 2 * rows, by_row),
        ({"quantization": "int4"}, numbers / 2 + 2 * numbers / 32, by_group),
        ({"quantization": "int4", "group_size": 40}, numbers / 2 + 2 * 2 * rows, by_row),
    ):
        assert made.load("bfloat16", num_threads=1, **settings).weights.num_bytes == expected + in_head + norms
    with pytest.raises(ValueError, match="group_size = 33: must be even"):
        made.load("bfloat16", quantization="int4", group_size=33)


# -- what is computed


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_are_those_of_float64_with_the_numbers_that_are_kept(name: str, form: str, instruction_set: str) -> None:
    """The prompt comes in chunks of 7, 1 and 12 rows, which are one tile, and of more."""
    for dtype, near in (("float32", 2e-6), ("bfloat16", 0.01)):
        model = load(name, form, dtype, instruction_set)  # type: ignore[arg-type]
        exact = checkpoint(name).kept_by(model).logits(tokens(300))
        if model.weights.formats:
            near = max(near, 2e-4)  # rows have 16 bits
        if model.cache_dtype == "int8":
            near = 0.01  # another rounding before it, and a number is the next multiple
        assert error(Run(model).whole(tokens(300), [7, 1, 12]), exact) < near


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_no_bit_depends_on_how_a_prompt_is_cut_or_on_blocks_or_threads(
    form: str, dtype: DType, instruction_set: str
) -> None:
    """Of a few tiles of rows each widens the weights in registers; of more the first one does it for the others."""
    prompt, name = tokens(280), "odd sizes" if dtype == "bfloat16" else "head norms, a window, part of a head rotated"
    model = load(name, form, dtype, instruction_set)
    whole = Run(model).whole(prompt)
    for run, chunks in {
        "in ones": (Run(model), [1] * 280),
        "in odd pieces": (Run(model), [1, 12, 2, 13, 3, 100, 4, 5, 6, 7, 8, 9, 10, 11]),
        "blocks of 32": (Run(model, block_size=32), [129]),
        "blocks of 4": (Run(model, block_size=4), [77]),
        "blocks of 1": (Run(model, block_size=1), [5]),
        "one thread": (Run(load(name, form, dtype, instruction_set, 1)), [100]),
        "five threads": (Run(load(name, form, dtype, instruction_set, 5)), [31]),
    }.values():
        assert np.array_equal(run.whole(prompt, chunks), whole)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_no_bit_changes_where_the_first_tile_begins_to_widen_for_the_others(form: str, instruction_set: str) -> None:
    """Tiles have 6, 12 or 32 rows; two, three or eight of them are enough. In AMX 16 rows are half of one."""
    model, prompt = load("untied, biases", form, "bfloat16", instruction_set), tokens(90)
    one_by_one = Run(model).whole(prompt, [1] * 90)
    for rows in (7, 12, 13, 16, 17, 18, 24, 25, 32, 33, 42, 43, 48, 49, 64, 65, 84, 85):
        assert np.array_equal(Run(model).whole(prompt[:rows]), one_by_one[:rows]), rows


@pytest.mark.parametrize("form", ["int8", "int4, int8 KV"])
@pytest.mark.parametrize("instruction_set", SETS)
def test_no_bit_depends_on_what_else_is_in_the_step(form: str, instruction_set: str) -> None:
    """31 others of all lengths, whose prompts come in pieces while the first one decodes."""
    model, draw = load("untied, biases", form, "bfloat16", instruction_set), random.Random(5)
    sequences = {i: tokens(draw.randint(1, 150), seed=i) for i in range(32)}
    left, run = {i: list(ids) for i, ids in sequences.items()}, Run(model, num_blocks=600)
    while any(left.values()):
        sizes = {i: draw.choice([1, 1, 1, 5, 40]) for i, ids in left.items() if ids and draw.random() < 0.8}
        if sizes:
            run.step({i: left[i][:size] for i, size in sizes.items()})
        for i, size in sizes.items():
            del left[i][:size]
    for i, ids in sequences.items():
        assert np.array_equal(np.array(run.logits[i]), Run(model).whole(ids)), f"sequence {i}"


@pytest.mark.parametrize("instruction_set", SETS)
def test_groups_of_int4_that_lie_in_streams_and_a_last_one_that_does_not_are_summed_as_they_are_kept(
    instruction_set: str,
) -> None:
    """Of down_proj's 260 pairs, groups of 128, 128 and 4; 110 tokens are more than two tiles by any instruction set."""
    made = Checkpoint.random(intermediate_size=520)
    settings = {"quantization": "int4", "group_size": 256, "num_threads": 2, "worth_a_thread": 1}
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 0.01)):
        model = made.load(dtype, instruction_set=instruction_set, **settings)
        whole = Run(model).whole(tokens(110))
        assert np.array_equal(whole, Run(model).whole(tokens(110), [1] * 40))
        assert error(whole, made.kept_by(model).logits(tokens(110))) < bound


def test_products_wider_than_what_is_held_at_a_time_give_the_same_bits() -> None:
    """A panel of down_proj is 448 KiB of bfloat16 and 896 of float32: more than the bound; one of gate and up is 4 and
    8. 110 tokens are eight tiles and more in vectors, and four in AMX."""
    made = Checkpoint.random(intermediate_size=7168, num_layers=1, sliding_windows=(None,))
    for quantization in (None, "int8", "int4"):
        model = made.load("bfloat16", quantization=quantization, num_threads=2, worth_a_thread=1)
        assert np.array_equal(Run(model).whole(tokens(110)), Run(model).whole(tokens(110), [1] * 40))


@pytest.mark.parametrize(
    "quantization, group_size", [(None, 32), ("int8", 32), ("int4", 32), ("int4", 20), ("int4", 300)]
)
@pytest.mark.parametrize("instruction_set", SETS)
def test_no_bit_changes_where_sums_wait_for_the_next_block_of_k(
    instruction_set: str, quantization: Any, group_size: int
) -> None:
    """Down_proj's k of 650 is three blocks in AMX, the last one with a tail; or whole groups, which need not lie on
    steps of 32 numbers, nor be shorter than a block. 673 rows are 22 tiles in two rounds, the last one of one row."""
    made = Checkpoint.random(intermediate_size=650, num_layers=1, sliding_windows=(None,))
    settings: dict[str, Any] = {"quantization": quantization, "group_size": group_size, "num_threads": 2}
    model = made.load("bfloat16", instruction_set=instruction_set, worth_a_thread=1, **settings)
    prompt = tokens(673)
    whole = Run(model).whole(prompt)
    assert np.array_equal(whole, Run(model).whole(prompt, [32] * 22))
    assert np.array_equal(whole, Run(model).whole(prompt, [33, 64, 65, 1, 100, 200, 210]))
    assert error(whole, made.kept_by(model).logits(prompt)) < 0.01


# -- int8 keys and values


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_that_is_split_over_threads_gives_the_same_bits(dtype: DType) -> None:
    prompt = tokens(1100)
    alone, split = (
        Run(load("tied", "int8 KV", dtype, None, threads)).whole(prompt, [1090] + [1] * 10) for threads in (1, 4)
    )
    assert np.array_equal(alone, split)
    assert error(split, checkpoint("tied").logits(prompt)) < 0.03  # against keys and values that are exact


@pytest.mark.parametrize("block_size", [16, 4])
@pytest.mark.parametrize("instruction_set", SETS)
def test_what_an_int8_cache_held_before_changes_nothing(block_size: int, instruction_set: str) -> None:
    name, prompt = "head norms, a window, part of a head rotated", tokens(75)
    model = load(name, "int8 KV", "bfloat16", instruction_set)
    clean = Run(model, block_size).whole(prompt, [30, 1, 1])
    for poison in (float("nan"), float("inf")):
        assert np.array_equal(Run(model, block_size, poison=poison).whole(prompt, [30, 1, 1]), clean)


def test_int8_blocks_that_were_copied_go_on_as_the_originals() -> None:
    model, prompt = load("tied", "int8 KV"), tokens(40)
    whole = Run(model, num_blocks=8).whole(prompt, [32])
    other = Run(model, num_blocks=8)
    other.step({0: prompt[:32]})
    host = other.cache.make_host_blocks(3)
    table = np.array(other._tables[0])
    other.cache.copy_out(table, host, np.array([2, 0]))
    moved = np.array([other._free.pop(), other._free.pop()])
    other.cache.copy_in(host, np.array([2, 0]), moved)
    other.cache.data[other.cache.at(table)] = -1  # as scales NaN: nothing reads the old ones
    other._tables[0] = moved.tolist()
    other.step({0: prompt[32:]})
    assert np.array_equal(np.array(other.logits[0]), whole)


def test_a_token_of_an_int8_cache_takes_a_byte_a_number_and_two_for_each_scale() -> None:
    shape = checkpoint("tied").shape  # 2 layers, 2 heads of 32
    assert shape.bytes_per_block(16, "int8") == 16 * 2 * 2 * 2 * (32 + 2)
    assert shape.bytes_per_block(16, "bfloat16") == 16 * 2 * 2 * 2 * 64
    cache = NativeCache.uniform(shape, 5, 16, "int8")
    assert cache.data[cache.at(4)].nbytes == shape.bytes_per_block(16, "int8")


@pytest.mark.parametrize("part", ["k", "v"])
def test_keys_and_values_that_are_no_numbers_are_not_hidden(part: str) -> None:
    """Their scales become NaN, so that the sampler sees a broken row, as it does with float32."""
    made = Checkpoint.random()
    name = f"model.layers.0.self_attn.{part}_proj.weight"
    for cache_dtype in ("float32", "int8"):
        model = made.load("float32", cache_dtype=cache_dtype, num_threads=1)
        model.weights.set_tensor(name, np.full_like(made.tensors[name], 3e38))
        assert np.isnan(Run(model).whole(tokens(3))).all()
