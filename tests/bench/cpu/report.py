"""README's performance section, from what `python -m tests.bench.cpu` and `.arrivals` have found:

    python -m tests.bench.cpu.report

Rewrites what stands between two markers, and the charts beside the results. A test holds README to it, so whoever
changes the results runs this; what is written there is never written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from tests.bench.cpu.arrivals_table import of_arrivals, title_of
from tests.bench.cpu.chart import draw
from tests.bench.cpu.glance import glance, lengths_of, losses_of, name_of, told, told_lengths
from tests.bench.cpu.peers import ALL_OURS, OUR_INT8, OURS_TO_THEIRS

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
RESULTS = ROOT / "tests" / "bench" / "results"
FILES = "cpu-*.json"  # a shape on a machine each
ARRIVALS = "arrivals-*.json"  # the same, under the arrivals of a trace
BEGIN = "<!-- from here on made by `python -m tests.bench.cpu.report`: change the results, not the text -->"
END = "<!-- up to here -->"

IN_PROCESS = {"w1": ("decode_tok_s", "W1 tok/s"), "w2": ("output_tok_s", "W2 tok/s"), "w3": ("wall_s", "W3 s")}
SERVED = {
    "w1": ("decode_tok_s", "W1 tok/s"),
    "w2": ("output_tok_s", "W2 tok/s"),
    "w3": ("wall_s", "W3 s"),
    "w4": ("output_tok_s", "W4 tok/s"),
}
LATENCIES = (("ttft", "W4 TTFT p50 / p99 ms"), ("itl", "W4 ITL p50 / p99 ms"))


def section(folder: Path = RESULTS) -> str:
    """The section for the results that are there: all at a glance, and each folded up."""
    runs = {path: json.loads(path.read_text()) for path in found(folder)}
    lines = [*glance(list(runs.values())), ""]
    for path, run in runs.items():
        lines += _folded(name_of(run), _of_run(run, path))
    for path in sorted(folder.glob(ARRIVALS)):
        run = json.loads(path.read_text())
        lines += _folded(title_of(run), of_arrivals(run))
    return "\n".join([BEGIN, *lines, END])


def _folded(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"<details><summary>{escape(title)}</summary>"
    yield from lines
    yield "</details>"


def found(folder: Path = RESULTS) -> list[Path]:
    """The results of W1 to W4 that are there; each has a chart."""
    return sorted(folder.glob(FILES))


def replaced(readme: str, made: str) -> str:
    """README with that section in place of the one it has."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"README.md has no section between {BEGIN} and {END}"
    return before + made + after


def chart_of(path: Path) -> Path:
    """Where the chart of a file of results is: beside it."""
    return path.with_suffix(".svg")


def _of_run(results: Mapping[str, Any], path: Path) -> Iterator[str]:
    bandwidth = results["read_bandwidth_gb_s"]
    yield ""
    yield (
        f"{results['threads']} threads, {results['measured_on']}, median "
        f"of {results['rounds']}; memory read at {bandwidth['median']:.1f} GB/s ({bandwidth['least']:.1f} to "
        f"{bandwidth['greatest']:.1f}). {', '.join(_versions(results))}."
        f"{_lengths(results)}{_int8(results)}"
    )
    if results.get("note"):
        yield results["note"]
    yield ""
    yield from _table(results, "in process", IN_PROCESS, is_served=False)
    yield ""
    yield from _table(results, "over HTTP", SERVED, is_served=True)
    yield ""
    yield f"![Bars for each workload and engine](tests/bench/results/{chart_of(path).name})"
    if results.get("parts"):
        yield ""
        yield from _parts(results["parts"])
    yield ""
    yield from _where_we_lose(results)
    yield ""


def _lengths(results: Mapping[str, Any]) -> str:
    lengths = lengths_of(results)
    return "" if lengths is None else f" W2 and W4 are of {told_lengths(lengths)}."


def _int8(results: Mapping[str, Any]) -> str:
    return (
        f" {OUR_INT8} has weights in int8, all others in {results['dtype']}." if OUR_INT8 in results["versions"] else ""
    )


def _versions(results: Mapping[str, Any]) -> Iterator[str]:
    yield f"Python {results['python']}"
    seen = set()
    for label, version in results["versions"].items():
        name = "millrace" if label in ALL_OURS else label.removesuffix(" server")
        if (name, version) not in seen:
            seen.add((name, version))
            yield f"{name} {version}"


def _table(
    results: Mapping[str, Any], title: str, columns: Mapping[str, tuple[str, str]], *, is_served: bool
) -> Iterator[str]:
    columns = {name: each for name, each in columns.items() if name in results["workloads"]}
    labels = [label for label in results["versions"] if label.endswith(" server") == is_served]
    latencies = LATENCIES if "w4" in columns else ()
    headings = [title, *(heading for _, heading in columns.values()), *(heading for _, heading in latencies)]
    headings += ["ready s", "peak MiB"]
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for label in labels:
        cells = [label.removesuffix(" server")]
        for name, (figure, _) in columns.items():
            cells.append(_cell(results["workloads"][name], label, figure))
        for name, _ in latencies:
            cells.append(_latency(results["workloads"]["w4"], label, name))
        cells += [f"{results['ready_s'][label]:.1f}", f"{results['peak_mib'][label]:,}"]
        yield f"| {' | '.join(cells)} |"


def _cell(found: Mapping[str, Any], label: str, figure: str) -> str:
    """A figure, and of a peer's how many times as good ours is."""
    figures = found["engines"].get(label, {})
    if figure not in figures:
        return "-"
    shown = _number(figures[figure]["median"])
    ratio = found[OURS_TO_THEIRS].get(label, {}).get(figure)
    return f"**{shown}**" if ratio is None else f"{shown} (ours {ratio['median']:.2f}x)"


def _latency(found: Mapping[str, Any], label: str, name: str) -> str:
    figures = found["engines"].get(label, {})
    if f"p99_{name}_ms" not in figures:
        return "-"
    return " / ".join(_number(figures[f"{which}_{name}_ms"]["median"]) for which in ("median", "p99"))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _parts(rows: list[Mapping[str, float]]) -> Iterator[str]:
    yield "A decoding step of ours, ms, beside the time in which memory is read once:"
    yield ""
    yield "| batch | step | linears | attention | rest | host | floor | of the floor |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        times = (f"{row[f'{name}_ms']:.2f}" for name in ("step", "linears", "attention", "rest", "host", "floor"))
        yield f"| {row['batch']:.0f} | {' | '.join(times)} | {row['share_of_floor']:.0%} |"


def _where_we_lose(results: Mapping[str, Any]) -> Iterator[str]:
    """Every figure of every workload by which a peer is better."""
    losses = [told(*lost, f"{times:.2f}") for *lost, times in losses_of(results)]
    peers = [label for label in results["versions"] if label not in ALL_OURS]
    if losses:
        yield "Where we lose:"
        yield ""
        yield from losses
    else:
        yield (
            f"Where we lose: by none of the figures of these workloads, to {' or '.join(peers)}."
            if peers
            else ("Where we lose: there was no peer to lose to.")
        )


def main() -> None:
    README.write_text(replaced(README.read_text(), section()))
    for path in found():
        chart_of(path).write_text(draw(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
