"""README's figures of a GPU, from what `python -m tests.bench.gpu --json tests/bench/results/gpu-NAME.json` has found:

    python -m tests.bench.gpu.report

Rewrites what stands between two markers. A test holds README to it; what is written there is never written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
RESULTS = ROOT / "tests" / "bench" / "results"
FILES = "gpu-*.json"
BEGIN = "<!-- from here on made by `python -m tests.bench.gpu.report`: change the results, not the text -->"
END = "<!-- up to here, of a GPU -->"
CHECKS = ("checks", "gates", "sanitizer")  # parts that look for mistakes
LEAST_FLOOR_US = 10.0  # below it a launch is most of a kernel's time


def section(folder: Path = RESULTS) -> str:
    """For all results that are there."""
    lines = [line for path in sorted(folder.glob(FILES)) for line in _of_run(json.loads(path.read_text()), path.name)]
    return "\n".join([BEGIN, *lines, END])


def replaced(readme: str, made: str) -> str:
    """README with that section in place of the one it has."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"README.md has no section between {BEGIN} and {END}"
    return before + made + after


def _of_run(found: Mapping[str, Any], name: str) -> Iterator[str]:
    parts, versions = found["parts"], found["versions"]
    yield ""
    yield (
        f"{found['device']}, {found['measured_on']}{_commit(found)}: torch {versions['torch']}, "
        f"Triton {versions['triton']}, CUDA {versions['cuda']}, driver {versions['driver']}, Python "
        f"{versions['python']} ([all figures](tests/bench/results/{name})). {found.get('note', '')}".rstrip()
    )
    yield ""
    yield "| step | with graphs | on the device | floor | share | tokens/s | the host's part |"
    yield "|---|---|---|---|---|---|---|"
    for part in (part for title, part in parts.items() if title.startswith("steps-")):
        for row in part["rows"]:
            yield _of_step(row)
    yield ""
    for row in (row for row in parts.get("workload", {"rows": []})["rows"] if "requests" in row):
        yield (
            f"{row['requests']} requests at once, {row['prompt_tokens']:,} tokens of prompts and "
            f"{row['answer_tokens']:,} of answers (nano-vllm's, Qwen3-0.6B's shape): {row['seconds']:.2f} s, "
            f"{row['tokens_per_s']:,.0f} tokens/s, {row['floor_share']:.0%} of the floor."
        )
        yield ""
    for title, part in parts.items():
        yield from _verdict(title, part)
    yield ""
    rows = [row for row in parts.get("kernels", {"rows": []})["rows"] if row["floor_us"] >= LEAST_FLOOR_US]
    yield f"<details><summary>Kernels whose floor is {LEAST_FLOOR_US:g} µs or more: {len(rows)}</summary>"
    yield ""
    yield "| shape | kernel | µs | floor | share |"
    yield "|---|---|---|---|---|"
    for row in rows:
        kernel, us, floor_us = row["kernel"], row["us"], row["floor_us"]
        yield f"| {row['shape']} | {kernel} | {us:,.1f} | {floor_us:,.1f} | {row['floor_share']:.2f} |"
    yield ""
    yield "</details>"


def _commit(found: Mapping[str, Any]) -> str:
    """Where whoever put the results there wrote down whose code it was, as he may write a `note`."""
    return f", of commit {found['commit']}" if "commit" in found else ""


def _of_step(row: Mapping[str, Any]) -> str:
    what = f"{row['num_rows']} x 1 token of {row['context']:,}"
    if "prompt_tokens" in row:
        what = f"a prompt of {row['prompt_tokens']:,}"
    has_graphs = "yes" if row["has_graphs"] else "no"
    times = f"{row['step_us'] / 1e3:.2f} ms | {row['floor_us'] / 1e3:.2f} ms | {row['floor_share']:.2f}"
    return (
        f"| {row['shape']}, {what} | {has_graphs} | {times} | {row['tokens_per_s']:,.0f} "
        f"| {row['submit_us'] / 1e3:.2f} ms |"
    )


def _verdict(title: str, part: Mapping[str, Any]) -> Iterator[str]:
    """What a part complained of, and that it did not end or was skipped; of one that looks for mistakes, that it found
    none."""
    count = len(part["wrong"])
    said = [f"{count} complaint{'' if count == 1 else 's'}"] * (count > 0)
    said += [part["failed"]] if "failed" in part else []
    said += [f"skipped, {row['skipped']}" for row in part["rows"] if "skipped" in row]
    if said or title in CHECKS:
        yield f"- `{title}`, {part['seconds']:.0f} s: {'; '.join(said) or 'nothing wrong'}"


def main() -> None:
    README.write_text(replaced(README.read_text(), section()))


if __name__ == "__main__":
    main()
