"""The choice of the process in which a server's step loop runs."""

from __future__ import annotations

from typing import Literal

Mode = Literal["inline", "split"]


def choose_mode(asked: Literal["auto", "inline", "split"]) -> Mode:
    """The requested mode; "auto" is "inline", the simpler one, on all machines.

    On two cores (Zen 4) "split" gains nothing: 1.02, 1.00 and 1.00 times the tokens/s of "inline" for SmolLM2's shape
    in W2, W4 and with 64 streams, and 0.98, 0.93 and 0.90 times for the bundled model with its short steps
    (tests/bench/results/split-mode-cpu.json). `tests/bench/split_mode.py` measures other machines.
    """
    return "inline" if asked == "auto" else asked
