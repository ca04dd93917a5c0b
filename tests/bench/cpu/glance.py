"""README's first look at all runs of `python -m tests.bench.cpu`: how many times as good as the best of the others ours
is, and by which figures somebody is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .peers import OURS

WORDS = {
    "decode_tok_s": "decode rate",
    "output_tok_s": "tokens/s",
    "wall_s": "time",
    "ttft_ms": "time to the first token",
    "median_ttft_ms": "time to the first token, p50",
    "p99_ttft_ms": "time to the first token, p99",
    "median_itl_ms": "gap between tokens, p50",
    "p99_itl_ms": "gap between tokens, p99",
}
COLUMNS = (  # heading, workload, figure, whether over HTTP
    ("W1", "w1", "decode_tok_s", False),
    ("W2", "w2", "output_tok_s", False),
    ("W2 over HTTP", "w2", "output_tok_s", True),
    ("W3 over HTTP", "w3", "wall_s", True),
    ("W4 over HTTP", "w4", "output_tok_s", True),
    ("W4, p99 gap", "w4", "p99_itl_ms", True),
)

Run = Mapping[str, Any]  # one file of results


def glance(runs: Sequence[Run]) -> Iterator[str]:
    """A table with a row for each run, and a line for each figure by which somebody is better."""
    if not runs:
        return
    yield ""
    yield "How many times as good ours is as the best of the others, in the median of the rounds:"
    yield ""
    headings = ("", *(heading for heading, *_ in COLUMNS), "W1 of the memory's rate")
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for run in runs:
        cells = [_ratio_to_best(run, *column) for _, *column in COLUMNS]
        yield f"| {' | '.join([name_of(run), *cells, _share_of_bandwidth(run)])} |"
    yield ""
    yield from _losses(runs)


def name_of(run: Run) -> str:
    """The model and the machine."""
    return f"{run['shape']}, {run['dtype']}, {run['cpu']} ({run['instructions']})"


def losses_of(run: Run) -> Iterator[tuple[str, str, str, float]]:
    """(workload, figure, whose, how many times as good) wherever a peer is better."""
    for workload, found in run["workloads"].items():
        for label, ratios in found["ours_to_theirs"].items():
            for figure, ratio in ratios.items():
                if ratio["median"] < 1:
                    yield workload, figure, label, 1 / ratio["median"]


def _ratio_to_best(run: Run, workload: str, figure: str, is_served: bool) -> str:
    ratios = {
        label.removesuffix(" server"): each[figure]["median"]
        for label, each in run["workloads"].get(workload, {}).get("ours_to_theirs", {}).items()
        if label.endswith(" server") == is_served and figure in each
    }
    best = min(ratios, key=ratios.__getitem__, default=None)
    return "-" if best is None else f"{ratios[best]:.2f} {best}"


def _share_of_bandwidth(run: Run) -> str:
    engines = run["workloads"].get("w1", {}).get("engines", {})
    share = engines.get(OURS, {}).get("share_of_bandwidth")
    return "-" if share is None else f"{share['median']:.2f}"


def _losses(runs: Sequence[Run]) -> Iterator[str]:
    worst: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        for *lost, times in losses_of(run):
            worst.setdefault((lost[0], lost[1], lost[2]), []).append(times)
    if not worst:
        yield "Where we lose: nowhere in these runs."
        return
    yield "Where we lose:"
    yield ""
    for (workload, figure, label), times in sorted(worst.items(), key=lambda item: (item[0][0], -max(item[1]))):
        often = f"in {len(times)} of {len(runs)} runs" if len(runs) > 1 else "in this run"
        up_to = "up to " if len(times) > 1 else ""
        yield f"- {workload.upper()}, {WORDS[figure]}: {label} is {up_to}{max(times):.2f} times as good, {often}"
