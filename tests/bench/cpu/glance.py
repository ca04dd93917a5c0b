"""All runs of `python -m tests.bench.cpu` in one table: how many times as good as the best other engine millrace is,
and in which figures another engine is better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from tests.bench.cpu.peers import INT8_TO_THEIRS, OURS, OURS_TO_THEIRS
from tests.bench.workloads import WORKLOADS, num_tokens

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
COLUMNS = (  # heading, workload, figure, whether over HTTP, which ratios
    ("W1 in process", "w1", "decode_tok_s", False, OURS_TO_THEIRS),
    ("W1, int8 weights", "w1", "decode_tok_s", False, INT8_TO_THEIRS),
    ("W2 in process", "w2", "output_tok_s", False, OURS_TO_THEIRS),
    ("W2 over HTTP", "w2", "output_tok_s", True, OURS_TO_THEIRS),
    ("W3 over HTTP", "w3", "wall_s", True, OURS_TO_THEIRS),
    ("W4 over HTTP", "w4", "output_tok_s", True, OURS_TO_THEIRS),
    ("W4, TTFT p50", "w4", "median_ttft_ms", True, OURS_TO_THEIRS),
    ("W4, ITL p99", "w4", "p99_itl_ms", True, OURS_TO_THEIRS),
)

BRIEF = (  # of README.md: column of COLUMNS
    ("W1 in process", "1 request, in process"),
    ("W2 over HTTP", "32 at once"),
    ("W3 over HTTP", "shared prefix"),
    ("W4 over HTTP", "16 streams"),
    ("W4, TTFT p50", "16 streams: TTFT p50"),
    ("W4, ITL p99", "16 streams: ITL p99"),
)

Run = Mapping[str, Any]  # one file of results


def glance(runs: Sequence[Run]) -> Iterator[str]:
    """A table with a row for each run, the notes on runs, and a line for each figure in which another engine is
    better."""
    if not runs:
        return
    yield ""
    yield (
        "How many times as good millrace is as the best other engine, which is named; the median of the rounds. `-`: "
        "no other engine, or not measured. The column `int8 weights` compares millrace with int8 weights to others "
        "with unquantized ones. The last column is the rate at which millrace reads the weights in W1, in process, as "
        "a share of the memory's read rate. An int8 head is counted in full and read by half, 12-bit layers are "
        "counted in full and read by three quarters."
    )
    yield ""
    headings = ("", *(heading for heading, *_ in COLUMNS), "W1, share of memory rate")
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for run in runs:
        cells = [_ratio_to_best(run, *column) for _, *column in COLUMNS]
        yield f"| {' | '.join([_in_a_cell(run), *cells, _share_of_bandwidth(run)])} |"
    yield ""
    for run in runs:
        if run.get("note"):
            yield f"- {escape(name_of(run))}: {run['note']}"
    yield from _other_lengths(runs)
    yield ""
    yield from _losses(runs)


BRIEF_NAMES = {"w1": "1 request", "w2": "32 at once", "w3": "shared prefix", "w4": "16 streams"}


def brief(runs: Sequence[Run]) -> Iterator[str]:
    """The table of README.md, and in one line where another engine is better."""
    columns = {heading: column for heading, *column in COLUMNS}
    yield f"| model, machine | date | {' | '.join(title for _, title in BRIEF)} |"
    yield f"|{'---|' * (len(BRIEF) + 2)}"
    for run in runs:
        cells = [_ratio_to_best(run, *columns[heading]) for heading, _ in BRIEF]
        yield f"| {' | '.join([_in_a_cell(run), run['measured_on'], *cells])} |"
    yield ""
    lost = _worst(runs)
    if not lost:
        yield "Where millrace loses: in no figure of these runs."
        return
    losses: dict[str, list[str]] = {}
    for (workload, figure, label), all_times in lost:
        worst = f"{BRIEF_NAMES[workload]} {max(all_times):.2f}x against {label.removesuffix(' server')}"
        losses.setdefault(WORDS[figure], []).append(worst)
    told_losses = (f"{figure}: {', '.join(each)}" for figure, each in losses.items())
    yield f"Where millrace loses, at worst: {'; '.join(told_losses)}."


def lengths_of(run: Run) -> dict[str, int] | None:
    """Tokens in and out of W2 and W4, which are alike; None where neither was asked."""
    tokens = run["tokens"]
    lengths: dict[str, int] | None = tokens.get("w2") or tokens.get("w4")
    return lengths


def told_lengths(lengths: Mapping[str, int]) -> str:
    """In words."""
    return f"{lengths['in']:,} tokens in and {lengths['out']:,} out"


def name_of(run: Run) -> str:
    """The model and the machine."""
    return f"{run['shape']}, {run['dtype']}, {run['cpu']} ({run['instructions']})"


def losses_of(run: Run) -> Iterator[tuple[str, str, str, float]]:
    """(workload, figure, peer, how many times as good) for each figure in which a peer is better."""
    for workload, label, figure, ratio in _ratios(run):
        if ratio < 1:
            yield workload, figure, label, 1 / ratio


def told(workload: str, figure: str, label: str, times: str) -> str:
    """A loss, in a line."""
    return f"- {workload.upper()}, {WORDS[figure]}: {label} is {times} times as good"


def _ratios(run: Run, which: str = OURS_TO_THEIRS) -> Iterator[tuple[str, str, str, float]]:
    for workload, found in run["workloads"].items():
        for label, ratios in found.get(which, {}).items():
            for figure, ratio in ratios.items():
                yield workload, label, figure, ratio["median"]


def _other_lengths(runs: Sequence[Run]) -> Iterator[str]:
    """Runs whose W2 and W4 had other lengths than the workloads have now: their figures compare with no others."""
    now = num_tokens(WORKLOADS["w2"](0))
    others: dict[str, list[str]] = {}
    for run in runs:
        lengths = lengths_of(run)
        if lengths is not None and lengths != now:
            others.setdefault(told_lengths(lengths), []).append(escape(name_of(run)))
    for lengths_told, names in others.items():
        yield f"- W2 and W4 had {lengths_told}, now they have {told_lengths(now)}: {'; '.join(names)}"


def _in_a_cell(run: Run) -> str:
    return escape(name_of(run)).replace("|", "\\|")


def _ratio_to_best(run: Run, workload: str, figure: str, is_served: bool, which: str) -> str:
    ratios = {
        label.removesuffix(" server"): ratio
        for its_workload, label, its_figure, ratio in _ratios(run, which)
        if (its_workload, its_figure, label.endswith(" server")) == (workload, figure, is_served)
    }
    best = min(ratios, key=ratios.__getitem__, default=None)
    return "-" if best is None else f"{ratios[best]:.2f} {best}"


def _share_of_bandwidth(run: Run) -> str:
    engines = run["workloads"].get("w1", {}).get("engines", {})
    share = engines.get(OURS, {}).get("share_of_bandwidth")
    return "-" if share is None else f"{share['median']:.2f}"


def _worst(runs: Sequence[Run]) -> list[tuple[tuple[str, str, str], list[float]]]:
    """(workload, figure, label) -> how many times as good the peer is, in each run in which it is; the worst first."""
    lost: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        for workload, figure, label, times in losses_of(run):
            lost.setdefault((workload, figure, label), []).append(times)
    return sorted(lost.items(), key=lambda item: (item[0][0], -max(item[1])))


def _losses(runs: Sequence[Run]) -> Iterator[str]:
    """Each with the worst of its runs, and in how many of the runs that compare this figure."""
    compared = Counter((workload, figure, label) for run in runs for workload, label, figure, _ in _ratios(run))
    lost = _worst(runs)
    if not lost:
        yield f"Where millrace loses: {'nowhere in these runs' if compared else 'there was no peer to compare with'}."
        return
    yield "Where millrace loses, all engines with the same weights:"
    yield ""
    for one, all_times in lost:
        worst = f"{'up to ' if len(all_times) > 1 else ''}{max(all_times):.2f}"
        yield f"{told(*one, worst)}, in {len(all_times)} of its {compared[one]} runs"
