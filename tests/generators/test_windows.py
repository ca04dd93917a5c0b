"""Engines whose windows free memory answer as one that frees nothing: the cases of `windows.py`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from millrace.kernels.native import build, machine
from tests.counts import FULL, first_seed
from tests.generators.windows import Case, Windows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FULL, reason="takes a quarter of an hour; MILLRACE_FULL=1 runs it"),
]
BACKENDS = ("native", "torch") if machine.instruction_sets() and build.find_compiler() is not None else ("torch",)


def test_windows_that_free_memory_change_no_answer(tmp_path: Path) -> None:
    windows, first = Windows(tmp_path), first_seed()
    for seed in range(first, first + 300):
        assert not windows.run(Case.of(random.Random(seed), BACKENDS), seed), f"seed {seed}"
    assert windows.seen["2 kinds"] and windows.seen["3 kinds"]
