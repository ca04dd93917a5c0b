"""Unknown fields with names of internals."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, KEY, TEXT, refused

FIELDS = [
    "n_discard",
    "kv_transfer_params",
    "media_io_kwargs",
    "request_outbox",
    "first_sequence_id",
    "arrival_s",
    "sequence_id",
    "slot",
    "block_table",
    "__class__",
    "__init__",
    "model_config",
    "self",
]
UNSERVED = ["mm_processor_kwargs", "prompt_embeds", "vllm_xargs"]  # which would change the answer
ASKED = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_they_change_nothing_and_are_told(server, path):
    plain = {"temperature": 0, "max_tokens": 6}
    with_fields = plain | {name: {"do": ["it", 2**40]} for name in FIELDS}
    expected = server.post(path, ASKED[path] | plain)
    answer = server.post(path, ASKED[path] | with_fields)
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"].split(", ") == FIELDS
    assert answer.json["choices"] == expected.json["choices"]
    assert "x-ignored-fields" not in expected.headers


@pytest.mark.parametrize("name", UNSERVED)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_those_that_would_change_the_answer_are_refused(server, path, name):
    body = ASKED[path] | {name: {"do": ["it", 2**40]}}
    refused(server, lambda: server.post(path, body), code="unsupported_parameter", param=name)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_strict_server_refuses_them(keyed_server, path, name):
    headers = {"Authorization": f"Bearer {KEY}"}
    body = ASKED[path] | {name: 1}
    refused(keyed_server, lambda: keyed_server.post(path, body, headers), code="unknown_parameter", param=name)


def test_many_and_odd_names_make_no_odd_header(server):
    names = {f"f{i}": 1 for i in range(500)} | {"a\r\nSet-Cookie: x": 1, "é" * 5000: 1, "\x00": 1}
    answer = server.post(TEXT, ASKED[TEXT] | {"max_tokens": 1} | names)
    assert answer.status == 200
    assert "set-cookie" not in answer.headers and len(answer.headers["x-ignored-fields"]) < 4096
