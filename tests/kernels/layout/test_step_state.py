"""The kernels of a step's state compile for GPUs that are not here."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from millrace.kernels.checks import compile_check
from millrace.kernels.checks.compile_cases import CompileCase, step_cases
from millrace.kernels.triton import launch as triton_launch

pytestmark = pytest.mark.slow


@pytest.mark.skipif(triton_launch.IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing is compiled")
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", step_cases(), ids=lambda case: case.name)
def test_the_kernels_compile_without_spills(case: CompileCase, arch: int) -> None:
    reports = compile_check.check(case, arch)
    assert reports
    for report in reports:
        assert not report.problems(case), report
