"""The rows themselves: names, keys, and that each type of ours has several."""

from __future__ import annotations

from collections import Counter

from tests.families.checkpoint import make_config
from tests.families.rows import ROWS


def test_each_row_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []


def test_each_row_has_keys_that_its_type_knows() -> None:
    assert [row.name for row in ROWS if make_config(row).model_type != row.model_type] == []
