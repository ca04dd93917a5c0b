"""OpenAPI schemas of fields whose Python type says too little.

These are output formats, tools, input items and texts to compare. As in `hints.py`, nothing is checked here.
"""

from __future__ import annotations

from typing import Any

from ....stages.params import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_CHARS, MAX_BAD_WORDS
from ....stages.pooling_params import MAX_INPUTS, MAX_PAIRS
from ....stages.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES
from .hints import CONTENT, NOT_EMPTY, OF_ANY_LENGTH, TOKEN_ID, Schema, array, nullable, prompts
from .processors import MAX_PROCESSORS

MAX_TOOLS = 1024  # of one request

# -- sampling

ALLOWED_TOKEN_IDS = nullable(array(TOKEN_ID, MAX_ALLOWED_TOKEN_IDS, least=1))
BAD_WORDS = nullable(
    array({"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS, "pattern": r"\S"}, MAX_BAD_WORDS)
)
TRUNCATE_PROMPT_TOKENS: Schema = {
    "anyOf": [
        {"const": -1, "description": "as many tokens as leave room for the answer"},
        {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
        {"type": "null"},
    ]
}
TRUNCATION_SIDE: Schema = {"enum": ["left", "right", None]}

# -- messages of a chat


def content_or_assistant(schema: Schema) -> None:
    """Makes `content` optional in the schema of an assistant's turn."""
    schema["required"].remove("content")
    schema["properties"]["content"] = nullable(CONTENT)
    schema["anyOf"] = [
        {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
        {"properties": {"role": {"const": "assistant"}}, "required": ["role"]},
    ]


# -- the form of an answer


def _text(most_bytes: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most_bytes, "description": f"at most {most_bytes} bytes"}


REGEX = _text(MAX_REGEX_BYTES)
GRAMMAR = _text(MAX_GRAMMAR_BYTES)
CHOICE: Schema = array(_text(MAX_GRAMMAR_BYTES), MAX_CHOICES, least=1)
JSON_SCHEMA: Schema = {"anyOf": [{"type": "object"}, {"const": True}, GRAMMAR], "description": "a JSON schema"}
# vLLM's older names: an empty value means no constraint
LOGITS_PROCESSORS = nullable(
    array(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
                },
            ]
        },
        MAX_PROCESSORS,
    )
)
GUIDED_JSON = nullable({"anyOf": [*JSON_SCHEMA["anyOf"], {"const": ""}]})
GUIDED_REGEX, GUIDED_GRAMMAR = nullable(REGEX | {"minLength": 0}), nullable(GRAMMAR | {"minLength": 0})
GUIDED_CHOICE = nullable(CHOICE | {"minItems": 0})
STRUCTURED_OUTPUTS: Schema = nullable(
    {
        "type": "object",
        "description": "one of json, regex, choice, grammar and json_object",
        "properties": {
            "json": nullable(JSON_SCHEMA),
            "regex": nullable(REGEX),
            "choice": nullable(CHOICE),
            "grammar": nullable(GRAMMAR),
            "json_object": {"type": ["boolean", "null"]},
            "disable_any_whitespace": {"type": ["boolean", "null"]},
        },
    }
)
_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_JSON_SCHEMA_FORMAT: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "json_schema"},
        "json_schema": {
            "type": "object",
            "properties": {"name": _NAME, "schema": {"type": "object"}, "strict": {"type": ["boolean", "null"]}},
            "required": ["name", "schema"],
        },
    },
    "required": ["type", "json_schema"],
}
RESPONSE_FORMAT: Schema = nullable(
    {
        "anyOf": [
            {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
            _JSON_SCHEMA_FORMAT,
        ]
    }
)

# -- embeddings and pairs

INPUT = prompts(MAX_INPUTS, OF_ANY_LENGTH)
_ITEM: Schema = {
    "anyOf": [
        OF_ANY_LENGTH,
        {"type": "object", "properties": {"text": OF_ANY_LENGTH}, "required": ["text"], "additionalProperties": False},
    ]
}
TEXTS: Schema = {"anyOf": [OF_ANY_LENGTH, array(_ITEM, MAX_PAIRS, least=1)]}
CUT_TEXT: Schema = {
    "anyOf": [
        {"const": -1, "description": "as many tokens as the model reads, which is the default"},
        {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
        {"type": "null"},
    ]
}


# -- items of responses, and messages of Anthropic's API


def _object(needed: Schema, **more: Any) -> Schema:
    return {"type": "object", "properties": needed | more, "required": [*needed]}


_TEXT: Schema = {"type": "string"}


def _parts(*types: str) -> Schema:
    return {"anyOf": [_TEXT, {"type": "array", "items": _object({"type": {"enum": [*types]}, "text": _TEXT})}]}


_CALLED = {"type": "string", "pattern": r"^[A-Za-z0-9_.:/-]{1,128}$"}
_CALLED_BEFORE = {"type": "string", "maxLength": 1024}  # in an earlier turn
_CALL_ID = {"type": "string", "maxLength": 256}
_ITEM_PARTS = _parts("input_text", "output_text", "text")
INPUT_ITEM: Schema = {
    "anyOf": [
        _object(
            {"role": {"enum": ["user", "assistant", "system", "developer"]}, "content": _ITEM_PARTS},
            type={"enum": ["message", None]},
        ),
        _object(
            {"type": {"const": "function_call"}, "call_id": _CALL_ID, "name": _CALLED_BEFORE, "arguments": _TEXT},
        ),
        _object({"type": {"const": "function_call_output"}, "call_id": _CALL_ID, "output": _ITEM_PARTS}),
        _object(
            {"type": {"const": "reasoning"}},
            summary=nullable(_parts("summary_text")),
            content=nullable(_parts("reasoning_text")),
        ),
    ]
}
RESPONSE_INPUT: Schema = {"anyOf": [NOT_EMPTY, array(INPUT_ITEM, 4096, least=1)]}

RESPONSE_TOOL = _object(
    {"type": {"const": "function"}, "name": _CALLED},
    description=nullable(_TEXT),
    parameters=nullable({"type": "object"}),
)
RESPONSE_TOOLS = nullable(array(RESPONSE_TOOL, MAX_TOOLS))
RESPONSE_TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        _object({"type": {"const": "function"}, "name": _CALLED}),
    ]
}

