"""Sweeps over candidates: processes that compile them, whatever becomes of one, and the command line of all sweeps.

`tests/kernels/interpreted_sweeps.py` runs the sweeps themselves.
"""

from __future__ import annotations

import operator
import os
import time
from functools import partial
from importlib import import_module
from itertools import product
from math import inf
from pkgutil import iter_modules

import pytest
import torch
from triton.runtime.jit import JITFunction

from millrace.kernels import triton
from millrace.kernels.tilings.predicted import predicted_forms
from millrace.kernels.tilings.products import ProductForm
from tests.bench.gpu.floors import GPU_SHAPES
from tests.bench.gpu.parts import adapters
from tests.bench.gpu.sweeps import ahead
from tests.bench.gpu.sweeps.attention import Choice, cases_of, choices_of, today
from tests.bench.gpu.sweeps.compiling import compile_all
from tests.bench.gpu.sweeps.product_candidates import (
    MOST_CANDIDATES,
    NUM_PROCESSORS,
    Product,
    ProductCase,
    fits,
    forms_of,
    products_of,
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
    assert name == "hangs" and said.startswith("not done after ") and not others


def test_without_time_nothing_is_tried() -> None:
    assert compile_all({"works": WORKS}, operator.call, 1, time.monotonic()) == {}
    assert compile_all({}, operator.call, 1, time.monotonic()) == {}


# ---- candidates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 4, 8, 16, 32, 64, 256])
def test_a_product_has_the_predicted_form_and_others_that_hold_its_rows(num_rows: int) -> None:
    for found in (found for name, shape in GPU_SHAPES.items() for found in products_of(name, Widths.of(shape))):
        case = ProductCase(found, num_rows)
        forms = forms_of(case)
        predicted = predicted_forms(
            found.num_outputs, found.num_inner, found.kind, "bfloat16", NUM_PROCESSORS, bytes_per_s=inf
        )
        assert [forms[0]] == [form for most, form in predicted if num_rows <= most][:1] or num_rows > 64
        assert len(forms) == len(set(forms)) and MOST_CANDIDATES >= len(forms) >= 8
        assert all(fits(form, case.shape) for form in forms)
        assert {form.fuses_norm for form in forms} == {False, True} or not found.has_norm


def test_forms_that_the_compiler_tells_apart_are_compiled_each_and_others_once() -> None:
    form = ProductForm(form="split", block_m=16, block_n=32, block_k=128, num_splits=4)

    def compiled_as(num_outputs: int, num_inner: int, num_rows: int = 16) -> str:
        return ProductCase(Product("p", num_outputs, num_inner), num_rows).compiled_as(form)

    assert compiled_as(6144, 4096, 9) == compiled_as(4096, 4096)
    assert compiled_as(6144, 4096) != compiled_as(6144, 14_336), "splits of another length"
    assert compiled_as(6144, 4096) != compiled_as(6150, 4096), "a last tile that is not whole"


def test_attention_has_todays_tiling_first_and_tries_fewer_tiles_where_little_is_loaded() -> None:
    cpu, names = torch.device("cpu"), set()
    for case in cases_of(None):
        first, *others = choices_of(case, cpu, torch.bfloat16, is_dry=False)
        assert first == Choice(today(case, cpu, torch.bfloat16)) and len(others) == len({first, *others}) - 1 >= 8
        assert any(choice.tiling.num_stages == 2 for choice in others), "one that waits for each load"
        assert {choice.min_tiles for choice in others} >= set(case.min_tiles)
        names.add(case.name)
    assert len(names) == len(cases_of(None))


def test_all_that_a_run_launches_is_among_the_jobs_of_its_card() -> None:
    jobs, older = (
        {**ahead.attention_jobs(card), **ahead.step_jobs(card)} for card in (ahead.H200, ahead.Target(80, 108))
    )
    assert any(job[0] is ahead.compile_trial for job in jobs.values() if isinstance(job, tuple)), (
        "those that are checked"
    )
    steps = [job for job in jobs.values() if isinstance(job, ahead.ModelJob)]
    assert {(job.shape, job.is_fp8) for job in steps} == set(product(GPU_SHAPES, (False, True)))
    rows = {load.num_rows for load in adapters.LOADS}
    assert {(job.shape, job.num_rows) for job in steps if job.has_adapters} == {(adapters.SHAPE, n) for n in rows}
    assert len(older) < len(jobs) and not any(job.is_fp8 for job in older.values() if isinstance(job, ahead.ModelJob))


def test_tritons_launcher_takes_every_launch_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what neither the interpreter nor the compile check runs: it fails for some names of arguments."""
    launched: set[str] = set()
    monkeypatch.setattr(JITFunction, "_do_compile", lambda kernel, *_: launched.add(kernel.__name__))
    shape = GPU_SHAPES["qwen3-0.6b"] | {"hidden_size": 512, "num_hidden_layers": 1, "intermediate_size": 640}
    monkeypatch.setitem(GPU_SHAPES, "small", shape | {"vocab_size": 300})
    for size, kinds in (((1, 1, True), (0, 1, 2, 4)), ((64, 64, True), (0,)), ((256, 512, False), ())):
        ahead.compile_job(ahead.H200, ahead.ModelJob("small", False, *size, kinds))
    ahead.compile_job(ahead.H200, ahead.ModelJob("small", False, 64, 64, True, (0,), has_adapters=True))
    assert launched >= {"group_kernel", "shrink_kernel", "add_kernel", "gated_kernel"}
    assert launched >= {"vector_kernel", "split_kernel", "attention_kernel", "list_kernel", "_gated_kernel"}


def test_no_kernel_has_an_argument_with_a_name_that_tritons_launcher_uses() -> None:
    rooms = [import_module(f"{triton.__name__}.{room.name}") for room in iter_modules(triton.__path__)]
    kernels = {kernel for room in rooms for kernel in vars(room).values() if isinstance(kernel, JITFunction)}
    assert len(kernels) > 20
    assert not [
        kernel.__name__ for kernel in kernels if {"params", "specialization", "options"} & set(kernel.arg_names)
    ]
