"""The command line in forks of a process that has imported what `millrace serve` does; `forked.py` starts it and asks.

The argument is the descriptor of the socket between them.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

from tests.deploy.forked import options_of_fork

LATE = (  # what `millrace serve` and `millrace route` import once they know their settings
    *("millrace.deploy.cli.serve", "millrace.deploy.server.server", "millrace.stages.engine.engine"),
    *("millrace.stages.loading.model", "millrace.stages.backends.native.loading", "encodings.idna"),
)


def main() -> int:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as the command sets before it imports numpy
    from millrace.deploy.cli.main import main as run

    for module in LATE:
        importlib.import_module(module)
    arguments = options_of_fork(socket.socket(fileno=int(sys.argv[1])))["arguments"]
    sys.argv[1:] = arguments
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
