"""The native step against the definition in float64, and against itself: no bit of a token's logits depends on what
else is in its step, how the prompt was cut, where its blocks are, or how many threads compute it."""

from __future__ import annotations

import os
import random
import sys
import time
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.errors import NativeUnavailableError, UnsupportedModelError
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, Longs, Quantization
from millrace.kernels.native.thread_throttle import ThreadThrottle
from tests.counts import FULL
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import SMALL, small_shape
from tests.native_builds import best_and_plainest

FOUND = machine.instruction_sets()
AVAILABLE = FOUND if FULL else best_and_plainest(FOUND)
pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

# Each of them is forced in turn. "avx512_bf16" runs where the processor multiplies bfloat16.
SETS = [
    pytest.param(name, marks=pytest.mark.skipif(name not in AVAILABLE, reason=f"{name}: not here, or between"))
    for name in machine.INSTRUCTION_SETS
]
# All of these paths but their own instructions; each a library to build.
if FULL and "avx512" in AVAILABLE:
    SETS.append(pytest.param("avx512_bf16_emulated"))
if "avx512_bf16" in AVAILABLE and (FULL or "amx" not in AVAILABLE):
    SETS.append(pytest.param("amx_emulated"))
DTYPES: list[DType] = ["float32", "bfloat16"]

MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, biases": {"is_tied": False, "has_bias": True, "intermediate_size": 264},  # so many lie in streams
    "head norms, a window, part of a head rotated": {
        "has_qk_norm": True,
        "sliding_windows": (40, None),
        "rotary_dim": 16,
    },
    "two rows by wide heads": {"head_dim": 130, "num_heads": 4},  # values: as wide a pass as there is, and a vector
    "odd sizes": {"head_dim": 26, "rotary_dim": 26, "num_heads": 7, "num_kv_heads": 1, "hidden_size": 46},
}


@cache
def checkpoint(name: str) -> Checkpoint:
    return Checkpoint.random(**MODELS[name])


@lru_cache(maxsize=4)  # a model keeps its threads until it is dropped
def load(name: str, dtype: DType, instruction_set: str | None = None, num_threads: int = 2) -> NativeModel:
    return checkpoint(name).load(dtype, instruction_set=instruction_set, num_threads=num_threads, worth_a_thread=1)


def tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(SMALL["vocab_size"]) for _ in range(count)]


