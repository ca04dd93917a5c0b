"""The edge of the context, exactly."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, CONTEXT, LONG_BODY_S, TEXT, refused


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_last_prompt_that_fits_leaves_room_for_one_token(server, as_ids):
    def prompt(num_tokens: int):
        return [97] * num_tokens if as_ids else "a" * num_tokens

    answer = server.post(TEXT, {"prompt": prompt(CONTEXT - 1), "max_tokens": 1})
    assert answer.status == 200 and answer.json["usage"]["prompt_tokens"] == CONTEXT - 1
    for num_tokens, max_tokens in ((CONTEXT - 1, 2), (CONTEXT, 1), (CONTEXT + 1, 1)):
        body = {"prompt": prompt(num_tokens), "max_tokens": max_tokens}
        refused(server, lambda body=body: server.post(TEXT, body), code="context_length_exceeded")


@pytest.mark.memory(left_mib=9)  # what a body of megabytes was read into is kept for the next one
def test_four_mebibytes_of_text_are_refused_before_they_are_tokenized(server):
    text = "x" * (4 * 1024 * 1024 - 100)
    answer = refused(
        server, lambda: server.post(TEXT, {"prompt": text}), code="context_length_exceeded", budget_s=LONG_BODY_S
    )
    assert str(len(text)) in answer.error["message"]
    chat = {"messages": [{"role": "user", "content": text}]}
    refused(
        server, lambda: server.post(CHAT, chat), code="context_length_exceeded", param="messages", budget_s=LONG_BODY_S
    )


def test_a_quarter_million_ids_are_refused_by_their_number(server):
    body = {"prompt": [97] * 260_000}
    refused(server, lambda: server.post(TEXT, body), code="context_length_exceeded", budget_s=LONG_BODY_S)
