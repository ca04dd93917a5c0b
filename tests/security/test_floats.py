"""Values that are not numbers, not finite or out of range."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, TEXT, asks, literal, refused, refused_everywhere

FIELDS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_literal_that_is_no_json_number_is_refused_at_the_parser(server, field, text):
    for path, body in asks({}):
        data = literal(body, field, text)
        refused(server, lambda path=path, data=data: server.post(path, data), code="invalid_json")


@pytest.mark.parametrize("value", [1e308, -1e308, "nan", "1", True, [1]])
@pytest.mark.parametrize("field", FIELDS)
def test_a_value_out_of_range_or_of_another_type_names_its_field(server, field, value):
    refused_everywhere(server, {field: value}, param=field)


def test_minus_zero_is_zero_and_the_least_number_is_a_number(server):
    for path, asked in ((CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (TEXT, {"prompt": "hi"})):
        texts = set()
        for zero in ("0", "-0.0", "0.0"):
            answer = server.post(path, literal(asked | {"max_tokens": 8, "ignore_eos": True}, "temperature", zero))
            assert answer.status == 200
            choice = answer.json["choices"][0]
            texts.add(choice["text"] if path == TEXT else choice["message"]["content"])
        assert len(texts) == 1
        assert server.post(path, literal(asked | {"max_tokens": 2}, "temperature", "5e-324")).status == 200


@pytest.mark.parametrize("value", ["NaN", "1e999"])
def test_numbers_inside_of_logit_bias_are_held_to_the_same(server, value):
    data = literal({"prompt": "hi"}, "logit_bias", '{"1": ' + value + "}")
    refused(server, lambda: server.post(TEXT, data), code="invalid_json")
