"""Plots of `millrace simulate`. Imports matplotlib, an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...stages.errors import ConfigError

if TYPE_CHECKING:
    from .simulate import Row

PANELS = {  # title -> its curves
    "throughput, tokens/s": {"output": "output_tokens_per_s"},
    "time to first token, ms": {"p50": "ttft_p50_ms", "p99": "ttft_p99_ms"},
    "between tokens, ms": {"p50": "itl_p50_ms", "p99": "itl_p99_ms"},
    "preemptions": {"preemptions": "preemptions"},
}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Writes four panels with the runs from left to right. The suffix of `path` chooses the format."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'millrace[plots]'") from None
    figure = Figure(figsize=(max(7.0, 1.2 * len(rows) + 3), 7.0), layout="constrained")
    labels = [row.label for row in rows]
    for axes, (title, curves) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name, field in curves.items():
            values = [float("nan") if row.figures[field] is None else row.figures[field] for row in rows]
            axes.plot(range(len(rows)), values, "o-", label=name)
        axes.set_title(title)
        axes.set_xticks(range(len(rows)), labels, rotation=30, ha="right")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None
