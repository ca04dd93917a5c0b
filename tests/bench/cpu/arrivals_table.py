"""The text and the table of a run of `python -m tests.bench.cpu.arrivals`, for `deploy/docs/performance-cpu.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.bench.cpu.glance import name_of
from tests.bench.cpu.peers import OUR_SERVER

LESS_IS_BETTER = {
    "median_ttft_ms": "time to the first token, p50",
    "p99_ttft_ms": "time to the first token, p99",
    "median_itl_ms": "gap between tokens, p50",
    "p99_itl_ms": "gap between tokens, p99",
}
MORE_IS_BETTER = {"finished": "requests finished", "output_tok_s": "tokens/s", "goodput": "goodput"}
HEADINGS = (
    "engine",
    "keeps up",
    "finished of offered",
    "by the end",
    "refused",
    "failed",
    "tok/s",
    "TTFT p50 / p99 s",
    "ITL p50 / p99 ms",
    "goodput req/s",
    "GB/s before / after",
)


def title_of(results: Mapping[str, Any]) -> str:
    """The rate, the model, the machine, and what came of it."""
    engines = results["engines"].items()
    ends = ", ".join(f"{_name(label)} {each['finished_in_time']:.0%}" for label, each in engines)
    goodputs = ", ".join(f"{_name(label)} {each['goodput']:.3g}" for label, each in engines)
    asked = f"Arrivals of a trace, {results['rate']:.3g} a second, {name_of(results)}"
    return f"{asked}: finished by the end {ends}; goodput {goodputs}"


def of_arrivals(results: Mapping[str, Any]) -> Iterator[str]:
    """What was asked and when it counts as good, the table, and where millrace loses."""
    asked, bounds, rate = results["asked"], results["bounds"], results["rate"]
    versions = ", ".join(f"{_name(label)} {version}" for label, version in results["versions"].items())
    yield ""
    yield (
        f"`{asked['trace']}` from minute {asked['from_minute']:g}: {asked['requests']} requests in "
        f"{asked['minutes']:g} minutes, {rate:.3g} a second (gaps {asked['stretched']:.3g} times the trace's), "
        f"on average {asked['mean_prompt']:,.0f} tokens in and {asked['mean_answer']:,.0f} out, "
        f"at most {asked['greatest_prompt']:,} in, {asked['cut']} cut to fit {asked['max_model_len']:,}. "
        f"{results['threads']} threads, {results['measured_on']}. "
        f"Python {results['python']}, {versions}."
    )
    yield (
        f"A server keeps up if it has finished by the end {bounds['share']:.0%} of the requests that came at least "
        f"{bounds['settle_s']:g} s before the end, with p99 TTFT below {bounds['p99_ttft_ms'] / 1e3:g} s. "
        f"Goodput counts requests with TTFT below {bounds['ttft_ms'] / 1e3:g} s and mean ITL below "
        f"{bounds['itl_ms']:g} ms."
    )
    if results.get("note"):
        yield results["note"]
    yield ""
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|{'---|' * len(HEADINGS)}"
    for label, found in results["engines"].items():
        yield f"| {' | '.join(_row(label, found, results['sustained']))} |"
    yield ""
    yield from _where_we_lose(results["engines"])
    yield ""


def _row(label: str, found: Mapping[str, Any], sustained: Mapping[str, Any]) -> Iterator[str]:
    ttft = [found[f"{which}_ttft_ms"] / 1e3 for which in ("median", "p99")]
    itl = [found[f"{which}_itl_ms"] for which in ("median", "p99")]
    yield _name(label)
    searched = sustained.get(label)
    yield ("yes" if found["keeps_up"] else "no") if searched is None else f"up to {searched['rate'] or 0:.3g}"
    yield f"{found['finished']} of {found['offered']}"
    yield f"{found['finished_in_time']:.0%}"
    yield str(found["refused"])
    yield str(found["failed"])
    yield f"{found['output_tok_s']:.0f}"
    yield " / ".join(f"{value:.3g}" for value in ttft)
    yield " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in itl)
    yield f"{found['goodput']:.3g} ({found['good']:.0%})"
    yield " / ".join(f"{value:.1f}" for value in found["read_bandwidth_gb_s"])


def _where_we_lose(engines: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Every figure in which a peer is better."""
    ours = engines.get(OUR_SERVER)
    peers = [label for label in engines if label != OUR_SERVER]
    if ours is None or not peers:
        yield "Where millrace loses: there was no peer to compare with."
        return
    losses = []
    for label in peers:
        compared = ((LESS_IS_BETTER, True), (MORE_IS_BETTER, False))
        if not engines[label]["finished"]:
            compared = compared[1:]  # it has no latencies, which reads 0
        for names, is_less_better in compared:
            for figure, words in names.items():
                less, more = sorted((ours[figure], engines[label][figure]))
                if less != more and (engines[label][figure] == less) == is_less_better:
                    times = f"{more / less:.2f} times as good" if less else "better, and millrace has 0"
                    losses.append(f"- {words}: {_name(label)} is {times}")
    if losses:
        yield "Where millrace loses:"
        yield ""
        yield from losses
    else:
        yield f"Where millrace loses: in none of these figures, against {' or '.join(map(_name, peers))}."


def _name(label: str) -> str:
    return label.removesuffix(" server")
