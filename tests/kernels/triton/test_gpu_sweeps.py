"""Sweeps over candidates: processes that compile them, whatever becomes of one, and the command line of all sweeps.

`tests/kernels/interpreted_sweeps.py` runs the sweeps themselves.
"""

from __future__ import annotations

import operator
import os
import time
from functools import partial
from itertools import product

import pytest
import torch

from tests.bench.gpu.few_rows import product_tiling
from tests.bench.gpu.floors import GPU_SHAPES
from tests.bench.gpu.sweeps import ahead
from tests.bench.gpu.sweeps.attention import Choice, cases_of, choices_of, today
from tests.bench.gpu.sweeps.choices import DECISIVE
from tests.bench.gpu.sweeps.compiling import compile_all
from tests.bench.gpu.sweeps.product_candidates import (
    MOST_CANDIDATES,
    NUM_PROCESSORS,
    Case,
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


# ---- candidates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 8, 16, 17, 64])
def test_a_product_has_todays_tiling_and_others_that_hold_its_rows(num_rows: int) -> None:
    for found in (found for name, shape in GPU_SHAPES.items() for found in products_of(name, Widths.of(shape))):
        first, *others = tilings_of(Case(found, num_rows))
        assert first == product_tiling(num_rows, found.num_outputs, found.num_inner, NUM_PROCESSORS)
        assert len(others) == len({first, *others}) - 1 >= MOST_CANDIDATES - 3
        assert all(tiling.block_m >= num_rows and tiling.block_k < 2 * found.num_inner for tiling in others)


def test_attention_has_todays_tiling_first_and_tries_fewer_tiles_where_little_is_loaded() -> None:
    cpu, names = torch.device("cpu"), set()
    for case in cases_of(None):
        first, *others = choices_of(case, cpu, torch.bfloat16, is_dry=False)
        assert first == Choice(today(case, cpu, torch.bfloat16)) and len(others) == len({first, *others}) - 1 >= 8
        assert any(choice.tiling.num_stages == 2 for choice in others), "one that waits for each load"
        assert {choice.min_tiles for choice in others} >= set(case.min_tiles)
        names.add(case.name)
    assert all(any(name.endswith(load) for name in names) for load in DECISIVE.values())


def test_all_that_a_run_launches_is_among_the_jobs_of_its_card() -> None:
    jobs, older = ahead.jobs_of(ahead.H200), ahead.jobs_of(ahead.Target(80, 108))
    steps = [job for job in jobs.values() if isinstance(job, ahead.ModelJob)]
    assert {(job.shape, job.is_fp8) for job in steps} == set(product(GPU_SHAPES, (False, True)))
    assert len(older) < len(jobs) and not any(job.is_fp8 for job in older.values() if isinstance(job, ahead.ModelJob))
