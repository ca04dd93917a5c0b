"""Standard input, output and error of a command: usable whatever the caller has made of them.

They may be closed, ASCII only, a pipe without a reader or a file on a full disk. None of that ends a server; a command
that only prints ends without a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TextIO

BROKEN_PIPE_EXIT_CODE = 141  # as a shell reports a process that SIGPIPE ended
OF_OUTPUT = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
FLAGS = (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)  # of descriptors 0, 1 and 2


def prepare() -> None:
    """Opens the null device for closed streams, and escapes characters that a stream cannot encode.

    NOTE: without descriptors 0 to 2, the next socket or file would get such a number, and what is printed.
    """
    for descriptor, flags in enumerate(FLAGS):
        try:
            os.fstat(descriptor)
        except OSError:
            _discard_into_null(descriptor, flags)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def print_line(text: str) -> OSError | None:
    """Prints a line to standard output; the error if that is impossible. Later output is then discarded."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        return error
    return None


def print_error(text: str) -> None:
    """Prints a line to standard error, if it can take one."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def exit_code_of_broken_output(error: OSError) -> int | None:
    """The exit code if `error` is one of standard output or error, else None.

    Says why, unless the reader of a pipe has left.
    """
    if error.errno not in OF_OUTPUT:
        return None
    broken = next((stream for stream in (sys.stdout, sys.stderr) if not _takes_a_line_break(stream)), None)
    if broken is None:
        return None
    _discard(broken)
    if error.errno == errno.EPIPE:
        return BROKEN_PIPE_EXIT_CODE
    print_error(f"millrace: cannot write the output: {error.strerror}")
    return 1


def _takes_a_line_break(stream: TextIO) -> bool:
    try:
        os.write(stream.fileno(), b"\n")
    except io.UnsupportedOperation:  # no file, in a test
        return True
    except OSError:
        return False
    return True


def _discard(stream: TextIO) -> None:
    """Discards what this stream holds and gets, also at the end of the interpreter."""
    with contextlib.suppress(OSError, ValueError):  # a stream of another kind, in a test
        _discard_into_null(stream.fileno(), os.O_WRONLY)
        stream.flush()


def _discard_into_null(descriptor: int, flags: int) -> None:
    opened = os.open(os.devnull, flags)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
