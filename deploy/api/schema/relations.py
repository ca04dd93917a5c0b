"""How the OpenAPI document says which fields of a body go together. As in `hints.py`, nothing is checked here:
`deploy/api/openai/bodies.py` does, by name. How numbers must fit one another a schema can not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....stages.beam_search.algorithm import MAX_WIDTH, NO_SAMPLING
from .hints import Schema, has, off_with, only_with

_SEARCHES = has("use_beam_search", {"const": True})

# -- streams; in one, as generators of bodies multiply the branches of all relations

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
EMPTY_ANSWERS: Schema = {  # only where the prompt is told
    "if": {"anyOf": [has("echo", {"const": True}), has("prompt_logprobs", {"type": "integer"})]},
    "else": {"properties": {"max_tokens": {"minimum": 1}}},
}
ONE_STREAMED_ECHO: Schema = {
    "if": {"allOf": [has("echo", {"const": True}), has("stream", {"const": True})]}
    | has("logprobs", {"type": "integer"}),
    "then": {"properties": {"n": {"maximum": 1}}},
}

# -- /generate: streams are asked for beside sampling_params, and no relation reaches from one level to the other

SAMPLING_ALONE = (_with_search({"echo": False}), WITHOUT_SEARCH, EMPTY_ANSWERS)
