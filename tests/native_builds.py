"""Which builds of the native library the tests load. As a script, compiles them: `python3 tests/native_builds.py`.

The script needs nothing but Python and a compiler, so `.ci/run` starts it beside the installation, which waits for the
network and the disk.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Every operation is rounded as written, so to the same bits, in two thirds of the time.
QUICK = ["-O1"]


def best_and_plainest(available: Sequence[str]) -> tuple[str, ...]:
    """Of the instruction sets of this machine, best first: the best and the plainest; the others are the same code."""
    return tuple(dict.fromkeys((*available[:1], *available[-1:])))


def quicken(flags: dict[str, list[str]], available: Sequence[str]) -> None:
    """Compiles all sets but the best with less optimisation: users get the best one, and tests alone the others."""
    for name in flags:
        if name not in available[:1]:
            flags[name] = [*flags[name], *QUICK]


def main() -> int:
    """Compiles them into the user's cache folder, best first. Returns 1 if one cannot be compiled."""
    folder = Path(__file__).parents[1] / "kernels" / "native"
    build: dict[str, Any] = runpy.run_path(str(folder / "build.py"))
    available = runpy.run_path(str(folder / "machine.py"))["instruction_sets"]()
    quicken(build["FLAGS"], available)
    try:
        for name in best_and_plainest(available):
            build["library_path"](name)
    except build["BuildError"] as error:  # the tests will say so
        print(f"native library: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
