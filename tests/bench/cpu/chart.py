"""The figures of `python -m tests.bench.cpu` as bars. Needs matplotlib, an optional extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TITLES = {
    "w1": "W1: one request, tokens/s",
    "w2": "W2: 32 at once, tokens/s",
    "w3": "W3: common prefix, s (less is better)",
    "w4": "W4: served, 16 in flight, tokens/s",
}
OURS, THEIRS = "#2563eb", "#9ca3af"


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel a workload, a bar an engine with the spread of its rounds. The format is the file's ending."""
    from matplotlib.figure import Figure

    workloads = results["workloads"]
    figure = Figure(figsize=(9.0, 1.2 + 0.5 * max(len(found["engines"]) for found in workloads.values()) * 2))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(-(-len(workloads) // 2), 2, squeeze=False).flatten().tolist()
    for axes, (name, found) in zip(panels, workloads.items(), strict=False):
        by = found["compared_by"]
        bars = {label: figures[by] for label, figures in found["engines"].items() if by in figures}
        middles = [each["median"] for each in bars.values()]
        spans = [[m - each["least"] for m, each in zip(middles, bars.values(), strict=True)]]
        spans.append([each["greatest"] - m for m, each in zip(middles, bars.values(), strict=True)])
        colours = [OURS if label.startswith("millrace") else THEIRS for label in bars]
        axes.barh(list(bars), middles, xerr=spans, color=colours, height=0.7)
        axes.invert_yaxis()
        axes.set_title(TITLES[name], fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(workloads) :]:
        axes.set_visible(False)
    figure.suptitle(
        f"{results['shape']}, {results['dtype']}, {results['threads']} threads, {results['cpu']}", fontsize=9
    )
    figure.savefig(path)
