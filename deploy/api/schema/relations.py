"""OpenAPI schemas for combinations of fields of one body.

As in `hints.py`, nothing is checked here: `deploy/api/openai/generation_body.py` checks the same rules, by name. A
schema cannot express rules that compare two numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....stages.beam_search.algorithm import MAX_WIDTH, NO_SAMPLING
from .hints import Schema, has, off_with, only_with

_SEARCHES = has("use_beam_search", {"const": True})

# -- streams: one schema for all rules, as body generators multiply the branches of all relations

FIELDS_OF_STREAMS: Schema = {
    "if": has("stream", {"const": True}),
    "else": {"properties": {"stream_options": {"type": "null"}, "return_progress": {"enum": [False, None]}}},
}
STREAMS_ONLY = FIELDS_OF_STREAMS | {"then": {"properties": {"prompt_logprobs": {"type": "null"}}}}

# -- beam searches


def _with_search(off: Mapping[str, Any]) -> Schema:
    in_bodies = {name: value for name, value in NO_SAMPLING.items() if name != "bad_words_token_ids"}
    schema = off_with("use_beam_search", {"const": True}, {**off, **in_bodies})
    schema["then"]["properties"] |= dict.fromkeys(("n", "best_of"), {"maximum": MAX_WIDTH})
    return schema


WITH_SEARCH = _with_search({"stream": False})
WITHOUT_SEARCH: Schema = {
    "if": _SEARCHES,
    "else": off_with("use_beam_search", {}, {"length_penalty": 1.0, "early_stopping": False})["then"],
}

# -- chat

TOP_LOGPROBS = only_with("top_logprobs", {"type": "integer"}, {"logprobs": True})

# -- completions

NO_ECHO_OF_A_SEARCH = off_with("use_beam_search", {"const": True}, {"echo": False})
EMPTY_ANSWERS: Schema = {  # max_tokens = 0 only if the prompt is returned
    "if": {"anyOf": [has("echo", {"const": True}), has("prompt_logprobs", {"type": "integer"})]},
    "else": {"properties": {"max_tokens": {"minimum": 1}}},
}
ONE_STREAMED_ECHO: Schema = {
    "if": {"allOf": [has("echo", {"const": True}), has("stream", {"const": True})]}
    | has("logprobs", {"type": "integer"}),
    "then": {"properties": {"n": {"maximum": 1}}},
}

# -- /generate: `stream` stands outside sampling_params, so no relation can connect it with a sampling field

SAMPLING_ALONE = (_with_search({"echo": False}), WITHOUT_SEARCH, EMPTY_ANSWERS)
