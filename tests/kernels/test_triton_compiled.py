"""The Triton kernels compile for GPUs that are not here, and the code has what speed needs. About 2 s a kernel.

A part of `python -m millrace.kernels.compile_check`, which takes every head size and type.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from millrace.kernels import compile_cases, compile_check, triton_launch
from millrace.kernels.compile_check import Case, Report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton_launch.IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing is compiled"),
]

BF16 = torch.bfloat16
CASES = [
    *((90, case) for case in compile_check.layer_cases(BF16)),
    *((arch, case) for arch in (90, 80) for case in compile_cases.prologue_cases(arch, 128, BF16)),
    *((arch, case) for arch in (90, 80) for case in compile_cases.copy_cases()),
    *((arch, case) for arch in (90, 80) for case in compile_cases.sampling_cases(BF16)),
    *((90, case) for case in compile_check.attention_cases(64, BF16, group=3)[:2]),
    *((90, case) for case in compile_check.attention_cases(128, BF16)),
    *((80, case) for case in compile_check.attention_cases(128, BF16)[:2]),
]


@pytest.mark.parametrize(("arch", "case"), CASES, ids=lambda value: getattr(value, "name", value))
def test_no_register_spills_and_loops_are_pipelined(arch: int, case: Case) -> None:
    reports = compile_check.check(case, arch)
    assert reports
    for report in reports:
        assert not report.problems(case), report


def test_a_report_names_what_is_wrong() -> None:
    case = Case("extend 128", lambda: None, copies_ahead=True, uses_wgmma=True)
    good = Report("extend 128: extend_kernel", 90, 200, 0, 0, 98560, 52, 24)
    assert good.problems(case) == []
    bad = Report("extend 128: extend_kernel", 90, 255, 48, 0, 240 << 10, 0, 0)
    assert [problem.split()[0] for problem in bad.problems(case)] == ["48", "245760", "no", "no"]


def test_a_launch_is_recorded_with_all_its_arguments() -> None:
    (case, *_) = compile_check.attention_cases(64, BF16)
    (launch,) = compile_check.recorded_launches(case.launch, 90)
    assert set(launch.arguments) == set(launch.kernel.arg_names)
    assert launch.options == {"num_warps": 4, "enable_fp_fusion": True}
