"""Early launches wait before they touch what launches write, in the code that the compiler makes of them.

A part of `python -m millrace.kernels.checks.early_check`, which takes every kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from millrace.kernels.checks import compile_cases, early_check
from millrace.kernels.checks.compile_cases import CompileCase
from millrace.kernels.checks.compile_check import check, compiled, recorded_launches
from millrace.kernels.checks.expert_cases import expert_cases
from millrace.kernels.checks.lora_cases import lora_cases
from millrace.kernels.checks.product_cases import product_cases
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.launch import let_next_begin, wait_for_earlier
from tests.counts import FULL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton_launch.IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing is compiled"),
]

BF16 = torch.bfloat16
PRODUCTS = product_cases(["8B output"], rows=(4, 64))[1:7:2]  # with splits, a gate in vectors, and biases
FULL_ONLY = ("step inputs", "step inputs recurrent", "choose bf16")  # CI has the same kernels with more in them
CASES = [
    *compile_cases.layer_cases(BF16)[::2],
    *compile_cases.prologue_cases(80, 128, BF16)[1:2],
    *(case for case in compile_cases.step_cases() if FULL or case.name not in FULL_ONLY),
    *compile_cases.attention_cases(128, BF16)[:2],
    *(case for case in compile_cases.sampling_cases(BF16)[:2] if FULL or case.name not in FULL_ONLY),
    *PRODUCTS,
    *lora_cases(BF16, (64,), (16,), ["8B gate_up"])[3:],  # gated
    *(expert_cases(BF16, ["OLMoE"], (1, 2048)) if FULL else []),
]


@triton.jit
def _planted_kernel(out, x, weight, count, FAULT: tl.constexpr, IS_EARLY: tl.constexpr):
    let_next_begin(IS_EARLY)
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    if FAULT == "ends" and tl.program_id(0) >= count:
        return
    factors = tl.load(weight + i)
    if FAULT == "reads":
        factors += tl.load(x + i)
    if FAULT == "writes":
        tl.store(out + i, factors)
    if FAULT == "adds":
        tl.atomic_add(out + i, factors)
    if FAULT == "branches":
        if count > 0:
            wait_for_earlier(IS_EARLY)
    elif FAULT != "forgets":
        wait_for_earlier(IS_EARLY)
    tl.store(out + i, tl.load(x + i) * factors)


def planted(fault: str) -> CompileCase:
    def launch() -> None:
        out, x, weight = (torch.empty(512, dtype=torch.float32, device="meta") for _ in range(3))
        _planted_kernel[(4,)](out, x, weight, 17, FAULT=fault, **triton_launch.early_launch(x.device))

    return CompileCase(fault, launch)


FAULTS = {
    "ends": "a program may end without having waited",
    "reads": "x before the wait: ",
    "writes": "out before the wait: ",
    "adds": "out before the wait: ",
    "branches": "x before the wait: ",
    "forgets": "x before the wait: ",
}


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(early_check.EARLY_TENSORS, "_planted_kernel", {"weight"})
    problems = early_check.problems_of(planted(fault))
    assert bool(problems) == bool(fault)
    if fault:
        assert any(FAULTS[fault] in problem for problem in problems), problems


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_waits_before_it_touches_what_launches_write(case: CompileCase) -> None:
    assert early_check.num_early(case)
    assert early_check.problems_of(case) == []


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.name)
def test_a_product_fetches_weights_while_it_waits(case: CompileCase) -> None:
    launch = recorded_launches(case.launch, 90)[-1]
    kernel, _ = compiled(launch, 90)
    assert early_check.num_early_reads(kernel.asm["ptx"]) >= 2


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.name)
def test_a_product_spills_nothing_and_leaves_room_for_two_programs(case: CompileCase, arch: int) -> None:
    *_, report = check(case, arch)
    assert not report.problems(case), report
    assert report.occupancy >= 2, report


@pytest.mark.parametrize("arch", [80, 89])
def test_no_launch_is_early_before_capability_9(arch: int) -> None:
    case: Callable[[], Any] = PRODUCTS[0].launch
    assert not any("launch_pdl" in launch.options for launch in recorded_launches(case, arch))


LISTING = "LDG.E.128 R4, [R2] ;\n ACQBULK ;\n LDG.E R8, [R6] ;\n STG.E [R2], R8 ;\n"


def test_the_machine_code_has_no_access_before_the_wait_that_ptx_has_not() -> None:
    assert early_check.machine_problems(LISTING, 1) == []
    assert early_check.machine_problems(LISTING, 0) == ["1 reads before ACQBULK, where PTX has 0"]
    assert early_check.machine_problems("STG.E [R2], R8 ;\n" + LISTING, 1) == ["1 writes before ACQBULK"]
    assert early_check.machine_problems("EXIT ;", 1) == ["the machine code has no ACQBULK"]


def test_splits_store_then_meet_then_count_and_join_from_the_shared_cache() -> None:
    """The order by which the program that counts last sees what the others stored."""
    launch = recorded_launches(PRODUCTS[0].launch, 90)[-1]
    kernel, _ = compiled(launch, 90)
    ptx = kernel.asm["ptx"]
    count = ptx.index("atom.global.gpu.acq_rel.add") if "atom.global.gpu.acq_rel.add" in ptx else ptx.index("atom.")
    assert "acq_rel" in ptx[count : count + 60] and "gpu" in ptx[count : count + 60]
    stored = ptx.rindex("st.global", 0, count)
    assert re.search(r"bar(rier)?\.(cta\.)?sync", ptx[stored:count])
    joined = ptx.index("ld.global.cg", count)
    assert re.search(r"bar(rier)?\.(cta\.)?sync", ptx[count:joined])
    assert "ld.global.cg" not in ptx[:count]


@triton.jit
def _misnamed_kernel(out, params, IS_EARLY: tl.constexpr):
    tl.store(out, tl.load(params))


def test_a_launch_that_triton_cannot_bind_is_found_without_a_gpu() -> None:
    """Triton has variables of its own where it binds arguments, which hide those of the same name."""
    out, found = (torch.empty(16, device="meta") for _ in range(2))
    with pytest.raises(TypeError, match="failed to specialize|dict"):
        recorded_launches(lambda: _misnamed_kernel[(1,)](out, found, IS_EARLY=False), 90)
