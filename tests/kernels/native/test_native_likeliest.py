"""Tokens that a step takes for the likeliest while it computes logits: those that a chooser takes from the logits, in
every batch, by however many threads, and broken where those are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.errors import NonFiniteError
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import Bools, DType, Longs, Quantization
from millrace.kernels.native.slot_step import NativeChooser
from tests.counts import FULL
from tests.kernels.draw_rows import draw_rows
from tests.kernels.native.test_native import AVAILABLE, DTYPES, SETS
from tests.kernels.native.test_native_slots import Slots
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array

pytestmark = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)

VOCAB = 1003  # 32 panels, the last of them with 11 tokens
NUM_ROWS = 70  # of logits: several tiles of them


def nothing(head: Array) -> None:
    """Leaves it as it is."""


def load(dtype: DType = "bfloat16", spoil: Callable[[Array], object] = nothing, **settings: object) -> NativeModel:
    """`spoil` is given the head's weight, [V, hidden]."""
    made = Checkpoint.random(vocab_size=VOCAB, is_tied=False)
    spoil(made.tensors["lm_head.weight"])
    return made.load(dtype, worth_a_thread=1, **{"num_threads": 2, **settings})


class Both(Run):
    """Steps, each run twice: what it takes for the likeliest, and what a chooser takes from its logits."""

    num_left = -1  # panels of the head that the last step was left with
    num_closer = 0  # and that it looked at closer

    def of(self, parts: dict[int, list[int]], asked: dict[int, list[int]] | None = None) -> tuple[Array, ...]:
        """(ids, broken rows; the same of the chooser), [L] each."""
        found: list[tuple[Longs, Bools]] = []
        step = self.model.step

        def twice(*args: object, logits: Array, **inputs: object) -> None:
            found.append((np.full(len(logits), -1), np.full(len(logits), True)))
            step(*args, likeliest=found[0], **inputs)  # type: ignore[arg-type]
            done = self.model.in_library
            self.num_left, self.num_closer = done.num_screen_candidates, done.num_screen_refined
            step(*args, logits=logits, **inputs)  # type: ignore[arg-type]

        self.model.step = twice  # type: ignore[method-assign, assignment]
        try:
            logits = np.concatenate(list(self.step(parts, asked).values()))
        finally:
            del self.model.step  # type: ignore[method-assign]  # a model with a cycle would keep its memory for a while
        return *found[0], *choose(self.model, logits)


def choose(model: NativeModel, logits: Array) -> tuple[Longs, Bools]:
    count = len(logits)
    ids = np.zeros(count, np.int64)
    columns = {"draws": draw_rows(count), "seeds": ids.astype(np.uint64), "num_prompt": ids.astype(np.int32)}
    chooser = NativeChooser(model, is_random=ids > 0, **columns)  # type: ignore[arg-type]
    return chooser.choose(logits, np.arange(count), ids)


def prompt(count: int = NUM_ROWS) -> list[int]:
    return [i * 37 % VOCAB for i in range(count)]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_the_likeliest_are_what_a_chooser_takes_from_logits(
    instruction_set: str, dtype: DType, num_threads: int
) -> None:
    run = Both(load(dtype, instruction_set=instruction_set, num_threads=num_threads))
    for parts in ({0: prompt()}, {1: [3]}, {2: prompt(5), 3: prompt(16)}):
        ids, is_broken, right, _ = run.of(parts)
        assert ids.tolist() == right.tolist() and not is_broken.any()
    assert len(set(ids.tolist())) > 5, "the likeliest of all rows are alike: the test says little"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_they_are_so_where_the_head_is_quantized(quantization: Quantization) -> None:
    ids, is_broken, right, _ = Both(load(quantization=quantization)).of({0: prompt()})
    assert ids.tolist() == right.tolist() and not is_broken.any()


