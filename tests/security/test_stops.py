"""Stop strings in number and length."""

from __future__ import annotations

import pytest

from tests.security.oracle import LONG_BODY_S, TEXT, literal, refused, refused_everywhere


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], ["a"] * 17, "x" * 257, ["x" * 257], 5, [5], [None], {"a": 1}])
def test_a_stop_that_is_none_is_refused(server, stop):
    refused_everywhere(server, {"stop": stop}, param="stop")


@pytest.mark.parametrize("stop", [[str(i) for i in range(90_000)], ["x"] * 100_001, "x" * 2**20, ["x" * 2**20]])
def test_a_mebibyte_of_stops_is_refused(server, stop):
    refused(server, lambda: server.post(TEXT, {"prompt": "hi", "stop": stop}), budget_s=LONG_BODY_S)


def test_half_a_character_cannot_stop(server):
    data = literal({"prompt": "hi"}, "stop", '"\\ud800"')
    refused(server, lambda: server.post(TEXT, data), code="invalid_json")


def test_sixteen_stops_of_256_characters_are_fine(server):
    stops = [chr(ord("A") + i) * 256 for i in range(16)]
    assert server.post(TEXT, {"prompt": "hi", "stop": stops, "max_tokens": 4}).status == 200
