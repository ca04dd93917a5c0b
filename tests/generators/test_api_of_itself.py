"""Schemathesis over what the server says of itself: the other half of `test_api_conformance.py`, for another worker."""

from __future__ import annotations

import pytest

from tests.generators.api import conforms

pytestmark = [pytest.mark.slow, pytest.mark.security]


def test_what_the_server_says_of_itself_is_what_its_document_says():
    conforms("include", num_operations=33)
