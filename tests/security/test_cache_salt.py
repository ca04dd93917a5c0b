"""Salts that are no salts; and what was refused or cut short leaves nothing in the prefix cache."""

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


def test_with_a_salt_per_key_the_holders_of_two_keys_share_nothing(two_keys_server):
    """Salted alike or not at all; each finds what it has asked itself, and another salt of its own finds nothing."""

    def num_cached(key: str, salt: str | None) -> int:
        body = {"prompt": "a" * 100, "max_tokens": 1, "cache_salt": salt}
        answer = two_keys_server.post(TEXT, body, {"Authorization": f"Bearer {key}"})
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    for salt in (None, "one", "two"):
        assert num_cached("key-a", salt) == 0
        assert num_cached("key-b", salt) == 0
        assert num_cached("key-a", salt) > 0 and num_cached("key-b", salt) > 0


def test_with_a_salt_per_key_what_is_embedded_for_one_key_is_not_cached_for_another(two_keys_server):
    bodies = {
        "/v1/embeddings": {"input": "b" * 100},
        "/score": {"queries": "c" * 100, "documents": ["d" * 100]},
        "/rerank": {"query": "e" * 100, "documents": ["f" * 100]},
    }

    def is_cached(key: str, path: str) -> bool:
        answer = two_keys_server.post(path, bodies[path], {"Authorization": f"Bearer {key}"})
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    for path in bodies:
        found = [is_cached(key, path) for key in ("key-a", "key-b", "key-a", "key-b")]
        assert found == [False, False, True, True], path
