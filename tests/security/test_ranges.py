"""The other numeric sampling parameters."""

from __future__ import annotations

import pytest

from tests.security.oracle import refused_everywhere


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -2),
        ("top_k", 2**40),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("seed", 2**64),
        ("seed", -(2**64)),
        ("seed", 0.5),
        ("presence_penalty", 1e9),
        ("presence_penalty", -1e9),
        ("frequency_penalty", 1e9),
        ("frequency_penalty", -1e9),
        ("repetition_penalty", 1e9),
        ("repetition_penalty", -1e9),
        ("repetition_penalty", 0),
        ("priority", 2**40),
    ],
)
def test_a_number_out_of_range_names_its_field(server, field, value):
    refused_everywhere(server, {field: value}, param=field)
