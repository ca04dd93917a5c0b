"""What a batch costs in memory, with the scripted engine: python -m tests.deploy.batch_memory --lines 20000

Prints the peak of the process's resident memory, in MiB, after a tenth of the lines and after all, and the MiB of the
input. Lines carry `--padding` bytes that are not read, so that holding the input would show.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from millrace.deploy.cli.run_batch import answer_lines, in_process
from millrace.deploy.config import ServerConfig
from millrace.runtime.env.log import configure
from millrace.stages.config import EngineConfig
from millrace.stages.testing.scripted.engine import scripted_engine

MIB = 1024 * 1024


class Watch(BytesIO):
    """Throws answers away, and notes the peak of memory when a tenth of them has come."""

    def __init__(self, num_lines: int) -> None:
        super().__init__()
        self.num_answers, self.early_mib = 0, 0.0
        self._early = num_lines // 10

    def write(self, data: object) -> int:
        self.num_answers += 1
        if self.num_answers == self._early:
            self.early_mib = peak_mib()
        return len(bytes(data))  # type: ignore[call-overload]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write_input(path: Path, num_lines: int, padding: int) -> float:
    """MiB of the file."""
    with path.open("w") as file:
        for number in range(num_lines):
            body = {"prompt": f"line {number}", "max_tokens": 4, "metadata": {"padding": "x" * padding}}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return os.path.getsize(path) / MIB


async def measure(path: Path, num_lines: int) -> tuple[int, Watch]:
    target = in_process(EngineConfig(), ServerConfig(), lambda _: scripted_engine())
    watch = Watch(num_lines)
    return await answer_lines(target, path.open("rb"), watch, 64, 2**20), watch


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--padding", type=int, default=8192)
    options = parser.parse_args()
    configure("console", "error")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        input_mib = write_input(path, options.lines, options.padding)
        began = time.perf_counter()
        code, watch = asyncio.run(measure(path, options.lines))
    figures = {
        "lines": options.lines,
        "answers": watch.num_answers,
        "input_mib": round(input_mib, 1),
        "early_mib": round(watch.early_mib, 1),
        "end_mib": round(peak_mib(), 1),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(figures))
    return code


if __name__ == "__main__":
    sys.exit(main())
