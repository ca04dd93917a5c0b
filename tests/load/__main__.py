"""`python -m tests.load soak|streams|overload|burst|idle`: one load with its full count.

Prints the figures as JSON, and ends with code 1 if there is a complaint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from tests.load import burst, idle, overload, soak, streams
from tests.load.process import Figures


def main() -> int:
    """Runs one load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=("soak", "streams", "overload", "burst", "idle"))
    parser.add_argument("--requests", type=int, metavar="N", help="of soak (100,000) and burst (10,000)")
    parser.add_argument("--seconds", type=float, metavar="X", help="of streams (60), overload (300) and idle (30)")
    parser.add_argument("--bundled", action="store_true", help="soak the bundled model, not the scripted engine")
    options = parser.parse_args()
    loads: dict[str, Callable[[], Figures]] = {
        "soak": lambda: soak.run(options.requests or 100_000, is_bundled=options.bundled),
        "streams": lambda: streams.run(seconds=options.seconds or 60.0),
        "overload": lambda: overload.run(options.seconds or 300.0),
        "burst": lambda: burst.run(options.requests or 10_000),
        "idle": lambda: idle.run(options.seconds or 30.0),
    }
    figures = loads[options.load]()
    print(json.dumps(figures, indent=2))
    return 1 if figures["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
