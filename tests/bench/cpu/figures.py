"""What the rounds of a comparison come to: medians with their spread, ratios of one round, and a table of them."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.cpu.contenders import Figures
from tests.bench.cpu.peers import ALL_OURS, INT8_TO_THEIRS, OUR_INT8, OUR_SERVER, OURS, OURS_TO_THEIRS, instructions

HEADLINE = {  # workload -> figure it is compared by
    "w1": "decode_tok_s",
    "w2": "output_tok_s",
    "w3": "wall_s",
    "w4": "output_tok_s",
}
LESS_IS_BETTER = ("wall_s", "ttft_ms", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
COMPARED = ("decode_tok_s", "output_tok_s", *LESS_IS_BETTER)

PARTS = ("linears", "attention", "rest", "host")  # of a step's time

Spread = dict[str, float]
Rounds = Mapping[str, Sequence[Figures]]  # label -> a round each


def summary(workload: str, by_label: Rounds) -> dict[str, Any]:
    """Each engine's figures over the rounds; and how many times as good ours is as each peer of its kind, in process or
    served, by every figure that both have: the ratios of each round, as what else the machine did changes between
    rounds. And how many times as good ours with int8 weights is, where it took part."""
    found: dict[str, Any] = {"compared_by": HEADLINE[workload], "engines": {}}
    found |= {OURS_TO_THEIRS: {}, INT8_TO_THEIRS: {}}
    for label, rounds in by_label.items():
        found["engines"][label] = {name: spread([each[name] for each in rounds]) for name in rounds[0]}
        if label in ALL_OURS:
            continue
        is_served = label.endswith(" server")
        if ours := by_label.get(OUR_SERVER if is_served else OURS):
            found[OURS_TO_THEIRS][label] = _ratios(ours, rounds)
        if not is_served and (ours := by_label.get(OUR_INT8)):
            found[INT8_TO_THEIRS][label] = _ratios(ours, rounds)
    return found


def _ratios(ours: Sequence[Figures], theirs: Sequence[Figures]) -> dict[str, Spread]:
    return {
        name: spread([_ratio(name, *pair) for pair in zip(ours, theirs, strict=True)])
        for name in COMPARED
        if name in ours[0] and name in theirs[0]
    }


def _ratio(name: str, ours: Figures, theirs: Figures) -> float:
    return theirs[name] / ours[name] if name in LESS_IS_BETTER else ours[name] / theirs[name]


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest."""
    names = {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
    return {name: round(value, 4) for name, value in names.items()}


def table(results: Mapping[str, Any]) -> str:
    """What was found, a line an engine and workload, and a line a batch of the native step's parts."""
    lines = [f"read bandwidth {results['read_bandwidth_gb_s']['median']:.1f} GB/s"]
    for name, found in results["workloads"].items():
        by = found["compared_by"]
        lines.append(f"{name}, by {by}:")
        for label, figures in found["engines"].items():
            shown = ", ".join(f"{key} {value['median']:.4g}" for key, value in figures.items())
            ratio = found[OURS_TO_THEIRS].get(label, {}).get(by)
            beside = ""
            if ratio is not None:
                beside = f"   ours: {ratio['median']:.2f} ({ratio['least']:.2f}..{ratio['greatest']:.2f})"
            lines.append(f"  {label:<18} {shown}{beside}")
    if results.get("parts"):
        lines.append("the native step, ms:")
    for row in results.get("parts", ()):
        parts = ", ".join(f"{name} {row[f'{name}_ms']:.2f}" for name in PARTS)
        lines.append(
            f"  batch {row['batch']:<4} {row['step_ms']:.2f}: {parts}; floor {row['floor_ms']:.2f} at "
            f"{row['read_bandwidth_gb_s']:.1f} GB/s, {row['share_of_floor']:.0%} of it is reached"
        )
    return "\n".join(lines)


def machine(threads: int) -> dict[str, Any]:
    """What it was measured on."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    family = said.get("cpu family")  # of some the host tells no better name
    return {
        "cpu": said.get("model name", platform.processor()) + (f", family {family}" if family else ""),
        "instructions": instructions(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def tell(results: Mapping[str, Any], file: Path | None) -> None:
    """On standard output, and to the file that was asked for."""
    text = json.dumps(results, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n")
