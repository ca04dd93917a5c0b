"""Engines with drawn settings, as many as fit a change; MILLRACE_FULL=1 and a command for more."""

from __future__ import annotations

import pytest

from tests.counts import FULL, count, first_seed
from tests.generators import settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if FULL else 1200)]  # engines on a busy machine


def test_no_answer_depends_on_how_an_engine_is_set_or_on_what_runs_beside_it():
    taken = settings.run(count(5, 300), first_seed(), always_swaps=not FULL)
    assert taken["swap"] and (taken["recompute"] or not FULL), "few cases have room for less"


def test_an_answer_that_does_depend_is_told(monkeypatch):
    monkeypatch.setitem(settings.ALONE, "dtype", "float32")
    monkeypatch.setitem(settings.NUMBERS, "dtype", ["bfloat16"])
    with pytest.raises(AssertionError, match=r"seed 11, case \d+, .*answers \[\d+.*\] are others"):
        settings.run(20, 11)
