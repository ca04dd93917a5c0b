"""Runs `interpreted*.py` where they can run: in a process that had TRITON_INTERPRET set from its start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.counts import count

OPTIONS = ["-p", "no:cacheprovider", "-p", "tests.kernels.quick_interpreter", "-W", "error::RuntimeWarning"]


@pytest.mark.slow
def test_triton_kernels_equal_their_twins_in_the_interpreter() -> None:
    files = sorted(Path(__file__).parents[2].glob("*/interpreted*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, files), *OPTIONS],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=count(600, 3600),
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed.group(1)) >= count(100, 150), done.stdout
