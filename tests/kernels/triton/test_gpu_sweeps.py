"""Sweeps over candidates: processes that compile them, whatever becomes of one, and the command line of all sweeps.

`tests/kernels/interpreted_sweeps.py` runs the sweeps themselves.
"""

from __future__ import annotations

import operator
import os
import time
from functools import partial

import pytest
import torch

from tests.bench.gpu.few_rows import Tiling, product_tiling
from tests.bench.gpu.floors import GPU_SHAPES
from tests.bench.gpu.sweeps import attention as attention_sweep
from tests.bench.gpu.sweeps import products as product_sweep
from tests.bench.gpu.sweeps.compiling import compile_all
from tests.bench.gpu.sweeps.product_candidates import (
    MOST_CANDIDATES,
    NUM_PROCESSORS,
    Case,
    Job,
    Product,
    products_of,
    tilings_of,
)
from tests.bench.gpu.trials.layers import Widths

WORKS = partial(int, "1")


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_candidate_that_raises_or_ends_its_process_is_named_and_the_others_are_tried(num_processes: int) -> None:
    jobs = {"works": WORKS, "raises": partial(int, "x"), "ends": partial(os._exit, 9), "works too": WORKS}
    assert compile_all(jobs, operator.call, num_processes, time.monotonic() + 60) == {
        "works": "",
        "raises": "ValueError: invalid literal for int() with base 10: 'x'",
        "ends": "its process ended with status 9",
        "works too": "",
    }


@pytest.mark.slow
def test_a_candidate_that_takes_too_long_is_named_and_nothing_is_said_of_those_behind_it() -> None:
    jobs = {"hangs": partial(time.sleep, 600), "never begins": WORKS}
    (name, said), *others = compile_all(jobs, operator.call, 1, time.monotonic() + 1).items()
    assert name == "hangs" and said.startswith("not done after 1.") and not others


def test_without_time_nothing_is_tried() -> None:
    assert compile_all({"works": WORKS}, operator.call, 1, time.monotonic()) == {}
    assert compile_all({}, operator.call, 1, time.monotonic()) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("sweep", [attention_sweep, product_sweep])
def test_without_a_gpu_a_sweep_says_so_and_fails(sweep: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main([]) == 2  # type: ignore[attr-defined]
    told = capsys.readouterr()
    assert "no CUDA device" in told.err and not told.out


# ---- candidates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 8, 16, 17, 64])
def test_a_product_has_todays_tiling_and_others_that_hold_its_rows(num_rows: int) -> None:
    for product in (found for name, shape in GPU_SHAPES.items() for found in products_of(name, Widths.of(shape))):
        first, *others = tilings_of(Case(product, num_rows))
        assert first == product_tiling(num_rows, product.num_outputs, product.num_inner, NUM_PROCESSORS)
        assert len(others) == len({first, *others}) - 1 >= MOST_CANDIDATES - 3
        assert all(tiling.block_m >= num_rows and tiling.block_k < 2 * product.num_inner for tiling in others)


def test_candidates_that_the_compiler_tells_apart_are_compiled_each_and_others_once() -> None:
    tiling = Tiling(16, 32, 128, 12, 4, 4)

    def compiled_as(num_outputs: int, num_inner: int, num_rows: int = 16) -> tuple[object, ...]:
        return Job(Case(Product("p", num_outputs, num_inner), num_rows), tiling).compiled_as

    assert compiled_as(6144, 14_336, 9) == compiled_as(4096, 14_336)
    assert compiled_as(6144, 14_336) != compiled_as(6144, 4096), "32 steps over K make 11 splits of 3"
    assert compiled_as(6144, 14_336) != compiled_as(6150, 14_336), "a last tile that is not whole"
