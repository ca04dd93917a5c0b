"""Limits of JSON bodies, checked before parsing."""

from __future__ import annotations

import json
import time

import pytest

from millrace.deploy.errors import ApiError
from millrace.deploy.http.json_limits import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, JsonLimits, parse_object

LIMITS = JsonLimits()
MIB = 1024 * 1024


def refusal(data: bytes, limits: JsonLimits = LIMITS) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_object(data, limits)
    return caught.value


def test_an_object_comes_through_with_its_types():
    data = b'{"a": [1, -0.0, true, null], "b": {"c": "\\u00e9\\"\\\\ [{:,"}}'
    assert parse_object(data, LIMITS) == {"a": [1, -0.0, True, None], "b": {"c": 'é"\\ [{:,'}}


def test_of_a_key_given_twice_the_last_value_counts():
    assert parse_object(b'{"n": 1, "n": 2}', LIMITS) == {"n": 2}


def test_depth_is_counted_outside_strings_only():
    at_limit = b'{"a":' + b"[" * 31 + b'"[[[[{{{{"' + b"]" * 31 + b"}"
    assert parse_object(at_limit, LIMITS)
    beyond = b'{"a":' + b"[" * 32 + b"]" * 32 + b"}"
    assert "nested more than 32 deep" in refusal(beyond).message


def test_an_escaped_quote_does_not_end_a_string():
    inside = b'{"a": "' + b'\\"[' * 40 + b'"}'
    assert parse_object(inside, LIMITS) == {"a": '"[' * 40}
    after_backslash = b'{"a": "\\\\", "b": ' + b"[" * 40 + b"]" * 40 + b"}"
    assert "nested" in refusal(after_backslash).message


def test_keys_are_counted_and_colons_in_text_are_not():
    limits = JsonLimits(keys=3)
    assert parse_object(b'{"a":1,"b":{"c":":::::::"}}', limits)
    assert "4 keys: must be at most 3" in refusal(b'{"a":1,"b":1,"c":1,"d":1}', limits).message


def test_numbers_of_more_than_twenty_digits_are_refused():
    assert parse_object(b'{"n": 12345678901234567890}', LIMITS)
    assert "more than 20 digits: round it, write it" in refusal(b'{"n": 123456789012345678901}').message
    assert parse_object(b'{"n": "123456789012345678901234567890"}', LIMITS)


def test_whole_numbers_keep_all_their_digits_or_are_refused():
    for number in (2**64 - 1, -(2**63), 1234567890123456789, 10**18 + 0.5, 1.2345678901234567e-19, -1e19):
        for wrapped in ({"n": number}, {"n": [0, number], "pad": "x" * 5000}):
            parsed = parse_object(json.dumps(wrapped).encode(), LIMITS)
            assert parsed == wrapped and json.dumps(parsed) == json.dumps(wrapped)
    for number in (2**64, -(2**63) - 1, 10**20 - 1):
        for wrapped in ({"n": number}, {"n": [0, number], "pad": "x" * 5000}):
            assert f"the number {number}: whole numbers must be of 64" in refusal(json.dumps(wrapped).encode()).message
    assert parse_object(b'{"n": "99999999999999999999", "f": 0.12345678901234567890}', LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        b'{"t": NaN}',
        b'{"t": Infinity}',
        b'{"t": -Infinity}',
        b'{"t": 1e999}',
        b'{"t": "\\ud800"}',
        b'{"t": "\xff"}',
        b'{"t": "\xc0\xaf"}',
        b'\xef\xbb\xbf{"t": 1}',
        '{"t": 1}'.encode("utf-16"),
        b'{"t": "\x00"}',
        b"{",
        b"",
        b"{} {}",
    ],
)
def test_what_is_no_json_is_refused_as_such(data):
    error = refusal(data)
    assert (error.status, error.code) == (400, "invalid_json")


@pytest.mark.parametrize("data", [b"[]", b"1", b'"x"', b"null", b"true"])
def test_only_objects_are_bodies(data):
    assert "must be an object" in refusal(data).message


def test_a_body_over_the_limit_is_413():
    assert refusal(b" " * 11, JsonLimits(num_bytes=10)).status == 413


HOSTILE = {
    "numbers": b'{"p":[' + b"1," * (2 * MIB - 8) + b"1]}",
    "wide numbers": b'{"p":[' + b"1234567," * (MAX_VALUES - 1) + b"1]}",
    "arrays": b'{"p":[' + b"[]," * (MIB + MIB // 4) + b"1]}",
    "allowed arrays": b'{"p":[' + b"[]," * (MAX_CONTAINERS - 2) + b"1]}",
    "strings": b'{"p":[' + b'"a",' * (MIB - 8) + b"1]}",
    "allowed strings": b'{"p":[' + b'"a",' * (MAX_STRINGS - 2) + b"1]}",
    "open brackets": b"[" * (4 * MIB),
    "quotes": b'"' * (4 * MIB),
    "backslashes": b"\\" * (4 * MIB),
    "escapes": b'{"p":"' + b"\\n" * (2 * MIB - 8) + b'"}',
    "one number": b'{"n":' + b"9" * (4 * MIB - 16) + b"}",
    "keys": b"{" + b",".join(b'"%x":1' % i for i in range(300_000)) + b"}",
    "one text": b'{"p":"' + b"a" * (4 * MIB - 16) + b'"}',
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_four_hostile_mebibytes_cost_a_fraction_of_a_second(name):
    data = HOSTILE[name]
    assert len(data) <= LIMITS.num_bytes
    best = float("inf")
    for _ in range(3):  # minimum of three, in CPU time, as other processes share the core
        began = time.thread_time()
        try:
            parse_object(data, LIMITS)
        except ApiError as error:
            assert error.status == 400
        best = min(best, time.thread_time() - began)
    assert best < 0.2
