"""`python -m tests.deploy.kube`: every check of images, compose, systemd unit and chart.

`--install` installs the tools that they need, `--lock` writes deploy/containers/requirements-cpu.txt,
`--write` renders the chart anew into golden/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from tests.deploy.kube import chart, lock, tools


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.kube", description=__doc__)
    parser.add_argument("--install", action="store_true", help=f"put the tools into {tools.FOLDER} and exit")
    parser.add_argument("--lock", action="store_true", help=f"write {lock.LOCK.name} and exit")
    parser.add_argument("--write", action="store_true", help="render the chart into golden/ and exit")
    options = parser.parse_args()
    if options.install:
        tools.install()
        return 0
    if options.write:
        chart.write_golden()
        return 0
    if options.lock:
        lock.write()
        return 0
    return int(pytest.main([str(Path(__file__).parent), "-rs"]))


if __name__ == "__main__":
    sys.exit(main())
