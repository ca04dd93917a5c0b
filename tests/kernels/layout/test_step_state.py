"""Runs `tests/kernels/interpreted_step.py` where it can run, and compiles its kernels for GPUs that are not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from millrace.kernels.checks import compile_check
from millrace.kernels.checks.compile_cases import CompileCase, step_cases
from millrace.kernels.triton import launch as triton_launch

pytestmark = pytest.mark.slow


def test_the_kernels_equal_their_twins_in_the_interpreter() -> None:
    file = Path(__file__).parents[1] / "interpreted_step.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(file), "-p", "no:cacheprovider", "-W", "error::RuntimeWarning"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=file.parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed.group(1)) >= 7, done.stdout


@pytest.mark.skipif(triton_launch.IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing is compiled")
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", step_cases(), ids=lambda case: case.name)
def test_the_kernels_compile_without_spills(case: CompileCase, arch: int) -> None:
    reports = compile_check.check(case, arch)
    assert reports
    for report in reports:
        assert not report.problems(case), report
