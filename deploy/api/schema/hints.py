"""Builders of OpenAPI schemas: single fields, combinations, and limits set by the model.

A limit that is unknown before a model is loaded stands in the schema as a name under `x-limits`. `fill_in_limits`
replaces it by the number. Nothing is checked here: validation happens where the bodies are read, with the same
constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....kernels.layout.sampling_fields import FIELDS
from ....stages.params import COUNTS, MAX_BIAS, MAX_LOGIT_BIAS, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_STOPS, NUMBERS
from ....stages.request_limits import MAX_CHARS_PER_TOKEN, MAX_PROMPTS

Schema = dict[str, Any]

LIMITS = "x-limits"  # schema keyword -> name of its value in `ModelLimits`


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that depend on the loaded model, its context length and its served names."""

    vocab_size: int
    max_model_len: int
    model_names: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return {
            "last_token_id": self.vocab_size - 1,
            "token_id_pattern": number_pattern(self.vocab_size - 1),
            "longest_prompt": self.max_model_len - 1,
            "most_prompt_chars": MAX_CHARS_PER_TOKEN * self.max_model_len,
            "model_names": [*self.model_names, None],
        }[name]


def fill_in_limits(schema: Any, limits: ModelLimits | None) -> Any:
    """A copy of the schema, or of a whole document, with model limits filled in.

    With `limits` None (no model is loaded) the keywords are left out.
    """
    if isinstance(schema, list):
        return [fill_in_limits(part, limits) for part in schema]
    if not isinstance(schema, dict):
        return schema
    filled_in = {key: fill_in_limits(value, limits) for key, value in schema.items() if key != LIMITS}
    if limits is not None:
        filled_in.update({key: limits[name] for key, name in schema.get(LIMITS, {}).items()})
    return filled_in


def number_pattern(most: int) -> str:
    """A regular expression that matches the integers 0 to `most`, without leading zeros."""
    digits = str(most)
    forms = ["0"] if len(digits) > 1 else []
    if len(digits) > 1:
        forms.append(f"[1-9][0-9]{{0,{len(digits) - 2}}}")
    for place, digit in enumerate(digits):
        least = 1 if place == 0 and len(digits) > 1 else 0
        if int(digit) > least:
            rest = len(digits) - place - 1
            forms.append(f"{digits[:place]}[{least}-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return f"^({'|'.join([*forms, digits])})$"


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema, most: int, least: int = 0) -> Schema:
    """An array of `least` to `most` items."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


# -- forms

NOT_EMPTY: Schema = {"type": "string", "minLength": 1, LIMITS: {"maxLength": "most_prompt_chars"}}
OF_ANY_LENGTH: Schema = {"type": "string", "minLength": 1}  # where texts are cut at the model's length
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, LIMITS: {"maximum": "last_token_id"}}
TOKEN_IDS: Schema = {"type": "array", "items": TOKEN_ID}
TOKENS_OF_A_PROMPT: Schema = TOKEN_IDS | {"minItems": 1, LIMITS: {"maxItems": "longest_prompt"}}


def prompts(most: int, text: Schema = NOT_EMPTY) -> Schema:
    """One prompt, or at most `most`, as texts or token ids."""
    return {
        "anyOf": [
            text,
            array(text, most, least=1),
            TOKENS_OF_A_PROMPT,
            array(TOKENS_OF_A_PROMPT, most, least=1),
        ]
    }


PROMPT = prompts(MAX_PROMPTS)
ONLY_TOKENS: Schema = {"anyOf": [TOKENS_OF_A_PROMPT, array(TOKENS_OF_A_PROMPT, MAX_PROMPTS, least=1)]}
MODEL: Schema = {"type": ["string", "null"], LIMITS: {"enum": "model_names"}}
STOP_STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOP: Schema = {"anyOf": [STOP_STRING, array(STOP_STRING, MAX_STOPS), {"type": "null"}]}
STOP_TOKEN_IDS: Schema = nullable(array(TOKEN_ID, MAX_STOP_TOKEN_IDS))
LOGIT_BIAS: Schema = nullable(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$", LIMITS: {"pattern": "token_id_pattern"}},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "maxProperties": MAX_LOGIT_BIAS,
    }
)
TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}


def scalars(name: str, reserved: Sequence[str], most: int, most_chars: int) -> Schema:
    """An object with scalar values under names of the pattern `name`, none of them reserved."""
    return {
        "type": "object",
        "propertyNames": {"pattern": name, "not": {"enum": list(reserved)}},
        "additionalProperties": {"type": ["string", "number", "boolean", "null"], "maxLength": most_chars},
        "maxProperties": most,
    }


def unsupported(fields: Mapping[str, Sequence[Any]]) -> Schema:
    """Properties for unsupported fields, each restricted to its values without effect."""
    return {
        name: {"enum": list(values), "description": "not supported by this server"} for name, values in fields.items()
    }


# -- ranges


def add_ranges(schema: Schema, least_max_tokens: int = 1) -> None:
    """Adds the ranges and descriptions of sampling fields to a body's schema, in place."""
    for name, (least, most) in {**COUNTS, **NUMBERS}.items():
        for form in _forms(schema["properties"].get(name, {})):
            if form.get("type") in ("integer", "number"):
                form.update({"minimum": least, "maximum": most})
    if "temperature" in schema["properties"]:  # it generates
        for field in FIELDS:
            if field.name in schema["properties"]:
                schema["properties"][field.name].setdefault("description", field.about)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        for form in _forms(schema["properties"].get(name, {})):
            if form.get("type") == "integer":
                form.update({"minimum": least_max_tokens, LIMITS: {"maximum": "longest_prompt"}})
    for form in _forms(schema["properties"].get("min_tokens", {})):
        if form.get("type") == "integer":
            form[LIMITS] = {"maximum": "longest_prompt"}
    for field in FIELDS:
        for form in _forms(schema["properties"].get(field.name, {})) if field.excludes_least else ():
            if form.get("type") == "number":
                form["exclusiveMinimum"] = form.pop("minimum")


def _forms(schema: Schema) -> list[Schema]:
    forms: list[Schema] = schema.get("anyOf", [schema])
    return forms


# -- combinations of fields


NOT_NULL: Schema = {"not": {"type": "null"}}


def has(name: str, schema: Schema) -> Schema:
    """Matches bodies in which the field is present and matches `schema`."""
    return {"properties": {name: schema}, "required": [name]}


def only_with(name: str, schema: Schema, needed: Mapping[str, Any]) -> Schema:
    """If field `name` matches `schema`, the fields in `needed` must have these values."""
    then = {"properties": {other: {"const": value} for other, value in needed.items()}, "required": [*needed]}
    return {"if": has(name, schema), "then": then}


def needs(name: str, value: Any, *others: str) -> Schema:
    """If field `name` equals `value`, the other fields must be present and not null."""
    return {"if": has(name, {"const": value}), "then": {"allOf": [has(other, NOT_NULL) for other in others]}}


def off_with(name: str, schema: Schema, off: Mapping[str, Any]) -> Schema:
    """If field `name` matches `schema`, the fields in `off` must be absent, null or equal."""
    then = {
        "properties": {other: {"enum": [None, *([] if value is None else [value])]} for other, value in off.items()}
    }
    return {"if": has(name, schema), "then": then}
