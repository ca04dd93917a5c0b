"""Whether the step loop of a server runs in its process or in one of its own."""

from __future__ import annotations

from typing import Literal

Mode = Literal["inline", "split"]


def choose_mode(asked: Literal["auto", "inline", "split"]) -> Mode:
    """The mode that was asked for; for "auto" the one that measured better on machines of this size.

    On two cores (Zen 4) there is nothing to gain, as tests/bench/results/split-mode-cpu.json has it: of SmolLM2's shape
    1.02, 1.00 and 1.00 times the tokens a second of "inline" in W2, W4 and with 64 streams, of the bundled model, whose
    steps are short, 0.98, 0.93 and 0.90. Larger machines were not measured, so "auto" is "inline" on all: it is the
    simpler one. `tests/bench/split_mode.py` measures yours.
    """
    return "inline" if asked == "auto" else asked
