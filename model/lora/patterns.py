"""Patterns of module names that an adapter's file holds: regular expressions of a stranger, under a limit of time.

Python's `re` may take exponential time and cannot be interrupted. So a pattern with more than names in it is matched in
a process of its own, which ends once it has computed for `LIMIT_S`. The start of Python does not count, nor does the
time in which a busy machine runs other processes.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..errors import shown

LIMIT_S = 2.0  # of the processor's time
WAIT_S = 60.0  # in all, with the start of the process
MEMORY_BYTES = 512 << 20
PLAIN = re.compile(r"[\w.-]*")  # a name; the dot matches any character, which takes no time
CHILD = f"""
import json, re, resource, signal, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
limit_s, patterns, names = json.load(sys.stdin)
signal.setitimer(signal.ITIMER_PROF, limit_s)
json.dump([[i for i, name in enumerate(names) if re.fullmatch(one, name)] for one in patterns], sys.stdout)
"""


def matches(patterns: Sequence[str], names: Sequence[str], fail: Callable[[str], NoReturn]) -> list[set[int]]:
    """For each pattern the indices of the names that it matches, as PEFT matches: from a dot or the beginning on.

    Calls `fail` with what is wrong for a pattern that is none, or takes too long.
    """
    hard = [pattern for pattern in patterns if not PLAIN.fullmatch(pattern)]
    found = dict(zip(hard, full_matches([_by_end(one) for one in hard], names, fail), strict=True))
    for pattern in patterns:
        if pattern not in found:
            found[pattern] = {index for index, name in enumerate(names) if _ends_with(name, pattern)}
    return [found[pattern] for pattern in patterns]


def full_matches(patterns: Sequence[str], names: Sequence[str], fail: Callable[[str], NoReturn]) -> list[set[int]]:
    """As `matches`, for patterns of whole names; always in a process of its own."""
    if not patterns or not names:
        return [set() for _ in patterns]
    command, asked = [sys.executable, "-I", "-S", "-c", CHILD], json.dumps([LIMIT_S, patterns, names]).encode()
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        fail(f"its patterns of module names were not matched in {WAIT_S:g} s, as the machine is busy; load it again")
    if done.returncode == -signal.SIGPROF:
        fail(f"its patterns of module names take more than {LIMIT_S:g} s to match; list the names instead")
    if done.returncode != 0:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        fail(f"a pattern of module names is no regular expression: {shown(last.partition(': ')[2] or last)}")
    return [set(indices) for indices in json.loads(done.stdout)]


def _ends_with(name: str, pattern: str) -> bool:
    """Whether a plain pattern matches `name` or what follows one of its dots."""
    start = len(name) - len(pattern)
    if start < 0 or (start and name[start - 1] != "."):
        return False
    return all(wanted in (".", found) for wanted, found in zip(pattern, name[start:], strict=True))


def _by_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"
