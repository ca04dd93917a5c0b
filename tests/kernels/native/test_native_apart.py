"""Steps whose rows two threads take apart, each half of them, once both are there: the same bits, where that can be
done, and only where it is faster."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType
from tests.counts import FULL
from tests.kernels.native.test_native import AVAILABLE, DTYPES, MODELS, SETS
from tests.kernels.native.test_native_likeliest import Both, large_checkpoint
from tests.kernels.native.test_native_shares import Still
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array

pytestmark = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)

IN_VECTORS = next((name for name in AVAILABLE if name != "amx"), None)


def by_two(instruction_set: str | None) -> dict[str, Any]:
    """Settings of a model whose threads are two, however busy the machine is."""
    return {"instruction_set": instruction_set, "num_threads": 2, "worth_a_thread": 1, "thread_throttle": Still(2)}


def least_rows(instruction_set: str | None) -> int:
    """Of two halves that are more than a tile each."""
    return 14 if instruction_set == "avx2" else 26


def in_registers(instruction_set: str, dtype: DType) -> bool:
    return "amx" in instruction_set and dtype == "bfloat16"


def decoded(model: NativeModel, num_rows: int, *, is_split: bool) -> Array:
    """Logits of two steps of so many sequences, whose contexts differ in length, one after the other."""
    model.in_library.assume_split(is_split)
    run = begun(model, num_rows)
    return np.concatenate([stepped(run, num_rows, turn) for turn in range(2)])


def begun(model: NativeModel, num_rows: int) -> Run:
    """So many sequences, whose contexts differ in length."""
    run, vocabulary = Run(model), model.shape.vocab_size
    for sequence in range(num_rows):
        run.step({sequence: [(7 * sequence + i) % vocabulary for i in range(1 + 11 * sequence % 90)]})
    return run


def stepped(run: Run, num_rows: int, turn: int) -> Array:
    """Logits of the next step of all sequences."""
    vocabulary = run.model.shape.vocab_size
    return np.concatenate(list(run.step({s: [(5 * s + turn) % vocabulary] for s in range(num_rows)}).values()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_rows_that_are_taken_apart_have_the_bits_that_they_have_together(
    instruction_set: str, dtype: DType, name: str
) -> None:
    sizes = by_two(instruction_set)
    model = Checkpoint.random(**MODELS[name]).load(dtype, **sizes)
    for num_rows in (26, 27, 48, 61) if FULL else (27, 48):
        together = decoded(model, num_rows, is_split=False)
        assert not model.in_library.is_split
        apart = decoded(model, num_rows, is_split=True)
        assert model.in_library.is_split == (not in_registers(instruction_set, dtype))
        assert np.array_equal(apart, together), f"{num_rows} rows"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_taken_apart_from_the_layer_on_before_which_both_threads_are_there(dtype: DType) -> None:
    model = Checkpoint.random(num_layers=4).load(dtype, **by_two(IN_VECTORS))
    one, other, layers = begun(model, 26), begun(model, 26), []
    # NOTE: a thread with a delay spins until the other one comes, which on a busy machine takes a time slice each time.
    for turn, lateness in enumerate((*range(1, 50), 1000)):  # phases that one thread misses
        model.in_library.assume_split(False)
        together = stepped(one, 26, turn)
        model.in_library.assume_split(True)
        model._library.millrace_set_join_delay(model._model, lateness)
        assert np.array_equal(stepped(other, 26, turn), together), f"{lateness} phases late"
        layers.append(model.in_library.num_layers_before_split)
        model._library.millrace_set_join_delay(model._model, -1)  # it comes when it will
    assert layers[0] == 0 and layers[-1] == -1
    come = [layer for layer in layers if layer >= 0]
    assert come == sorted(come) and set(come) == {0, 1, 2, 3} and set(layers[len(come) :]) == {-1}
    assert np.array_equal(decoded(model, 26, is_split=True), decoded(model, 26, is_split=False))


def test_memory_of_halves_is_part_of_a_steps_where_rows_can_be_taken_apart() -> None:
    def beside(num_threads: int, num_rows: int) -> int:
        threads: dict[str, Any] = {"num_threads": num_threads, "thread_throttle": Still(num_threads)}
        model = Checkpoint.random().load("bfloat16", **by_two(IN_VECTORS) | threads)
        return model.step_bytes(num_rows, num_rows) - model.step_bytes(num_rows, 0)

    least = least_rows(IN_VECTORS)
    assert beside(2, least) > 0 and beside(2, least - 1) == beside(1, least) == 0
    assert 1.9 < beside(2, 8 * least) / beside(2, 4 * least) < 2.1


IN_FEWER_BITS = [{"cache_dtype": "int8"}, {"quantization": "int8"}]


@pytest.mark.parametrize("settings", IN_FEWER_BITS, ids=str)
def test_so_they_have_in_int8(settings: dict[str, Any]) -> None:
    sizes = by_two(IN_VECTORS)
    model = Checkpoint.random(num_layers=3, sliding_windows=(None, 20, None), intermediate_size=264).load(
        "bfloat16", **sizes, **settings
    )
    for num_rows in (26, 41):
        together, apart = (decoded(model, num_rows, is_split=is_split) for is_split in (False, True))
        assert model.in_library.is_split and np.array_equal(apart, together)


@pytest.mark.parametrize("has_screen", [True, False], ids=["with a screen", "without"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_taken_apart_have_the_likeliest_tokens(dtype: DType, has_screen: bool) -> None:
    made = large_checkpoint() if has_screen else Checkpoint.random(vocab_size=1003, is_tied=False)
    model = made.load(dtype, **by_two(IN_VECTORS))
    model.in_library.assume_split(True)
    run = Both(model)
    for count in (26, 33, 70):
        for sequence in range(count):
            run.step({sequence: [sequence * 37 % 999, 5]})
        ids, is_broken, right, is_right_broken = run.of({s: [s * 11 % 999] for s in range(count)})
        assert model.in_library.is_split
        assert count <= run.num_left < count * 30 if has_screen else run.num_left == -1
        assert ids.tolist() == right.tolist() and is_broken.tolist() == is_right_broken.tolist()


def test_steps_of_one_kind_that_follow_each_other_show_which_way_is_faster() -> None:
    sizes = by_two(IN_VECTORS)
    model = Checkpoint.random().load("bfloat16", **sizes)
    model.in_library.assume_split(None)
    run, kinds = Run(model), []
    many = {sequence: [1] for sequence in range(30)}
    for _ in range(7):
        run.step(many)
        kinds.append(model.in_library.is_split)
    assert kinds == [False, True] * 3 + [False]
    other = {sequence: [1] for sequence in range(40)}
    for parts in (other, many, other):
        run.step(parts)
        kinds.append(model.in_library.is_split)
    assert not any(kinds[-3::2]), "nothing is known of what never comes twice in a row"


def test_keys_are_fetched_beside_products_of_halves_and_each_step_is_told_once() -> None:
    sizes = by_two(IN_VECTORS)
    model = Checkpoint.random(hidden_size=128, intermediate_size=4096).load("bfloat16", **sizes)
    model.in_library.assume_retained(1 << 24)
    times, fetched = model.time_phases(), []
    for is_split in (False, True):
        before = int(times[3])
        decoded(model, 30, is_split=is_split)
        fetched.append(model.in_library.kv_prefetched_bytes)
        assert model.in_library.is_split == is_split and times[3] - before == 30 + 2
    assert all(fetched) and (times[:3] > 0).all()


def test_only_steps_of_many_rows_that_decode_are_taken_apart_and_only_by_two_threads() -> None:
    def is_split(parts: dict[int, list[int]], asked: dict[int, list[int]] | None = None, num_threads: int = 2) -> bool:
        threads: dict[str, Any] = {"num_threads": num_threads, "thread_throttle": Still(num_threads)}
        model = Checkpoint.random().load("bfloat16", **by_two(IN_VECTORS) | threads)
        model.in_library.assume_split(True)
        Run(model).step(parts, asked)
        return model.in_library.is_split

    least = least_rows(IN_VECTORS)
    many = {sequence: [1] for sequence in range(least)}
    assert is_split(many) and is_split({sequence: [1] for sequence in range(200)})
    assert not is_split(many, num_threads=1) and not is_split(many, num_threads=3)
    assert not is_split({sequence: [1] for sequence in range(least - 1)})
    assert not is_split({0: [1] * 40}) and not is_split({**many, least: [1, 2]})
    assert not is_split({0: [], 1: [1, 2], **{2 + s: [1] for s in range(least)}})  # as many tokens as sequences
    assert not is_split(many, {sequence: [0] for sequence in range(least - 1)})
    assert not is_split(many, {sequence: [0] for sequence in reversed(range(least))})


# -- when

SOURCE = """
#include "step/split_tuner.h"
using namespace millrace;
#define EXPORT extern "C" __attribute__((visibility("default")))

