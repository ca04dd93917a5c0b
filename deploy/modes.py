"""Whether the step loop of a server runs in its process or in one of its own."""

from __future__ import annotations

from typing import Literal

Mode = Literal["inline", "split"]


def choose_mode(asked: Literal["auto", "inline", "split"]) -> Mode:
    """The mode that was asked for; for "auto" the one that measured better on machines of this size.

    Not measured at rest yet, so "auto" is "inline" on every machine. `tests/bench/split_mode.py` measures both in
    alternation; what it finds belongs here, with machine, model and load.
    """
    return "inline" if asked == "auto" else asked
