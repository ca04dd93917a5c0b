"""Tokens that a step takes for the likeliest while it computes logits: those that a chooser takes from the logits, in
every batch, by however many threads, and broken where those are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import Bools, DType, Longs, Quantization
from millrace.kernels.native.slots import Chooser
from tests.kernels.native_oracle import Array, Checkpoint, Run
from tests.kernels.test_native import DTYPES, SETS
from tests.kernels.test_native_slots import Slots

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

    def of(self, parts: dict[int, list[int]], asked: dict[int, list[int]] | None = None) -> tuple[Array, ...]:
        """(ids, broken rows; the same of the chooser), [L] each."""
        found: list[tuple[Longs, Bools]] = []
        step = self.model.step

        def twice(*args: object, logits: Array, **inputs: object) -> None:
            found.append((np.full(len(logits), -1), np.full(len(logits), True)))
            step(*args, likeliest=found[0], **inputs)  # type: ignore[arg-type]
            step(*args, logits=logits, **inputs)  # type: ignore[arg-type]

        self.model.step = twice  # type: ignore[method-assign, assignment]
        try:
            logits = np.concatenate(list(self.step(parts, asked).values()))
        finally:
            self.model.step = step  # type: ignore[method-assign]
        return *found[0], *choose(self.model, logits)


def choose(model: NativeModel, logits: Array) -> tuple[Longs, Bools]:
    count = len(logits)
    zeros, ones, ids = np.zeros(count), np.ones(count), np.zeros(count, np.int64)
    columns = {"temperature": ones, "top_k": ids, "top_p": ones, "min_p": zeros, "seeds": ids.astype(np.uint64)}
    chooser = Chooser(model, is_random=zeros > 0, num_prompt=ids.astype(np.int32), **columns)  # type: ignore[arg-type]
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
def test_of_equals_the_lowest_is_taken_whoever_found_which(equals: tuple[int, ...], num_threads: int) -> None:
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


# -- few rows of a head that is large: see screen.h


LARGE = 40_003  # tokens: of a head that has a screen
FEW = (1, 2, 3, 5, 12)


@cache
def large(
    dtype: DType, instruction_set: str | None = None, num_threads: int = 2, spoil: Callable[[Array], object] = nothing
) -> NativeModel:
    made = Checkpoint.random(vocab_size=LARGE, is_tied=False)
    spoil(made.tensors["lm_head.weight"])
    return made.load(dtype, worth_a_thread=1, instruction_set=instruction_set, num_threads=num_threads)


def check_few_rows(model: NativeModel) -> set[int]:
    """The tokens that were taken."""
    run, taken = Both(model), set()
    for count in FEW:
        ids, is_broken, right, is_right_broken = run.of({count: [i * 37 % LARGE for i in range(count)]})
        assert ids.tolist() == right.tolist() and is_broken.tolist() == is_right_broken.tolist()
        taken |= set(ids.tolist())
    return taken


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_few_rows_have_the_likeliest_of_a_large_head(instruction_set: str, dtype: DType, num_threads: int) -> None:
    assert len(check_few_rows(large(dtype, instruction_set, num_threads))) > 5


def one_token_leads(head: Array) -> None:
    head[:] = head[0]
    head[31_000] += 2.0**-9 * np.sign(head[0])  # less than int8 tells: no panel can be left out


def rows_have_outliers(head: Array) -> None:
    head[:, 5] *= 300  # so that int8 has little for the others


def rows_are_alike_but_for_the_last_bit(head: Array) -> None:
    head[1::2] = head[::2][: len(head[1::2])] * (1 + 2.0**-8)


def tokens_in_the_middle_are_no_numbers(head: Array) -> None:
    head[20_000:20_040] = 3e38


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spoil",
    [one_token_leads, rows_have_outliers, rows_are_alike_but_for_the_last_bit, tokens_in_the_middle_are_no_numbers],
)
def test_they_have_it_however_little_int8_tells(spoil: Callable[[Array], object], dtype: DType) -> None:
    model = large(dtype, spoil=spoil)
    for _ in range(3):  # where all panels are left, the next steps go without
        check_few_rows(model)


def test_a_screen_is_made_of_large_heads_alone_and_counted_beside_the_weights() -> None:
    made = Checkpoint.random(vocab_size=LARGE)
    whole, quantized = made.load("bfloat16"), made.load("bfloat16", quantization="int8")
    num_panels = -(-LARGE // 32)
    if whole.instruction_set != "amx":
        assert whole.screen_bytes == num_panels * (32 * 64 + 2 * 32 + 4)
    assert quantized.screen_bytes == load().screen_bytes == 0
    assert whole.weights_bytes > LARGE * 64 * 2
