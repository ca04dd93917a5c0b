"""Bytes that are not valid text, and unusual text that is."""

from __future__ import annotations

import json

import pytest

from tests.security.oracle import CHAT, TEXT, refused


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xc3"}',
        b'{"prompt": "\xc0\xaf"}',
        b'{"prompt": "\xe0\x80\xaf"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xf4\x90\x80\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "\x00"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        '{"prompt": "a"}'.encode("utf-16-le"),
        '{"prompt": "a"}'.encode("utf-32"),
        b'\x00{"prompt": "a"}',
        b"",
        b"null",
        b'"a"',
        b"[]",
        b'{"prompt": "a"',
        b'{"prompt": "a"} x',
        b"{'prompt': 'a'}",
        b'{"prompt": "a",}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_utf8_json_is_refused(server, path, data):
    refused(server, lambda: server.post(path, data), code="invalid_json")


@pytest.mark.parametrize("charset", ["utf-16", "latin-1", "x" * 200])
def test_a_charset_other_than_utf8_is_refused(server, charset):
    headers = {"Content-Type": f"application/json; charset={charset}"}
    refused(server, lambda: server.post(TEXT, {"prompt": "a"}, headers), 415)


ODD = [
    "\x00\x01\x7f",
    "\u202eabc",
    "\ufffe\uffff",
    "e\u0301" * 20,
    "\U0001f469\u200d\U0001f467",
    "\U0010ffff",
    "\u2028\u2029",
    "\\u0041",
    '"\\/',
]


@pytest.mark.parametrize("text", ODD)
def test_odd_text_that_is_unicode_comes_back_as_it_went(server, text):
    for data in (json.dumps({"prompt": text}).encode(), json.dumps({"prompt": text}, ensure_ascii=False).encode()):
        tokens = server.post("/tokenize", data).json["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json == {"prompt": text}
    assert server.post(TEXT, {"prompt": text, "max_tokens": 1}).status == 200
