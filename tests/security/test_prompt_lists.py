"""How many prompts, of which forms, and how many choices of them."""

from __future__ import annotations

import pytest

from tests.security.oracle import LONG_BODY_S, REFUSED_S, TEXT, refused


@pytest.mark.parametrize(
    "prompt",
    [
        ["a"] * 257,
        [[1]] * 257,
        ["a"] * 99_000,
        [[[1]]],
        [[1], "a"],
        ["a", 1],
        [1, "a"],
        [1, [2]],
        [{}],
        [None],
        [1, None],
        {"a": 1},
    ],
    ids=lambda prompt: str(prompt)[:24],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_that_is_none_is_refused(server, prompt, stream):
    body = {"prompt": prompt, "stream": stream, "max_tokens": 1}
    refused(
        server,
        lambda: server.post(TEXT, body),
        param="prompt",
        budget_s=LONG_BODY_S if len(prompt) > 1000 else REFUSED_S,
    )


@pytest.mark.parametrize(("num_prompts", "n"), [(5, 128), (256, 3), (128, 5)])
def test_more_than_512_choices_in_all_are_refused(server, num_prompts, n):
    body = {"prompt": ["a"] * num_prompts, "n": n, "max_tokens": 1}
    refused(server, lambda: server.post(TEXT, body), param="n")


def test_lists_of_unequal_lengths_are_fine(server):
    answer = server.post(TEXT, {"prompt": [[97], [97, 98, 99]], "max_tokens": 1, "ignore_eos": True})
    assert answer.status == 200 and answer.json["usage"]["prompt_tokens"] == 4
