"""Prompts of invalid token ids."""

from __future__ import annotations

import pytest

from tests.security.oracle import TEXT, VOCABULARY, refused

WRONG = [-1, VOCABULARY, 2**31, 2**63, 10**19, 1.0, True, "1", None]


@pytest.mark.parametrize("token_id", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_an_id_that_is_no_token_is_refused(server, token_id, stream):
    for prompt in ([token_id], [[token_id]], [1, token_id], [[1], [1, token_id]]):
        if prompt == ["1"]:
            continue  # a list of one text
        body = {"prompt": prompt, "stream": stream, "max_tokens": 1}
        refused(server, lambda body=body: server.post(TEXT, body), param="prompt")


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []]])
def test_a_prompt_of_no_ids_is_empty(server, prompt):
    refused(server, lambda: server.post(TEXT, {"prompt": prompt}), code="empty_prompt", param="prompt")


def test_ids_that_are_tokens_give_tokens_back(server):
    ids = [0, VOCABULARY - 1]
    answer = server.post(TEXT, {"prompt": ids, "max_tokens": 20, "logprobs": 0})
    assert answer.status == 200 and answer.json["usage"]["prompt_tokens"] == 2
