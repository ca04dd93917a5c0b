"""Limits of a process, and what the errors at them say."""

from __future__ import annotations

import errno
import os

import pytest

from millrace.runtime.env.limits import resource_problem


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("Unable to allocate 768. MiB"), "not enough memory (Unable to allocate 768. MiB)"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "not enough memory"),
        (ImportError("x.so: failed to map segment from shared object"), "not enough memory"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
        (RuntimeError("can't start new thread"), "no thread can be started"),
    ],
)
def test_what_is_lacking_is_named_also_where_it_is_a_cause(error: Exception, words: str) -> None:
    assert words in (resource_problem(error) or "")
    later = KeyError("a")
    later.__context__ = error
    assert words in (resource_problem(later) or "")


@pytest.mark.parametrize("error", [ValueError("memory"), ImportError("no module"), OSError(errno.ENOENT, "none")])
def test_other_errors_are_about_no_limit(error: Exception) -> None:
    assert resource_problem(error) is None
