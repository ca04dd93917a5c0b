"""Compares the tokens of each family's tiny checkpoints with those of transformers.

    python -m tests.families [--backend native|torch|triton|transformers|auto ...] [--ways WAY ...] [NAMES ...]

A name is a row or a model type; none means all. `--list` shows the rows with the least margin of their best logits and
how many tokens differ; `--markdown` the page of models, for which nothing runs. `--ids` and `--prompts` shorten a run,
as Triton needs it without a GPU, where this interprets its kernels: `--backend triton --ids 4 --prompts 21`. Exit
status 1 if a row differs or fails.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.families.row import Row

BACKENDS = ("native", "torch", "triton", "transformers", "auto")


def main() -> int:
    """Run the command line."""
    if any("triton" in argument for argument in sys.argv[1:]):
        from millrace.stages.loading.native_choice import has_cuda_driver

        if not has_cuda_driver():
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
    from millrace.runtime.env import log
    from tests.families.zoo import chosen

    options = parse(sys.argv[1:])
    try:
        rows = chosen(options.names)
    except KeyError as error:
        sys.exit(f"python -m tests.families: {error.args[0]}")
    if options.page or options.markdown:
        from tests.docs.generated import DOCS
        from tests.families.table import page

        print(page(rows)) if options.markdown else (DOCS / "models.md").write_text(page(rows))
        return 0
    log.configure(level="error")
    gc.freeze()  # an engine collects garbage when it stops, which takes 0.4 s with all that is imported
    try:
        return run(options, rows)
    finally:
        gc.unfreeze()


def run(options: argparse.Namespace, rows: Sequence[Row]) -> int:
    """Run the rows, or only transformers for a list of them."""
    from tests.families.report import Report, list_rows
    from tests.families.ways import run_way
    from tests.families.zoo import Zoo

    with tempfile.TemporaryDirectory(prefix="millrace-families-") as folder:
        zoo = Zoo(Path(folder), options.ids, tuple(options.prompts))
        if options.list:
            return list_rows(zoo, rows)
        report, began = Report(), time.monotonic()
        for row in rows:
            entry = zoo.entry(row)
            for backend in options.backend:
                outcomes = {}
                for way in options.ways:
                    outcomes[way] = run_way(entry, way, backend)
                    if outcomes[way].state == "refused":
                        break
                print(report.add(row, backend, outcomes), flush=True)
        print(report.summary(time.monotonic() - began))
        return report.status


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    from tests.families.oracle import LENGTHS, NUM_NEW
    from tests.families.ways import WAYS

    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a row or a model type; none: all")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=["native", "torch"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--ids", type=int, default=NUM_NEW, help="tokens after each prompt")
    parser.add_argument("--prompts", type=int, nargs="+", default=LENGTHS, help="lengths of the prompts")
    parser.add_argument("--list", action="store_true", help="show the rows, and run transformers only")
    parser.add_argument("--markdown", action="store_true", help="show the page of models; runs none")
    parser.add_argument("--page", action="store_true", help="write it, to deploy/docs/models.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
