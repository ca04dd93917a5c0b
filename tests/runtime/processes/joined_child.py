"""A child process for tests: says that it has joined its parent, and ends with it."""

from __future__ import annotations

import sys

from millrace.runtime.processes.child import joined

if __name__ == "__main__":
    sock, _ = joined(sys.argv[1:])
    sock.send(b"1")
    sock.recv(1)
