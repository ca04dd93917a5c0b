"""Log-probabilities and logit biases in quantities that cost memory."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, LONG_BODY_S, TEXT, VOCABULARY, literal, refused, refused_everywhere

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("value", [-1, 21, VOCABULARY, 2**31, 10**19, True, "1", 1.5])
def test_logprobs_beyond_twenty_are_refused(server, value):
    for prompt in ("hi", "a" * 300):
        body = {"prompt": prompt, "logprobs": value, "presence_penalty": 1.0}
        refused(server, lambda body=body: server.post(TEXT, body), param="logprobs")
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": value}
    refused(server, lambda: server.post(CHAT, body), param="top_logprobs")


@pytest.mark.parametrize("value", [-1, 21, VOCABULARY, 2**31, True, "1", 1.5])
def test_prompt_logprobs_beyond_twenty_are_refused(server, value):
    refused_everywhere(server, {"prompt_logprobs": value}, param="prompt_logprobs")


@pytest.mark.parametrize("value", [0, 5])
def test_prompt_logprobs_in_a_stream_are_refused(server, value):
    body = {"prompt": "hi", "stream": True, "prompt_logprobs": value}
    refused(server, lambda: server.post(TEXT, body), param="prompt_logprobs")


def test_top_logprobs_without_logprobs_are_refused(server):
    refused(server, lambda: server.post(CHAT, {"messages": MESSAGES, "top_logprobs": 2}), param="top_logprobs")


@pytest.mark.parametrize(
    "bias",
    [
        {"x": 1},
        {"-1": 1},
        {"1.0": 1},
        {" 1": 1},
        {"": 1},
        {"١": 1},
        {str(VOCABULARY): 1},
        {str(2**31): 1},
        {"9" * 30: 1},
        {"1": 1e308},
        {"1": -101},
        {"1": "1"},
        {"1": True},
        {"1": None},
        [1],
        "x",
        {str(i): 1 for i in range(1025)},
    ],
    ids=lambda bias: str(bias)[:24],
)
def test_a_bias_that_is_none_is_refused(server, bias):
    refused_everywhere(server, {"logit_bias": bias}, param="logit_bias")


def test_300_000_biases_are_refused_by_their_number(server):
    bias = "{" + ",".join(f'"{i}":1' for i in range(300_000)) + "}"
    data = literal({"prompt": "hi"}, "logit_bias", bias)
    refused(server, lambda: server.post(TEXT, data), code="invalid_json", budget_s=LONG_BODY_S)