_TEXT_BLOCK = _object({"type": {"const": "text"}, "text": _TEXT})
_REFERENCE = _object({"type": {"const": "tool_reference"}, "tool_name": _TEXT})
_RESULT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT_BLOCK, _REFERENCE]}}]}
_BLOCKS = {
    "user": [
        _TEXT_BLOCK,
        _object({"type": {"const": "tool_result"}, "tool_use_id": _CALL_ID}, content=nullable(_RESULT)),
    ],
    "assistant": [
        _TEXT_BLOCK,
        _object({"type": {"const": "thinking"}, "thinking": _TEXT}),
        _object({"type": {"const": "tool_use"}, "id": _CALL_ID, "name": _CALLED_BEFORE, "input": {"type": "object"}}),
    ],
    "system": [_TEXT_BLOCK],
}
ANTHROPIC_MESSAGES: Schema = array(
    {
        "anyOf": [
            _object(
                {
                    "role": {"const": role},
                    "content": {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": blocks}}]},
                }
            )
            for role, blocks in _BLOCKS.items()
        ]
    },
    4096,
    least=1,
)
ANTHROPIC_SYSTEM = nullable({"anyOf": [_TEXT, {"type": "array", "items": _TEXT_BLOCK}]})
ANTHROPIC_TOOLS = nullable(
    array(_object({"name": _CALLED}, description=nullable(_TEXT), input_schema={"type": "object"}), MAX_TOOLS)
)

# -- messages of Ollama's API

_OLLAMA_CALL = _object({"function": _object({"name": _CALLED_BEFORE}, arguments=nullable({"type": "object"}))})
_OLLAMA_TURNS = {
    "user": {},
    "system": {},
    "tool": {"tool_name": nullable({"type": "string", "maxLength": 64}), "tool_call_id": nullable(_CALL_ID)},
    "assistant": {"thinking": nullable(_TEXT), "tool_calls": nullable(array(_OLLAMA_CALL, 4096))},
}
OLLAMA_MESSAGES: Schema = nullable(
    array(
        {
            "anyOf": [
                _object({"role": {"const": role}}, content=nullable(_TEXT), images=nullable(array(_TEXT, 0)), **more)
                for role, more in _OLLAMA_TURNS.items()
            ]
        },
        4096,
    )
)
