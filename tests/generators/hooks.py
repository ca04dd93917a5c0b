"""Loaded by Schemathesis: keeps bodies that are valid by the document to the relations that no schema can say. Bodies
that are meant to be wrong stay as they are, and every check is on."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

from tests.generators.relations import RELATIONS, with_whole_numbers

CONTEXT = int(os.environ["MILLRACE_TEST_CONTEXT"])


@schemathesis.hook
def filter_case(_context: Any, case: Any) -> bool:
    """Leaves out what breaks a relation."""
    return not is_valid(case) or all(rel.holds(with_whole_numbers(case.body), CONTEXT) for rel in RELATIONS)


@schemathesis.hook
def map_case(_context: Any, case: Any) -> Any:
    """Writes whole numbers without a point."""
    if is_valid(case):
        case.body = with_whole_numbers(case.body)
    return case


def is_valid(case: Any) -> bool:
    """By the schema."""
    return isinstance(case.body, dict) and case.meta is not None and case.meta.generation.mode.is_positive
