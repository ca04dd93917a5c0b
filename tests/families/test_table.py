"""The page of models is what the rows, the families and transformers' classes say."""

from __future__ import annotations

import pytest

from tests.docs.generated import DOCS
from tests.families.rows import ROWS
from tests.families.table import page


@pytest.mark.slow
def test_the_page_of_models_says_what_serves_each_type() -> None:
    assert (DOCS / "models.md").read_text("utf-8") == page(ROWS), "run python -m tests.families --page"
