"""The figures of `python -m tests.bench.cpu` as bars, in an SVG of a few kilobytes: same figures, same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from tests.bench.cpu.figures import PARTS

TITLES = {
    "w1": "W1: one request, tokens/s",
    "w2": "W2: 32 at once, tokens/s",
    "w3": "W3: 16 with a common prefix, s (less is better)",
    "w4": "W4: served, 16 in flight, tokens/s",
}
OURS, THEIRS = "#2563eb", "#9ca3af"
COLOURS = {"linears": "#2563eb", "attention": "#f59e0b", "rest": "#10b981", "host": "#9ca3af"}
WIDTH, LABEL, BAR, ROW, TITLE = 760, 150, 470, 22, 34  # px


def draw(results: Mapping[str, Any]) -> str:
    """A panel a workload, a bar an engine with the spread of its rounds as a line; and one of a step's parts."""
    top, drawn = 10.0, [_text(10, 24, _headline(results), 13)]
    top += 24
    for name, found in results["workloads"].items():
        by = found["compared_by"]
        bars = {label: figures[by] for label, figures in found["engines"].items() if by in figures}
        longest = max((each["greatest"] for each in bars.values()), default=1.0)
        drawn.append(_text(10, top + 22, TITLES[name], 12, bold=True))
        top += TITLE
        for label, each in bars.items():
            drawn.append(_bar(top, label, each, longest))
            top += ROW
    if results.get("parts"):
        drawn.append(_text(10, top + 22, "A decoding step of ours, ms; black: what memory allows", 12, bold=True))
        drawn += _legend(top + 22)
        top += TITLE
        longest = max(row["step_ms"] for row in results["parts"])
        for row in results["parts"]:
            drawn.append(_stack(top, row, longest))
            top += ROW
    size = f'width="{WIDTH}" height="{top + 10:.0f}" viewBox="0 0 {WIDTH} {top + 10:.0f}"'
    font = 'font-family="system-ui, sans-serif"'
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', background, *drawn, "</svg>", ""])


def _headline(results: Mapping[str, Any]) -> str:
    processor = f"{results['cpu']} ({results['instructions']})"
    return f"{results['shape']}, {results['dtype']}, {results['threads']} threads, {processor}"


def _bar(top: float, label: str, each: Mapping[str, float], longest: float) -> str:
    middle, least, greatest = (BAR * each[name] / longest for name in ("median", "least", "greatest"))
    colour = OURS if label.startswith("millrace") else THEIRS
    return "".join(
        [
            _text(LABEL - 8, top + 15, label, 11, anchor="end"),
            f'<rect x="{LABEL}" y="{top + 3:.0f}" width="{middle:.1f}" height="16" fill="{colour}"/>',
            _line(LABEL + least, LABEL + greatest, top + 11),
            _text(LABEL + max(middle, greatest) + 8, top + 15, f"{each['median']:.3g}", 11),
        ]
    )


def _stack(top: float, row: Mapping[str, float], longest: float) -> str:
    drawn, left = [_text(LABEL - 8, top + 15, f"batch {row['batch']:.0f}", 11, anchor="end")], float(LABEL)
    for part in PARTS:
        width = BAR * max(row[f"{part}_ms"], 0.0) / longest
        drawn.append(f'<rect x="{left:.1f}" y="{top + 3:.0f}" width="{width:.1f}" height="16" fill="{COLOURS[part]}"/>')
        left += width
    floor = LABEL + BAR * row["floor_ms"] / longest
    drawn.append(f'<path d="M{floor:.1f} {top + 1:.0f}v20" stroke="#111827" stroke-width="2"/>')
    drawn.append(_text(left + 8, top + 15, f"{row['step_ms']:.3g}, floor {row['share_of_floor']:.0%}", 11))
    return "".join(drawn)


def _legend(y: float) -> list[str]:
    drawn, left = [], 440.0
    for part, colour in COLOURS.items():
        drawn.append(f'<rect x="{left:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}"/>')
        drawn.append(_text(left + 14, y, part, 11))
        left += 80
    return drawn


def _line(left: float, right: float, y: float) -> str:
    return f'<path d="M{left:.1f} {y:.0f}H{right:.1f}" stroke="#111827" stroke-width="1"/>'


def _text(x: float, y: float, text: str, size: int, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
