"""Loaded by Schemathesis: keeps bodies that are valid by the document to the relations that no schema can say. Bodies
that are meant to be wrong stay as they are, and every check is on."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

from tests.generators.relations import RELATIONS, flat
from tests.generators.tamed import tamed

CONTEXT = int(os.environ["MILLRACE_TEST_CONTEXT"])


@schemathesis.hook
def filter_case(_context: Any, case: Any) -> bool:
    """Leaves out what breaks a relation."""
    if not is_valid(case):
        return True
    body = flat(tamed(case.body))
    return all(rel.holds(body, CONTEXT) for rel in RELATIONS)


@schemathesis.hook
def map_case(_context: Any, case: Any) -> Any:
    """Puts in the place of what only a compiler could judge what one takes."""
    if is_valid(case):
        case.body = tamed(case.body)
    return case


def is_valid(case: Any) -> bool:
    """By the schema."""
    return isinstance(case.body, dict) and case.meta is not None and case.meta.generation.mode.is_positive
