"""Patterns of module names that an adapter's file holds: regular expressions of a stranger, under a limit of time.

Python's `re` may take exponential time and cannot be interrupted. So a pattern with more than names in it is matched in
a process of its own, which is ended after `LIMIT_S`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..errors import shown

LIMIT_S = 2.0
MEMORY_BYTES = 512 << 20
PLAIN = re.compile(r"[\w.-]*")  # a name; the dot matches any character, which takes no time
CHILD = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
patterns, names = json.load(sys.stdin)
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
            plain = re.compile(_by_end(pattern))
            found[pattern] = {index for index, name in enumerate(names) if plain.fullmatch(name)}
    return [found[pattern] for pattern in patterns]


def full_matches(patterns: Sequence[str], names: Sequence[str], fail: Callable[[str], NoReturn]) -> list[set[int]]:
    """As `matches`, for patterns of whole names; always in a process of its own."""
    if not patterns or not names:
        return [set() for _ in patterns]
    command = [sys.executable, "-I", "-S", "-c", CHILD]
    try:
        done = subprocess.run(
            command, input=json.dumps([patterns, names]).encode(), capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        fail(f"its patterns of module names take more than {LIMIT_S:g} s to match; list the names instead")
    if done.returncode != 0:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        fail(f"a pattern of module names is no regular expression: {shown(last.partition(': ')[2] or last)}")
    return [set(indices) for indices in json.loads(done.stdout)]


def _by_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"