def test_rows_that_are_asked_for_keep_their_order() -> None:
    ids, _, right, _ = Both(load()).of({0: prompt(), 1: prompt(9)}, {1: [8], 0: [69]})
    assert ids.tolist() == right.tolist() and len(ids) == 2


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("equals", [(3, 9), (5, 40), (31, 1002), (2, 500, 900), (0, 1, 1000, 1001, 1002)])
def test_of_equal_logits_the_lowest_id_is_taken_whichever_thread_found_it(
    equals: tuple[int, ...], num_threads: int
) -> None:
    """Threads take from each other's end what those have left, so that a higher one may be found first."""

    def spoil(head: Array) -> None:
        head *= 0.01
        head[list(equals)] = 1.0

    run = Both(load(spoil=spoil, num_threads=num_threads))
    for _ in range(20):
        ids, is_broken, right, _ = run.of({len(run._tables): prompt(30)})
        is_positive = np.isin(ids, equals)
        assert ids.tolist() == right.tolist() and not is_broken.any()
        assert is_positive.any() and set(ids[is_positive].tolist()) == {equals[0]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_broken_where_a_logit_is_no_number_or_the_largest_has_no_end(dtype: DType) -> None:
    huge = 3e38

    def spoil(head: Array) -> None:
        head[701] = huge  # an infinity: a positive one breaks a row, a negative one is just unlikely

    ids, is_broken, right, is_right_broken = Both(load(dtype, spoil)).of({0: prompt()})
    assert is_broken.tolist() == is_right_broken.tolist() and 0 < is_broken.sum() < NUM_ROWS
    assert ids.tolist() == right.tolist() and not ids[is_broken].any()

    run = Both(load(dtype))
    run.step({0: prompt(20), 1: prompt(20)})
    run.cache.data[run.cache.at(np.array(run._tables[1][:1], np.int64))] = np.nan if dtype == "float32" else 0x7FC0
    ids, is_broken, right, is_right_broken = run.of({0: [7], 1: [8]})
    assert is_broken.tolist() == is_right_broken.tolist() == [False, True] and ids.tolist() == right.tolist()


def test_slots_that_read_their_newest_tokens_have_the_likeliest_of_their_logits() -> None:
    slots = Slots("bfloat16")
    some = [4, 3, 0, 1]
    logits = slots.expect(some)
    found = slots.decoding.likeliest(np.array(some), slots.starts(some))
    assert found is not None and found[0].tolist() == logits.argmax(1).tolist() and not found[1].any()
    slots.num_known[3] += 1
    assert slots.decoding.likeliest(np.array(some), slots.starts(some)) is None


# -- rows of a head that is large: see source/step/argmax_screen.h


LARGE = 40_003  # tokens: of a head that has a screen
NUM_PANELS = -(-LARGE // 32)
MOST_LEFT = 1.6  # panels of each row, about: 1.4 where the first one's logit is known, 1.9 by what int8 tells alone
FEW = (1, 2, 3, 5, 12, 13, 33, 64, 65, 200)  # rows


@cache
def large_checkpoint(is_tied: bool = False, hidden_size: int = 64) -> Checkpoint:
    return Checkpoint.random(vocab_size=LARGE, is_tied=is_tied, hidden_size=hidden_size)


def large(
    dtype: DType = "bfloat16",
    instruction_set: str | None = None,
    num_threads: int = 2,
    spoil: Callable[[Array], object] = nothing,
    **shape: Any,
) -> NativeModel:
    made = large_checkpoint(**shape)
    name = "model.embed_tokens.weight" if made.shape.is_tied else "lm_head.weight"
    head = made.tensors[name].copy()
    spoil(head)
    spoiled = replace(made, tensors={**made.tensors, name: head})
    return spoiled.load(dtype, worth_a_thread=1, instruction_set=instruction_set, num_threads=num_threads)


def check_rows(model: NativeModel, counts: Iterable[int]) -> list[int]:
    """How many panels of the head each of these steps was left with."""
    run, left = Both(model), []
    for count in counts:
        ids, is_broken, right, is_right_broken = run.of({len(run._tables): [i * 37 % LARGE for i in range(count)]})
        assert ids.tolist() == right.tolist() and is_broken.tolist() == is_right_broken.tolist()
        left.append(run.num_left)
    return left


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_rows_have_the_likeliest_of_a_large_head_and_multiply_little_of_it(
    instruction_set: str, dtype: DType, num_threads: int
) -> None:
    model = large(dtype, instruction_set, num_threads)
    for count, left in zip(FEW, check_rows(model, FEW), strict=True):
        assert count <= left < MOST_LEFT * count + 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_up_to_512_rows_have_a_screen_and_its_memory_is_part_of_the_steps(instruction_set: str, dtype: DType) -> None:
    model = large(dtype, instruction_set)
    for count, left in zip((512, 513, 512), check_rows(model, (512, 513, 512)), strict=True):
        assert 512 <= left < MOST_LEFT * 512 if count == 512 else left == -1
    with_it = [model.step_bytes(600, count) for count in (0, 512, 513)]
    with pytest.raises(NonFiniteError):
        model.weights.set_tensor("lm_head.weight", np.full((LARGE, 64), np.nan, np.float32))
    its_part = [num - model.step_bytes(600, count) for num, count in zip(with_it, (0, 512, 513), strict=True)]
    of_panels = NUM_PANELS * 512 * (4 + 1 / 8)  # what is seen of a row, and a mark
    assert its_part[0] == 0 and its_part[1] == its_part[2] and of_panels <= its_part[1] <= 1.2 * of_panels


@pytest.mark.parametrize("shape", [{"is_tied": True}, {"hidden_size": 54}, {"hidden_size": 150}], ids=str)
@pytest.mark.parametrize("instruction_set", SETS)
def test_so_they_have_where_the_head_is_tied_and_where_rows_are_no_whole_vectors(
    instruction_set: str, shape: dict[str, Any]
) -> None:
    """150 are two steps of AMX's products of bytes, and part of a third."""
    for count, left in zip(FEW, check_rows(large(instruction_set=instruction_set, **shape), FEW), strict=True):
        assert count <= left < count * NUM_PANELS / 50


def test_a_screen_tells_the_same_with_all_instructions_of_avx512() -> None:
    """Sums of whole numbers are exact. By one thread, as it depends on who is first what is looked at closer."""
    names = [each for each in AVAILABLE if each != "avx2"]
    if len(names) < 2:
        pytest.skip("the sets between are built with MILLRACE_FULL=1")
    told = []
    for name in names:
        run = Both(large("float32", name, num_threads=1, hidden_size=150))
        for count in FEW:
            run.of({len(run._tables): [i * 37 % LARGE for i in range(count)]})
            told.append((name, count, run.num_left, run.num_closer))
    assert len({case[1:] for case in told}) in (0, len(FEW)), told


@pytest.mark.parametrize("instruction_set", SETS)
def test_a_screens_rows_are_padded_to_whole_registers_in_amx_alone(instruction_set: str) -> None:
    quads = 16 if "amx" in instruction_set else 14
    model = large(instruction_set=instruction_set, hidden_size=54)
    assert model.weights.screen_bytes == NUM_PANELS * (32 * 4 * quads + 4 * 32 + 2 * 4)


def one_token_leads(head: Array) -> None:
    head[:] = head[0]
    head[31_000] += 2.0**-9 * np.sign(head[0])  # less than int8 tells: no panel can be left out


def rows_have_outliers(head: Array) -> None:
    head[:, 5] *= 300  # so that int8 has little for the others


def halves_are_alike_but_for_the_last_bit(head: Array) -> None:
    half = len(head) // 2
    head[half : 2 * half] = head[:half] * (1 + 2.0**-8)


def halves_are_equal(head: Array) -> None:
    half = len(head) // 2
    head[half : 2 * half] = head[:half]


def tokens_in_the_middle_have_no_end(head: Array) -> None:
    head[20_000:20_040] = 3e38


def all_are_tiny(head: Array) -> None:
    halves_are_alike_but_for_the_last_bit(head)
    head *= 1e-24  # whose squares float32 does not have


def most_are_nothing(head: Array) -> None:
    head[::3] = 0
    head[1::3] = -abs(head[1::3]) * 1e-30


SPOILED = (
    one_token_leads,
    rows_have_outliers,
    halves_are_alike_but_for_the_last_bit,
    halves_are_equal,
    tokens_in_the_middle_have_no_end,
    all_are_tiny,
    most_are_nothing,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoil", SPOILED)
def test_they_have_it_however_little_int8_tells(spoil: Callable[[Array], object], dtype: DType) -> None:
    for count in FEW if FULL else (1, 5, 33, 200):  # each with a screen that has yet to tell little
        check_rows(large(dtype, spoil=spoil), [count])
    check_rows(large(dtype, spoil=spoil), [33, 33, 65, 5])  # and one that expects what rows before had


@pytest.mark.parametrize("factor", [1e-20, 1e18, 3e35], ids=str)
def test_they_have_it_however_short_or_long_rows_are(factor: float) -> None:
    made = large_checkpoint()
    norm = made.tensors["model.norm.weight"] * np.float32(factor)
    spoiled = replace(made, tensors={**made.tensors, "model.norm.weight": norm})
    for count in FEW:
        check_rows(spoiled.load("bfloat16", num_threads=2, worth_a_thread=1), [count])


def test_panels_are_looked_at_closer_less_often_once_largest_logits_of_rows_are_known() -> None:
    model = large(num_threads=1)
    run, closer = Both(model), []
    for step in range(4):
        run.of({33 * step + i: [i * 37 % LARGE] for i in range(33)})
        closer.append(run.num_closer)
    assert max(closer[1:]) < closer[0] / 2


def what_the_head_multiplies(model: NativeModel, token: int) -> Array:
    """[hidden], of a sequence of that token; the head is another one then."""
    head = np.zeros((LARGE, 64), np.float32)
    head[:64] = np.eye(64)
    model.weights.set_tensor("lm_head.weight", head)
    return np.asarray(Run(model).step({0: [token]})[0][0, :64].astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_their_tokens_whose_largest_logits_are_far_below_those_before(dtype: DType) -> None:
    model, head = large(dtype), large_checkpoint().tensors["lm_head.weight"].copy()
    x = what_the_head_multiplies(model, 5)
    head[20_000] = 1.5 * np.linalg.norm(head[0]) / np.linalg.norm(x) * x
    model.weights.set_tensor("lm_head.weight", head)
    run = Both(model)
    for step in range(3):
        assert set(run.of({100 * step + i: [5] for i in range(33)})[0]) == {20_000}
    ids, _, right, _ = run.of({1000 + i: [40 + i * 37 % VOCAB] for i in range(33)})
    assert ids.tolist() == right.tolist() and ids.tolist().count(20_000) < 5
    assert 33 <= run.num_left < 33 * NUM_PANELS / 50


@pytest.mark.parametrize("num_threads", [1, 2])
def test_columns_of_no_token_are_no_logits_where_all_of_a_row_s_are_below_nothing(num_threads: int) -> None:
    """The last panel has 29 such columns, whose sums are 0; rows before had large logits, so panels are below these."""
    model, draw = large(num_threads=num_threads), np.random.default_rng(3)
    high, low = (what_the_head_multiplies(model, token) for token in (5, 77))
    head = (-low * draw.uniform(1.0, 2.0, (LARGE, 1)) / np.linalg.norm(low)).astype(np.float32)
    across = high - (high @ low) / (low @ low) * low
    head[20_000] = 40 * across / np.linalg.norm(across) - 3 * low / np.linalg.norm(low)
    model.weights.set_tensor("lm_head.weight", head)
    run = Both(model)
    for step in range(3):
        assert set(run.of({100 * step + i: [5] for i in range(33)})[0]) == {20_000}
    ids, _, right, _ = run.of({1000 + i: [77] for i in range(33)})
    assert ids.tolist() == right.tolist() and -(-LARGE // 32) - 1 not in ids // 32


STEP = 2.0**-12  # of a head's numbers


def what_int8_misses_of_the_head(x: Array) -> Array:
    """A row of a head in whole steps and almost half of one, all of which count with `x`; what a scale is made of."""
    row = np.rint(9 * x / abs(x).max()) + 0.48 * np.sign(x)
    row[abs(x).argmin()] = 127
    return np.asarray(row * STEP)


def what_whole_numbers_miss_of_the_row(x: Array) -> Array:
    """A row of a head in whole steps, that lies the way of what `x` loses where it is rounded as in
    step/argmax_screen.h."""
    scale = min(abs(x).max(), 4 * np.sqrt((x * x).mean())) / 127
    missed = x - np.rint(x / scale) * scale
    return np.asarray(np.rint(127 * missed / abs(missed).max()) * STEP)


@pytest.mark.parametrize("beyond", [False, True], ids=["in 8 bits", "one number beyond them"])
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("mislead", [what_int8_misses_of_the_head, what_whole_numbers_miss_of_the_row])
def test_what_is_missed_is_allowed_for_even_where_all_of_it_goes_the_same_way(
    mislead: Callable[[Array], Array], instruction_set: str, beyond: bool
) -> None:
    behind, ahead = 3_200, 28_800  # tokens, in the order in which one thread comes to them
    model = large("float32", instruction_set, num_threads=1)
    norm = large_checkpoint().tensors["model.norm.weight"].copy()
    norm[0] *= 40 if beyond else 1
    model.weights.set_tensor("model.norm.weight", norm)
    x, head = what_the_head_multiplies(model, 5), np.zeros((LARGE, 64), np.float32)
    scale = min(abs(x).max(), 4 * np.sqrt((x * x).mean())) / 127
    whole = np.rint(x / scale) * scale
    assert (abs(x / scale).max() > 128) == beyond
    head[ahead] = mislead(x)
    in_int8 = np.rint(head[ahead] / STEP) * STEP @ whole
    straight = np.rint(127 * x / abs(x).max())  # nothing is missed of it, or little
    head[behind] = straight * (0.3 * in_int8 + 0.7 * (head[ahead] @ x)) / (straight @ x)
    model.weights.set_tensor("lm_head.weight", head)
    assert in_int8 < head[behind] @ x < head[ahead] @ x
    ids, _, right, _ = Both(model).of({0: [5]})
    assert ids.tolist() == right.tolist() == [ahead]


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_that_come_late_change_no_token(dtype: DType, num_threads: int) -> None:
    model = large(dtype, num_threads=num_threads)
    for lateness in (*range(25), 1000, -1):  # phases; -1: they come when they will
        model._library.millrace_set_join_delay(model._model, lateness)
        for count, left in zip((3, 33, 130), check_rows(model, (3, 33, 130)), strict=True):
            assert 0 < left < count * NUM_PANELS / 50


@pytest.mark.parametrize("num_large", [1, 5, 40])
def test_numbers_of_rows_that_are_far_larger_than_most_make_a_screen_no_coarser(num_large: int) -> None:
    made = large_checkpoint()
    norm = made.tensors["model.norm.weight"].copy()
    norm[:num_large] *= 40
    spoiled = replace(made, tensors={**made.tensors, "model.norm.weight": norm})
    model = spoiled.load("bfloat16", num_threads=2, worth_a_thread=1)
    for count, left in zip(FEW, check_rows(model, FEW), strict=True):
        assert left < count * NUM_PANELS / 50


def test_steps_go_without_a_screen_for_a_while_where_it_tells_little() -> None:
    model = large(spoil=one_token_leads)
    assert check_rows(model, [1] * 67) == [NUM_PANELS, *[-1] * 64, NUM_PANELS, -1]


def test_rows_beside_one_that_is_no_number_have_their_tokens_and_none_takes_none() -> None:
    model = large()
    run = Both(model)
    run.step({sequence: prompt(20) for sequence in range(4)})
    run.cache.data[run.cache.at(np.array(run._tables[1][:1], np.int64))] = 0x7FC0
    ids, is_broken, right, is_right_broken = run.of({3: [7], 0: [9], 1: [8], 2: [8]}, {2: [0], 1: [0], 3: [0]})
    assert is_broken.tolist() == is_right_broken.tolist() == [False, True, False] and ids.tolist() == right.tolist()
    assert all(len(each) == 0 for each in run.of({0: [7]}, {0: []}))


def test_a_screen_is_made_of_large_heads_alone_and_counted_beside_the_weights() -> None:
    whole, quantized = large(), large_checkpoint().load("bfloat16", quantization="int8")
    assert whole.weights.screen_bytes == NUM_PANELS * (32 * 64 + 4 * 32 + 2 * 4)
    assert whole.weights.has_screen("lm_head.weight") and not whole.weights.has_screen("model.norm.weight")
    assert quantized.weights.screen_bytes == load().weights.screen_bytes == 0
    assert whole.weights.num_bytes > LARGE * 64 * 2


def test_a_head_that_is_set_again_has_a_screen_of_its_new_numbers() -> None:
    model = large()
    head = large_checkpoint().tensors["lm_head.weight"]
    model.weights.set_tensor("lm_head.weight", np.roll(head, 9_000, 0))
    check_rows(model, FEW)
    with pytest.raises(NonFiniteError):
        model.weights.set_tensor("lm_head.weight", np.full_like(head, np.nan))
    assert model.weights.screen_bytes == 0
