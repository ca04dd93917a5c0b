"""Every wrong field is named in the error, and none is misread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.completions.body import CompletionBody
from millrace.deploy.api.embeddings.bodies import EmbeddingBody
from millrace.deploy.api.schema.validation import read_body
from millrace.deploy.errors import ApiError
from millrace.stages.beam_search.algorithm import BeamParams
from millrace.stages.params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> SamplingParams:
    body, _ = read_body(ChatBody, {"messages": MESSAGES} | fields, False)
    body.prompts()
    return body.sampling_params(SamplingParams())


def complete(**fields: Any) -> SamplingParams:
    body, _ = read_body(CompletionBody, {"prompt": "hi"} | fields, False)
    body.prompts()
    return body.sampling_params(SamplingParams())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", value) for value in (0, -1, 129, 10**6, 10**18, True, "2", 1.5)],
        *[("temperature", value) for value in (-0.1, 2.1, 1e308, True, "nan", float("nan"))],
        *[("top_p", value) for value in (0, 1.1, -1, "1")],
        *[("top_k", value) for value in (-2, 2**40, 1.0)],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("presence_penalty", value) for value in (-2.1, 1e9)],
        *[("frequency_penalty", value) for value in (2.1, -1e9)],
        *[("repetition_penalty", value) for value in (0, 1e9)],
        *[("seed", value) for value in (2**64, 1.5, "1")],
        *[("max_tokens", value) for value in (0, -1, 2**31, 2**63, True, "5")],
        *[("min_tokens", value) for value in (-1, 2**31)],
        *[("stop", value) for value in ([""], "", ["a"] * 17, ["a" * 257], 5, [5])],
        *[("stop_token_ids", value) for value in ([-1], [2**31], [1.0], ["1"], list(range(129)))],
        *[("logit_bias", value) for value in ({"x": 1}, {"-1": 1}, {"1": 1e308}, {"1": True}, [1])],
        *[("stream", value) for value in (1, "true")],
        *[("stream_options", value) for value in ({}, {"include_usage": True}, 1)],
        *[("user", value) for value in ("x" * 513, 5)],
        *[("best_of", value) for value in (0, -1, 129, 10**18, True, "2", 1.5)],
        *[("priority", value) for value in (2**31, "1", None)],
    ],
)
@pytest.mark.parametrize("ask", [chat, complete])
def test_a_value_out_of_range_names_its_field(ask, field, value):
    with pytest.raises(ApiError) as caught:
        ask(**{field: value})
    assert (caught.value.status, caught.value.param.partition("[")[0]) == (400, field)  # in a list the index is named


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ApiError, match="min_tokens = 9: must be at most max_tokens, which is 8"):
        complete(max_tokens=8, min_tokens=9)


def test_minus_zero_is_zero():
    assert chat(temperature=-0.0).is_greedy


def test_the_newer_name_of_max_tokens_wins_and_is_the_one_complained_about():
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    with pytest.raises(ApiError) as caught:
        chat(max_completion_tokens=2**31)
    assert caught.value.param == "max_completion_tokens"
    assert caught.value.message.startswith("max_completion_tokens = ")


def test_max_tokens_is_16_for_completions_and_open_for_chat():
    assert complete().max_tokens == 16
    assert chat().max_tokens is None


def test_fields_the_client_leaves_out_take_the_models_defaults():
    body, _ = read_body(ChatBody, {"messages": MESSAGES, "top_p": 0.5}, False)
    params = body.sampling_params(SamplingParams(temperature=0.6, top_p=0.9, top_k=20))
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 20)


def test_logprobs_of_chat_need_their_switch():
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat(logprobs=False).logprobs is None
    for fields in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        with pytest.raises(ApiError) as caught:
            chat(**fields)
        assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize("value", [-1, 21, True, "1", 1.0])
def test_logprobs_of_completions_are_a_number(value):
    with pytest.raises(ApiError) as caught:
        complete(logprobs=value)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("chat_template", "{{ messages }}"),
        ("echo", True),
        ("suffix", "x"),
        ("guided_decoding_backend", "outlines"),
        ("modalities", ["text", "audio"]),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_not_ignored(field, value):
    with pytest.raises(ApiError) as caught:
        chat(**{field: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)


def search(kind: type[ChatBody] | type[CompletionBody] = CompletionBody, **fields: Any) -> tuple[Any, SamplingParams]:
    asked = {"messages": MESSAGES} if kind is ChatBody else {"prompt": "hi"}
    body, _ = read_body(kind, asked | {"use_beam_search": True} | fields, False)
    params = body.sampling_params(SamplingParams(temperature=0.6, top_p=0.9, top_k=20))
    return body.beam_params(), params


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_a_beam_search_is_n_or_best_of_wide_and_ignores_the_models_sampling_defaults(kind):
    beams, params = search(kind, n=3, length_penalty=0.5, early_stopping="never")
    assert beams == BeamParams(width=3, length_penalty=0.5, early_stopping="never")
    assert params == SamplingParams(n=3, max_tokens=params.max_tokens, temperature=0.0)
    beams, params = search(kind, n=2, best_of=5, temperature=0, top_p=1, top_k=0, length_penalty=2)
    assert (beams, params.n) == (BeamParams(width=5, length_penalty=2.0), 2)
    assert search(kind)[0] == BeamParams(width=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", value) for value in (0, 65)],
        *[("best_of", value) for value in (0, 65, True, "2")],
        *[("length_penalty", value) for value in (5.1, "1", float("nan"), True)],
        *[("early_stopping", value) for value in ("always", 1)],
        *[("temperature", 0.7), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("seed", 1), ("logit_bias", {"1": 1})],
        *[("presence_penalty", 1), ("frequency_penalty", 1), ("repetition_penalty", 1.1), ("stream", True)],
        *[("bad_words", ["x"]), ("allowed_token_ids", [1]), ("prompt_logprobs", 1)],
        *[("use_beam_search", value) for value in (1, "true")],
    ],
)
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_what_makes_no_sense_in_a_beam_search_is_refused_by_name(kind, field, value):
    with pytest.raises(ApiError) as caught:
        search(kind, **{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert caught.value.message.startswith(field)


def test_best_of_is_at_least_n():
    with pytest.raises(ApiError, match="best_of = 2: must be at least n, which is 3"):
        search(n=3, best_of=2)


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 2.0), ("early_stopping", True)])
def test_fields_of_a_beam_search_are_refused_without_one(field, value):
    with pytest.raises(ApiError, match="use_beam_search = true") as caught:
        complete(**{field: value})
    assert caught.value.param == field
    complete(use_beam_search=False, length_penalty=1.0, early_stopping=False, best_of=1)


def test_what_asks_for_nothing_changes_nothing():
    assert (
        chat(stop=["x"])
        != chat()
        == chat(
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            echo=False,
            suffix=None,
            best_of=1,
            modalities=["text"],
            parallel_tool_calls=True,
            metadata={"a": "b"},
            service_tier="auto",
            store=True,
            user="somebody",
            n=None,
            stop=None,
        )
    )


def test_unknown_fields_are_listed_or_refused():
    raw = {"messages": MESSAGES, "n_discard": 1, "kv_transfer_params": {"do": "it"}, "user": "u", "metadata": {}}
    body, ignored = read_body(ChatBody, raw, False)
    assert ignored == ["n_discard", "kv_transfer_params"]
    assert not hasattr(body, "n_discard")
    with pytest.raises(ApiError) as caught:
        read_body(ChatBody, raw, True)
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "n_discard")


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        ([], "empty_prompt", "messages"),
        (None, "invalid_type", "messages"),
        (["x"], "invalid_type", "messages[0]"),
        ([{"role": "user"}], "missing_required_parameter", "messages[0].content"),
        ([{"role": "user", "content": None}], "invalid_type", "messages[0].content"),
        ([*MESSAGES, {"role": "root", "content": "x"}], "invalid_value", "messages[1].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "unsupported_content_type", "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_type", "messages[0].content"),
    ],
)
def test_wrong_messages_are_named_by_their_place(messages, code, param):
    with pytest.raises(ApiError) as caught:
        chat(messages=messages)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_text_parts_lose_what_is_not_text():
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "x"}}, {"type": "text", "text": "b"}]
    body, _ = read_body(ChatBody, {"messages": [{"role": "user", "content": parts}]}, False)
    (prompt,) = body.prompts()
    assert prompt.chat.messages[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "x"},
        {"tokenize": False},
        {"tools": []},
        {"enable_thinking": {"a": 1}},
        {"x" * 100: 1},
        {"a b": 1},
    ],
)
def test_only_scalars_under_free_names_reach_the_template(kwargs):
    with pytest.raises(ApiError) as caught:
        chat(chat_template_kwargs=kwargs)
    assert caught.value.param == "chat_template_kwargs"
    chat(chat_template_kwargs={"enable_thinking": False, "tools_in_user_message": True})


@pytest.mark.parametrize(
    ("prompt", "texts", "token_ids"),
    [
        ("a", ["a"], None),
        (["a", "b"], ["a", "b"], None),
        ([1, 2], None, [[1, 2]]),
        ([[1, 2], [3]], None, [[1, 2], [3]]),
    ],
)
def test_prompts_come_in_four_forms(prompt, texts, token_ids):
    body, _ = read_body(CompletionBody, {"prompt": prompt}, False)
    prompts = body.prompts()
    if texts is not None:
        assert [item.text for item in prompts] == texts
    else:
        assert [item.token_ids.tolist() for item in prompts] == token_ids
        assert all(item.token_ids.dtype == np.int32 for item in prompts)


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [1, "a"], ["a", 1], ["a", [1]], [1.0], [True], [1, True], [-1], [2**31], [2**70], 5, None,
     {"a": 1}, [[1, [2]]], [[[1]]], ["a"] * 257, [[1]] * 257, [None], [1, None]],
)  # fmt: skip
def test_any_other_prompt_is_refused(prompt):
    with pytest.raises(ApiError) as caught:
        complete(prompt=prompt)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_messages_of_errors_are_short_whatever_the_client_sent():
    with pytest.raises(ApiError) as caught:
        chat(chat_template_kwargs={"x" * 100_000: 1})
    assert len(caught.value.message) <= 512
    with pytest.raises(ApiError) as caught:
        read_body(ChatBody, {"messages": MESSAGES, "y" * 100_000: 1}, True)
    assert len(caught.value.message) <= 512 and len(caught.value.param) <= 128


def test_add_special_tokens_reaches_every_text_prompt_of_a_body():
    for given, right in ((None, True), (True, True), (False, False)):
        asked = {"add_special_tokens": given}
        completion, _ = read_body(CompletionBody, {"prompt": ["a", "b"]} | asked, False)
        embedding, _ = read_body(EmbeddingBody, {"input": ["a", "b"]} | asked, False)
        prompts = (*completion.prompts(), *embedding.request("", frozenset()).prompts)
        assert [prompt.add_special_tokens for prompt in prompts] == [right] * 4
