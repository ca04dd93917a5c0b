"""How long an answer may be."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, CONTEXT, refused, refused_everywhere


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63, 10**19, True, "5", 1.0])
def test_max_tokens_out_of_range_is_refused(server, value):
    refused_everywhere(server, {"max_tokens": value}, param="max_tokens")


@pytest.mark.parametrize("value", [0, -1, 2**31, True, "5"])
def test_so_is_its_newer_name(server, value):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": value}
    refused(server, lambda: server.post(CHAT, body), param="max_completion_tokens")


def test_an_answer_that_does_not_fit_the_context_is_refused(server):
    refused_everywhere(server, {"max_tokens": CONTEXT + 1}, code="context_length_exceeded")


def test_min_tokens_above_max_tokens_is_refused(server):
    refused_everywhere(server, {"max_tokens": 4, "min_tokens": 5}, param="min_tokens")
    refused_everywhere(server, {"min_tokens": -1}, param="min_tokens")
