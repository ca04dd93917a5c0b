"""Hostile checkpoint folders, in this process; a command serves more of them and measures memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.model.errors import ModelError
from millrace.stages import LLM
from millrace.stages.errors import ConfigError
from tests.counts import count, first_seed
from tests.generators.hostile_damages import DAMAGES
from tests.generators.hostile_folders import MEBIBYTES, cases, problem

CASES = dict(cases(count(2 * len(DAMAGES), 300), first_seed()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_folder_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    root = tmp_path / "model"
    CASES[name](root)
    with pytest.raises((ModelError, ConfigError)) as caught:
        LLM(model=str(root), device="cpu", threads=1)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 2000 + len(str(root)), (name, message[:500])


def test_a_start_that_takes_too_long_or_too_much_is_a_problem() -> None:
    told = "millrace: config.json: wrong\n"
    assert problem(3, told, 1.0, 200.0, 150.0) == ""
    assert "exit code 1" in problem(1, told, 1.0, 200.0, 150.0)
    assert "not one line" in problem(3, told * 2, 1.0, 200.0, 150.0)
    assert "6.0 s" in problem(3, told, 6.0, 200.0, 150.0)
    assert "MiB" in problem(3, told, 1.0, 151.0 + MEBIBYTES, 150.0)