def error(ours: Any, exact: Any) -> float:
    return float(np.abs(ours - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_are_those_of_float64(name: str, instruction_set: str) -> None:
    exact = checkpoint(name).logits(tokens(300))
    wide = Run(load(name, "float32", instruction_set)).whole(tokens(300), [7])
    half = Run(load(name, "bfloat16", instruction_set)).whole(tokens(300), [7])
    assert error(wide, exact) < 2e-6
    assert error(half, exact) < 0.01  # keys and values are rounded to bfloat16; where it is multiplied, inputs are too


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_no_bit_depends_on_how_a_prompt_is_cut_or_on_blocks_or_threads(
    name: str, dtype: DType, instruction_set: str
) -> None:
    """300 tokens pass a chunk of 256 keys; decode is a cut into ones."""
    prompt, model = tokens(300), load(name, dtype, instruction_set)
    whole = Run(model).whole(prompt)
    for run, chunks in {
        "in ones": (Run(model), [1] * 300),
        "in odd pieces": (Run(model), [1, 15, 2, 100, 13]),
        "blocks of 32": (Run(model, block_size=32), [129]),
        "blocks of 4": (Run(model, block_size=4), [77]),
        "blocks of 1": (Run(model, block_size=1), [5]),
        "one thread": (Run(load(name, dtype, instruction_set, 1)), [100]),
        "five threads": (Run(load(name, dtype, instruction_set, 5)), [31]),
    }.values():
        assert np.array_equal(run.whole(prompt, chunks), whole)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("instruction_set", SETS)
def test_a_models_first_step_has_room_for_its_rows_however_they_fall_into_tiles(
    instruction_set: str, num_threads: int, quantization: Quantization | None
) -> None:
    """Of several tiles an even number, so that two threads share them: 7 of 6 or of 12 rows become 8, which are enough
    for one of them to leave its weights to the others."""

    def model() -> NativeModel:
        return checkpoint("tied").load(
            "bfloat16",
            worth_a_thread=1,
            instruction_set=instruction_set,
            num_threads=num_threads,
            quantization=quantization,
        )

    whole = Run(model()).whole(tokens(100), [1] * 100)
    for size in (13, 18, 25, 40, 47, 75, 84, 100):
        assert np.array_equal(Run(model()).whole(tokens(100)[:size]), whole[:size]), size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_two_threads_share_many_rows_where_a_cache_keeps_what_both_read(instruction_set: str, dtype: DType) -> None:
    def is_shared(num_tokens: int, num_kept: int = 16 << 20, num_threads: int = 2, **settings: Any) -> bool:
        settings |= {"instruction_set": instruction_set, "num_threads": num_threads, "worth_a_thread": 1}
        model = checkpoint("tied").load(dtype, **settings)
        model.in_library.assume_retained(num_kept)
        Run(model).whole(tokens(num_tokens))
        return model.in_library.is_split_by_rows

    in_tiles_of_registers = "amx" in instruction_set and dtype == "bfloat16"
    is_wide = instruction_set != "avx2"
    four, six = (48, 70) if is_wide else (24, 36)  # tiles, of 12 rows with AVX-512 and 6 with AVX2
    assert is_shared(four) == is_shared(six) == (not in_tiles_of_registers)
    assert not is_shared(1) and not is_shared(12)
    assert not is_shared(four, num_kept=0) and not is_shared(four, quantization="int8")
    assert not is_shared(four, num_threads=1) and not is_shared(four, num_threads=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_weights_of_few_rows_pass_where_a_cache_keeps_anything_and_no_bit_depends_on_it(
    instruction_set: str, dtype: DType
) -> None:
    sizes: dict[str, Any] = {"instruction_set": instruction_set, "num_threads": 2, "worth_a_thread": 1}
    plain, quantized = (checkpoint("tied").load(dtype, quantization=how, **sizes) for how in (None, "int8"))

    def are_passing(model: NativeModel, num_rows: int, num_asked: int) -> bool:
        asked, found = list(range(num_rows - num_asked, num_rows)), []
        for num_kept in (0, 16 << 20):
            model.in_library.assume_retained(num_kept)
            found.append(Run(model).step({0: tokens(num_rows)}, {0: asked})[0])
            assert num_kept > 0 or not model.in_library.is_streaming
        assert np.array_equal(*found)
        return model.in_library.is_streaming

    multiplies_bf16 = dtype == "bfloat16" and ("bf16" in instruction_set or "amx" in instruction_set)
    in_tiles_of_registers = multiplies_bf16 and "amx" in instruction_set
    few = 0 if in_tiles_of_registers else 4 if multiplies_bf16 else 2
    for num_rows, num_asked in [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (20, 1)]:
        assert are_passing(plain, num_rows, num_asked) == (num_asked <= few), (num_rows, num_asked)
    assert are_passing(quantized, 1, 1) == (instruction_set != "avx2" and not in_tiles_of_registers)
    assert not are_passing(quantized, 2, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_no_bit_depends_on_what_else_is_in_the_step(dtype: DType, instruction_set: str) -> None:
    """31 others of all lengths, whose prompts come in pieces while the first one decodes."""
    model, draw = load("head norms, a window, part of a head rotated", dtype, instruction_set), random.Random(5)
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({0: [40], 1: [0], 2: [12]}, id="the last of each"),
        pytest.param({0: [38, 39, 40], 2: [12]}, id="some of the last, and one prompt goes on"),
        pytest.param({2: [12], 0: [40, 39], 1: [0, 0]}, id="in any order, one twice"),
        pytest.param({0: [3, 40], 1: [0]}, id="one amidst a prompt"),
        pytest.param({1: [0]}, id="of one only"),
    ],
)
def test_logits_are_the_same_bits_whichever_others_are_asked_for(
    name: str, dtype: DType, asked: dict[int, list[int]]
) -> None:
    """Rows without requested logits leave the step within its last layer; their keys and values stay."""
    model, before, parts = load(name, dtype), {1: tokens(270, 1)}, {0: tokens(41), 1: [7], 2: tokens(13, 2)}
    all_rows, some = Run(model, num_blocks=600), Run(model, num_blocks=600)
    for run in (all_rows, some):
        run.step(before)
    whole, given = all_rows.step(parts), some.step(parts, asked)
    for sequence, numbers in asked.items():
        assert np.array_equal(given[sequence], whole[sequence][numbers]), f"sequence {sequence}"
    after = {sequence: [5, 6] for sequence in parts}
    more, same = all_rows.step(after), some.step(after)
    assert all(np.array_equal(more[sequence], same[sequence]) for sequence in parts)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_who_decodes_and_is_not_asked_for_leaves_its_keys_and_values(name: str, dtype: DType, num_threads: int) -> None:
    """Steps of one token each, some without requested logits: what comes after them sees all of them."""
    model, before = load(name, dtype, None, num_threads), {0: tokens(41), 1: tokens(300, 1), 2: tokens(13, 2)}
    all_rows, some = Run(model, num_blocks=600), Run(model, num_blocks=600)
    for run in (all_rows, some):
        run.step(before)
    for token, asked in enumerate([{0: [0]}, {1: [0], 2: [0]}, {2: [0]}], start=7):
        parts = {sequence: [token] for sequence in before}
        whole, given = all_rows.step(parts), some.step(parts, asked)
        assert all(np.array_equal(given[sequence], whole[sequence]) for sequence in asked)
    last = {sequence: [5, 6] for sequence in before}
    whole, given = all_rows.step(last), some.step(last)
    assert all(np.array_equal(given[sequence], whole[sequence]) for sequence in before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_that_is_split_over_threads_gives_the_same_bits(dtype: DType) -> None:
    """1,100 tokens are five chunks of keys: one sequence decodes alone, so its chunks go to all threads."""
    prompt, name = tokens(1100), "tied"
    alone, split = (Run(load(name, dtype, None, threads)).whole(prompt, [1090] + [1] * 10) for threads in (1, 4))
    assert np.array_equal(alone, split)
    assert error(split, checkpoint(name).logits(prompt)) < (2e-6 if dtype == "float32" else 0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("name", ["head norms, a window, part of a head rotated", "odd sizes"])
@pytest.mark.parametrize("instruction_set", SETS)
def test_what_lies_in_unused_places_of_the_cache_has_no_influence(
    instruction_set: str, name: str, dtype: DType, block_size: int
) -> None:
    model, prompt = load(name, dtype, instruction_set), tokens(75)
    clean = Run(model, block_size).whole(prompt, [30, 1, 1])
    for poison in (float("nan"), float("inf")):
        assert np.array_equal(Run(model, block_size, poison=poison).whole(prompt, [30, 1, 1]), clean)


@pytest.mark.skipif(not FULL or "amx" not in AVAILABLE, reason="a library to build; this processor has no amx")
@pytest.mark.parametrize("name", MODELS)
def test_plain_code_stands_in_for_tile_registers(name: str) -> None:
    plain, real = (Run(load(name, "bfloat16", each)).whole(tokens(300), [7]) for each in ("amx_emulated", "amx"))
    assert error(plain, real) < 5e-3  # what lies on the edge between two numbers of bfloat16 may fall on either side


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_without_requested_logits_only_fills_the_cache(dtype: DType) -> None:
    model = load("tied", dtype)
    cache = NativeCache.uniform(model.shape, 2, 16, model.cache_dtype)
    inputs = {"block_tables": np.zeros((1, 1), np.int32), "query_starts": np.array([0, 3], np.int32)}
    ids, places = np.array(tokens(3)), np.arange(3)
    no_logits = np.empty((0, model.shape.vocab_size), np.float32)
    model.step(
        cache,
        input_ids=ids,
        positions=places,
        slot_mapping=places,
        lengths=np.array([3], np.int32),
        logits_rows=np.zeros(0, np.int64),
        logits=no_logits,
        **inputs,
    )
    assert np.count_nonzero(cache.data[cache.at(0)]) and not np.count_nonzero(cache.data[cache.at(1)])


def test_blocks_that_were_copied_go_on_as_the_originals() -> None:
    model, prompt = load("tied", "bfloat16"), tokens(40)
    run = Run(model, num_blocks=8)
    whole = run.whole(prompt, [32])
    other = Run(model, num_blocks=8)
    other.step({0: prompt[:32]})
    host = other.cache.make_host_blocks(3)
    table = np.array(other._tables[0])
    other.cache.copy_out(table, host, np.array([2, 0]))
    moved = np.array([other._free.pop(), other._free.pop()])
    other.cache.copy_in(host, np.array([2, 0]), moved)
    other.cache.data[other.cache.at(table)] = 0x7FC0  # NaN: nothing reads the old ones
    other._tables[0] = moved.tolist()
    other.step({0: prompt[32:]})
    assert np.array_equal(np.array(other.logits[0]), whole)


def test_logits_from_hidden_states_are_those_of_the_step() -> None:
    model, prompt = load("untied, biases", "bfloat16"), tokens(20)
    run = Run(model)
    logits = run.whole(prompt)
    hidden = np.empty((20, model.shape.hidden_size), np.float32)
    fresh = Run(model)
    model.step(
        fresh.cache,
        input_ids=np.array(prompt),
        positions=np.arange(20),
        slot_mapping=np.arange(20),
        block_tables=np.array([[0, 1]], np.int32),
        query_starts=np.array([0, 20], np.int32),
        lengths=np.array([20], np.int32),
        hidden=hidden,
    )
    assert np.array_equal(model.logits(hidden), logits)
    assert np.array_equal(model.logits(hidden[3:5]), logits[3:5])
    scale = np.sqrt((hidden**2).mean(1, keepdims=True) + SMALL["rms_norm_eps"])
    expected = hidden / scale * checkpoint("untied, biases").tensors["model.norm.weight"]
    np.testing.assert_allclose(model.normed(hidden), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input_ids": np.array([70])}, "input id"),
        ({"input_ids": np.array([-1])}, "input id"),
        ({"positions": np.array([1200])}, "position"),
        ({"slot_mapping": np.array([64])}, "slot"),
        ({"block_tables": np.array([[4]], np.int32)}, "block table"),
        ({"lengths": np.array([17], np.int32)}, "lengths"),
        ({"query_starts": np.array([0, 2], np.int32)}, "query_starts"),
        ({"logits_rows": np.array([1])}, "logits row"),
    ],
)
def test_inputs_that_point_outside_are_refused_before_any_computing(change: dict[str, Any], problem: str) -> None:
    model = load("tied", "float32")
    run = Run(model, num_blocks=4)
    inputs = {
        "input_ids": np.array([3]),
        "positions": np.array([0]),
        "slot_mapping": np.array([0]),
        "block_tables": np.array([[0]], np.int32),
        "query_starts": np.array([0, 1], np.int32),
        "lengths": np.array([1], np.int32),
        "logits_rows": np.array([0]),
        "logits": np.empty((1, 70), np.float32),
    }
    model.step(run.cache, **inputs)
    before = run.cache.data.copy()
    with pytest.raises(ValueError, match=problem):
        model.step(run.cache, **inputs | change)
    assert np.array_equal(run.cache.data, before)


def test_room_for_rows_that_are_asked_for_is_counted_where_there_are_fewer_of_them() -> None:
    model = load("tied", "bfloat16", num_threads=1)
    assert model.step_bytes(64, 64) == model.step_bytes(64, 0) == model.step_bytes(1, 64)
    assert model.step_bytes(64, 63) > model.step_bytes(64, 1) > model.step_bytes(64, 0)


def test_the_parts_of_a_step_are_timed_for_who_asks_and_change_no_bit() -> None:
    model = checkpoint("tied").load("float32", num_threads=2, worth_a_thread=1)
    before = Run(model).whole(tokens(40))
    times, began_ns = model.time_phases(), time.perf_counter_ns()
    assert not times.any()
    after = Run(model).whole(tokens(40), [20, 20])
    passed_ns, (linears_ns, attention_ns, rest_ns, num_steps) = time.perf_counter_ns() - began_ns, times.tolist()
    assert np.array_equal(before, after) and num_steps == 2
    assert min(linears_ns, attention_ns, rest_ns) > 0 and linears_ns + attention_ns + rest_ns < passed_ns
    assert model.time_phases() is times


def test_a_step_says_that_it_is_ready_before_it_computes_anything() -> None:
    model, seen = checkpoint("tied").load("float32", num_threads=1), []
    run = Run(model, num_blocks=4)
    model.call_before_steps(lambda: seen.append(np.count_nonzero(run.cache.data[:, 0])))
    run.step({0: tokens(3)})
    run.step({0: tokens(2)})
    one = SMALL["num_kv_heads"] * SMALL["head_dim"] * 2  # numbers of a token
    assert seen == [0, 3 * one]


def test_what_is_not_computed_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_size = 63.*even"):
        small_shape(hidden_size=63).check()
    with pytest.raises(NativeUnavailableError, match=f"instruction set avx10.*this machine has {AVAILABLE[0]}"):
        checkpoint("tied").load(instruction_set="avx10")


class Told(ThreadThrottle):
    """A limit set from outside."""

    def note(self, shares: Longs) -> bool:
        return True


@pytest.mark.skipif(sys.platform != "linux" or len(machine.cpus()) < 2, reason="threads have one CPU")
def test_who_computes_while_others_are_left_out_runs_on_any_of_their_cpus_and_then_on_its_own_again() -> None:
    first, second = machine.cpus()[:2]
    own, any_of_them = [{first}, {second}, {first}], {first, second}
    told, before = Told(3), set(os.listdir("/proc/self/task"))
    model = checkpoint("tied").load(num_threads=3, cpus=[first, second, first], worth_a_thread=1, thread_throttle=told)
    threads = sorted({int(task) for task in set(os.listdir("/proc/self/task")) - before})

    def places(limit: int) -> list[set[int]]:
        told.limit = limit
        Run(model).whole(tokens(40), [20, 10, 5, 5])
        assert os.sched_getaffinity(0) == all_cpus, "the caller is where it was"
        return [os.sched_getaffinity(thread) for thread in threads]

    all_cpus = os.sched_getaffinity(0)
    assert model.step_thread_id in threads and sorted(places(3), key=min) == sorted(own, key=min)
    assert sorted(places(2), key=len) == [{first}, any_of_them, any_of_them], "the one left out stays where it may try"
    assert os.sched_getaffinity(model.step_thread_id) == any_of_them
    assert sorted(places(3), key=min) == sorted(own, key=min) and os.sched_getaffinity(model.step_thread_id) == {first}


class Changing(ThreadThrottle):
    """Another limit for each step, and in every third one those left out try."""

    def note(self, shares: Longs) -> bool:
        self.seen = shares.tolist()
        self.limit = 1 + (self.limit + 1) % self.num_threads
        self.is_trying = not self.is_trying and self.limit < self.num_threads
        return True


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_that_leave_cores_to_others_give_the_same_bits_and_tell_what_was_lost(dtype: DType) -> None:
    made, prompt, neighbours = checkpoint("tied"), tokens(600), Changing(3)
    model = made.load(dtype, num_threads=3, worth_a_thread=1, thread_throttle=neighbours)
    chunks = [200, *[1] * 30, 300]
    assert np.array_equal(Run(model).whole(prompt, chunks), Run(load("tied", dtype, None, 1)).whole(prompt, chunks))
    passed, used, lost, tried, lost_trying = neighbours.seen
    assert 0 < used <= 3 * passed and 0 <= lost < 3 * passed
    assert 0 <= lost_trying <= tried and tried > 0
