"""Output of a benchmark's results: a table on stdout and a JSON file."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from ....stages.errors import ConfigError
from ...output_file import check_output_file, write_output_file

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
RATES = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "total_token_throughput": "Total token throughput (tok/s):",
}


def table(title: str, report: Mapping[str, Any]) -> str:
    """The results of `measures.summarize`, one line each."""
    lines = [f" {title} ".center(50, "=")]
    lines += [_row(label, report[name]) for name, label in RATES.items() if report[name] is not None]
    for name, heading in TITLES.items():
        lines.append(heading.center(50, "-"))
        for key, value in report.items():
            if key.endswith(f"_{name}_ms"):
                statistic = key.removesuffix(f"_{name}_ms").capitalize()
                lines.append(_row(f"{statistic} {name.upper()} (ms):", value))
    return "\n".join([*lines, "=" * 50])


def _row(label: str, value: float) -> str:
    return f"{label:<39} {value:>10}" if isinstance(value, int) else f"{label:<39} {value:>10.2f}"


def publish(options: argparse.Namespace, title: str, settings: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Prints the table and, with `--save-result`, writes settings and results to a JSON file."""
    print(table(title, report))
    save(options, settings, report)


def save(options: argparse.Namespace, settings: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Writes settings and results to a JSON file, with `--save-result`."""
    if options.save_result:
        date = time.strftime("%Y%m%d-%H%M%S")
        file = _result_file(options, date)
        content = orjson.dumps({"date": date} | dict(settings) | dict(report), option=orjson.OPT_INDENT_2)
        write_output_file("--save-result", file, content)
        print(f"written to {file}", file=sys.stderr)


def check_result(options: argparse.Namespace) -> None:
    """Before the benchmark: raises `ConfigError` if its results could not be written. Makes their folder."""
    if options.save_result:
        check_output_file("--save-result", _result_file(options, "date"), makes_folder=True)


def _result_file(options: argparse.Namespace, date: str) -> Path:
    return Path(options.result_dir or ".") / (options.result_filename or f"millrace-{options.bench}-{date}.json")


def print_errors(errors: Iterable[str]) -> None:
    """Prints each distinct error once, on stderr."""
    for error in sorted(set(errors)):
        print(f"millrace: {error}", file=sys.stderr)


def progress(total: int, unit: str) -> Any:
    """A progress bar on stderr."""
    return tqdm(total=total, unit=unit, file=sys.stderr, dynamic_ncols=True)


def at_least_one(options: argparse.Namespace, *names: str) -> None:
    """Raises `ConfigError` for an option below 1."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
