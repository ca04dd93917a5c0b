"""How many choices a request may have."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, TEXT, literal, refused, refused_everywhere

VALUES = [0, -1, 129, 10**6, 10**18, True, "2", 1.5]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("field", ["n", "best_of"])
def test_a_number_of_choices_out_of_range_is_refused(server, field, value):
    refused_everywhere(server, {field: value}, param=field)


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_a_number_of_400_digits_is_refused_at_the_parser(server, field):
    for path, body in ((CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (TEXT, {"prompt": "hi"})):
        data = literal(body, field, "1" + "0" * 400)
        refused(server, lambda path=path, data=data: server.post(path, data), code="invalid_json")
