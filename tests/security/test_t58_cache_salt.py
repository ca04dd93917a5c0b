"""T58: salts that are no salts; and T60: what was refused or cut short leaves nothing to be found."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, TEXT, refused


@pytest.mark.parametrize("salt", ["a" * 1024 * 1024, "/", "", "a" * 129, "a b", "\u0000", "é"])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_salt_is_1_to_128_plain_characters(server, path, salt):
    body = {"prompt": "hi"} if path == TEXT else {"messages": [{"role": "user", "content": "hi"}]}
    refused(server, lambda: server.post(path, body | {"cache_salt": salt}), 400, param="cache_salt")


@pytest.mark.parametrize("salt", [7, True, ["a"], {"a": 1}])
def test_a_salt_is_a_string(server, salt):
    refused(server, lambda: server.post(TEXT, {"prompt": "hi", "cache_salt": salt}), 400, param="cache_salt")