static SplitTuner tuner;
EXPORT void begin() { tuner = SplitTuner(); }
EXPORT int should_split(long num_rows) { return tuner.should_split({num_rows, 0}); }
EXPORT void record(long num_rows, int is_split, long elapsed_ns) { tuner.record({num_rows, 0}, is_split, elapsed_ns); }
EXPORT void skip() { tuner.skip(); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("apart")
    (folder / "apart.cpp").write_text(SOURCE)
    flags = [*build.COMMON, *build.EXACT, *build.QUIET, *build.FLAGS["avx2"], f"-I{build.SOURCE}", "-shared"]
    command = [str(build.find_compiler()), *flags, "apart.cpp", "-o", "apart.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "apart.so"))


def chosen(
    library: ctypes.CDLL, num_steps: int, took_us: Callable[[int, bool], float], num_rows: int = 32
) -> list[bool]:
    """Which of these steps are taken apart, if each takes so long."""
    kinds = []
    for step in range(num_steps):
        is_split = bool(library.should_split(ctypes.c_long(num_rows)))
        took = took_us(step, is_split)
        library.record(ctypes.c_long(num_rows), int(is_split), ctypes.c_long(int(1000 * took)))
        kinds.append(is_split)
    return kinds


@pytest.mark.parametrize("gain", [0.03, 0.2, -0.03, -0.2])
def test_steps_are_taken_apart_where_that_is_faster_and_the_other_kind_is_tried_now_and_then(
    library: ctypes.CDLL, gain: float
) -> None:
    library.begin()
    dice = Random(0)
    kinds = chosen(library, 2000, lambda step, is_split: 20_000 * (1 - gain * is_split) * dice.uniform(0.99, 1.01))
    num_other = sum(is_split != (gain > 0) for is_split in kinds[20:])
    assert 1980 / 300 < num_other < 1980 / (25 if abs(gain) < 0.1 else 200)


def test_what_is_faster_is_found_anew_when_it_changes(library: ctypes.CDLL) -> None:
    library.begin()
    for gain in (0.1, -0.1, 0.05, -0.05):
        kinds = chosen(library, 4000, lambda step, is_split, gain=gain: 20_000 * (1 - gain * is_split))
        assert sum(is_split == (gain > 0) for is_split in kinds[-1000:]) > 950


def test_steps_that_are_late_by_themselves_decide_little(library: ctypes.CDLL) -> None:
    library.begin()
    dice = Random(1)
    late = lambda: 10 if dice.random() < 0.05 else 1  # noqa: E731
    kinds = chosen(library, 4000, lambda step, is_split: 20_000 * (1 - 0.1 * is_split) * late())
    assert sum(kinds) > 3000


def test_other_numbers_of_rows_have_a_rule_of_their_own(library: ctypes.CDLL) -> None:
    library.begin()
    few = chosen(library, 500, lambda step, is_split: 10_000 * (1 + 0.2 * is_split), num_rows=16)
    many = chosen(library, 500, lambda step, is_split: 20_000 * (1 - 0.2 * is_split), num_rows=32)
    assert sum(few[20:]) < 10 and sum(many[20:]) > 470


def test_the_other_kind_is_tried_only_where_it_can_be_compared(library: ctypes.CDLL) -> None:
    library.begin()
    chosen(library, 30, lambda step, is_split: 20_000 * (1 - 0.03 * is_split))
    kinds = []
    for _ in range(100):
        kinds += chosen(library, 1, lambda step, is_split: 20_000)
        library.skip()
    assert all(kinds)
    assert chosen(library, 3, lambda step, is_split: 20_000 * (1 - 0.03 * is_split)) == [True, False, True]


def test_steps_that_do_not_follow_each_other_are_not_compared(library: ctypes.CDLL) -> None:
    library.begin()
    for _ in range(50):
        assert chosen(library, 1, lambda step, is_split: 20_000 * (1 - 0.2 * is_split)) == [False]
        library.skip()
