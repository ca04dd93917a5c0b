"""Fields that would change the answer and are not served, on every route that takes a body."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.deploy.api.adapter.chat_adapter import read_adapted
from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.completions.body import CompletionBody
from millrace.deploy.api.embeddings.bodies import EmbeddingBody, RerankBody, ScoreBody
from millrace.deploy.api.messages.bodies import CountTokensBody, MessagesBody
from millrace.deploy.api.responses.bodies import ResponsesBody
from millrace.deploy.api.schema.body import Body
from millrace.deploy.api.schema.validation import read_body
from millrace.deploy.api.token_ids.body import GenerateBody, flatten
from millrace.deploy.api.tokenize.bodies import TokenizeBody
from millrace.deploy.errors import ApiError

MESSAGES = [{"role": "user", "content": "hi"}]
GENERATING: dict[type[Body], dict[str, Any]] = {
    ChatBody: {"messages": MESSAGES},
    CompletionBody: {"prompt": "hi"},
    GenerateBody: {"token_ids": [1]},
    ResponsesBody: {"input": "hi"},
    MessagesBody: {"messages": MESSAGES, "max_tokens": 3},
}
POOLING: dict[type[Body], dict[str, Any]] = {
    EmbeddingBody: {"input": "hi"},
    ScoreBody: {"text_1": "hi", "text_2": "ho"},
    RerankBody: {"query": "hi", "documents": ["ho"]},
}


def read(kind: type[Body], fields: dict[str, Any]) -> list[str]:
    """Reads a body with these fields besides what it needs; returns the names of ignored ones."""
    raw = {**GENERATING, **POOLING, CountTokensBody: {"messages": MESSAGES}, TokenizeBody: {"prompt": "hi"}}[kind]
    if kind is GenerateBody:
        return read_body(kind, flatten({**raw, "sampling_params": fields}), False)[1]
    if issubclass(kind, ResponsesBody | CountTokensBody):
        return read_adapted(kind, raw | fields, False)[2]
    return read_body(kind, raw | fields, False)[1]


@pytest.mark.parametrize("kind", GENERATING)
@pytest.mark.parametrize(
    ("field", "value", "off"),
    [
        ("prompt_embeds", "QUJD", None),
        ("typical", 0.9, 1.0),
        ("dry_multiplier", 0.8, 0),
        ("xtc_probability", 0.5, 0.0),
        ("mirostat", 2, 0),
        ("mirostat_mode", 1, 0),
        ("top_a", 0.2, 0),
        ("tfs_z", 0.9, 1),
        ("smoothing_factor", 0.2, 0),
        ("no_repeat_ngram_size", 3, 0),
        ("repeat_penalty", 1.2, 1),
        ("max_new_tokens", 5, None),
        ("grammar", 'root ::= "a"', ""),
        ("lora_path", "x", None),
        ("do_sample", False, True),
        ("logits_processor", ["x"], []),
    ],
)
def test_a_sampling_field_that_is_not_served_is_refused_by_name(kind, field, value, off):
    with pytest.raises(ApiError) as caught:
        read(kind, {field: value})
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", field)
    assert error.message.startswith(field + ": ")
    assert read(kind, {field: off}) == read(kind, {field: None}) == []


@pytest.mark.parametrize(
    ("kind", "field", "value", "right"),
    [
        (ChatBody, "prompt", "hi", "messages"),
        (ChatBody, "stop_sequences", ["x"], "stop"),
        (ChatBody, "thinking", {"type": "enabled"}, "chat_template_kwargs"),
        (ChatBody, "add_special_tokens", True, "leave it out"),
        (CompletionBody, "messages", MESSAGES, "/v1/chat/completions"),
        (CompletionBody, "top_logprobs", 3, "logprobs"),
        (ResponsesBody, "max_tokens", 5, "max_output_tokens"),
        (ResponsesBody, "response_format", {"type": "json_object"}, "text.format"),
        (ResponsesBody, "n", 2, "leave it out"),
        (ResponsesBody, "max_new_tokens", 5, "send max_output_tokens"),
        (ResponsesBody, "json_schema", {"type": "object"}, "send text.format"),
        (ResponsesBody, "truncate", 5, "leave it out"),
        (MessagesBody, "stop_strings", ["x"], "send stop_sequences"),
        (MessagesBody, "stop", ["x"], "stop_sequences"),
        (MessagesBody, "reasoning_effort", "low", "output_config.effort"),
        (MessagesBody, "logprobs", True, "leave it out"),
        (TokenizeBody, "chat_template", "{{ messages }}", "leave it out"),
    ],
)
def test_a_field_of_another_route_is_refused_with_the_right_name(kind, field, value, right):
    with pytest.raises(ApiError, match=right) as caught:
        read(kind, {field: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize("kind", POOLING)
@pytest.mark.parametrize(("field", "value"), [("input_type", "query"), ("messages", MESSAGES), ("task", "x")])
def test_a_field_that_would_change_a_vector_or_score_is_refused(kind, field, value):
    with pytest.raises(ApiError) as caught:
        read(kind, {field: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)
    assert read(kind, {field: None}) == []


def test_an_instruction_is_for_scores_and_reranking_alone():
    assert read(ScoreBody, {"instruction": "x"}) == read(RerankBody, {"instruction": "x"}) == []
    with pytest.raises(ApiError, match="instruction"):
        read(EmbeddingBody, {"instruction": "x"})


def test_a_prompt_by_name_is_for_embeddings_alone():
    assert read(EmbeddingBody, {"prompt_name": "query"}) == []
    for kind in (ScoreBody, RerankBody):
        with pytest.raises(ApiError, match="prompt_name"):
            read(kind, {"prompt_name": "query"})


@pytest.mark.parametrize("kind", GENERATING)
def test_options_of_methods_that_are_off_and_unknown_fields_are_only_listed(kind):
    options = {"mirostat_tau": 5.0, "dry_base": 1.75, "xtc_threshold": 0.1, "cache_prompt": True, "something": 1}
    assert read(kind, options) == list(options)


def test_counting_tokens_takes_sampling_fields_as_they_change_no_count():
    assert read(CountTokensBody, {"typical_p": 0.9, "max_tokens": 3}) == ["typical_p", "max_tokens"]
