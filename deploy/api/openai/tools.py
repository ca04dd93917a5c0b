"""Tools as requests bring them: what they may look like, which of them may be called, and what the answer must then be.

Knows the fields and JSON schema's outer form. Refuses to know how a model writes a call: that is its parser's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ...errors import ApiError, shorten

MAX_TOOLS = 128
MAX_PATTERN_CHARS = 1024
MAX_ARGUMENTS_CHARS = 1 << 20
NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})

# where schemas are in a schema; what else is in it is data
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
ONE_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")

# what ECMA's regular expressions have and Python's have not
_ECMA_ONLY = ("bad escape", "unknown extension")


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema of an object, with types and patterns that there are."""
    if value.get("type", "object") != "object":
        raise PydanticCustomError("invalid_value", "type must be object, as arguments are one")
    for schema in _schemas(value):
        _check_type(schema.get("type"))
        _check_pattern(schema.get("pattern"))
        for pattern in _members(schema.get("patternProperties")):
            _check_pattern(pattern)
    return value


def _check_type(kind: Any) -> None:
    for name in kind if isinstance(kind, list) else [] if kind is None else [kind]:
        if not isinstance(name, str) or name not in TYPES:
            shown, known = shorten(repr(name), 64), ", ".join(sorted(TYPES))
            raise PydanticCustomError(
                "invalid_value", "type {shown} is none of {known}", {"shown": shown, "known": known}
            )


def _check_pattern(pattern: Any) -> None:
    if pattern is None:
        return
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise PydanticCustomError(
            "invalid_value", "a pattern must be text of at most {most} characters", {"most": MAX_PATTERN_CHARS}
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        if not str(error).startswith(_ECMA_ONLY):
            shown = {"pattern": shorten(repr(pattern), 64), "error": shorten(str(error), 128)}
            raise PydanticCustomError("invalid_value", "pattern {pattern}: {error}", shown) from None


def _members(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it. A body's depth is bounded, so this is."""
    if not isinstance(schema, dict):
        return
    yield schema
    for inner in _inner(schema):
        yield from _schemas(inner)


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in SCHEMAS_BY_NAME:
        yield from _members(schema.get(key)).values()
    for key in LISTS_OF_SCHEMAS:
        listed = schema.get(key)
        yield from listed if isinstance(listed, list) else ()
    for key in ONE_SCHEMA:
        inner = schema.get(key)
        yield from inner if isinstance(inner, list) else (inner,)


# -- fields


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class Function(Part):
    """What may be called, and with what."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_schema)] | None = None


class Tool(Part):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates know tools."""
        return self.model_dump(exclude_none=True)


class CalledFunction(Part):
    """The call in a turn that was."""

    name: Annotated[str, Field(pattern=NAME)]
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS_CHARS)] = "{}"


class CalledTool(Part):
    """One entry of an assistant's `tool_calls`."""

    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    """`tool_choice` that names the one to call."""

    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: Any) -> Any:
    """One of the words, or the function that is named."""
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) and value.get("type") == "function" else None
    if not isinstance(name, str):
        raise PydanticCustomError(
            "invalid_value",
            'must be none, auto, required or {"type": "function", "function": {"name": ...}}',
        )
    return NamedTool(type="function", function=NamedFunction(name=name))


def _not_too_many(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise PydanticCustomError(
            "invalid_value", "tools[{most}] is one too many: at most {most} are taken", {"most": MAX_TOOLS}
        )
    return value


Tools = Annotated[list[Tool], BeforeValidator(_not_too_many), Field(json_schema_extra={"maxItems": MAX_TOOLS})]
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, BeforeValidator(_tool_choice)]


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """What no single tool can say. `ApiError` names the tool or the choice."""
    seen: set[str] = set()
    for i, tool in enumerate(tools or ()):
        if tool.function.name in seen:
            message = f"tools[{i}].function.name = {tool.function.name!r}: another tool has this name"
            raise ApiError("invalid_value", message, param=f"tools[{i}].function.name")
        seen.add(tool.function.name)
    if isinstance(choice, NamedTool) and choice.function.name not in seen:
        message = f"tool_choice names {shorten(repr(choice.function.name), 64)}, and tools has no such function"
        raise ApiError("invalid_value", message, param="tool_choice")
    if choice == "required" and not seen:
        raise ApiError("invalid_value", "tool_choice = 'required': only with tools", param="tool_choice")


# -- what an answer must be


def forced_schema(tools: Sequence[Tool], choice: ToolChoice | None, allows_parallel: bool) -> dict[str, Any] | None:
    """The JSON schema of an answer that has to be calls: of the named one's arguments, or of a list of calls to any.
    None if nothing has to be called."""
    if isinstance(choice, NamedTool):
        return next(_parameters(tool) for tool in tools if tool.function.name == choice.function.name)
    if choice != "required":
        return None
    calls = [_call_schema(index, tool) for index, tool in enumerate(tools)]
    listed: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
    }
    if not allows_parallel:
        listed["maxItems"] = 1
    return listed | {"$defs": {str(i): _moved(_parameters(tool), f"#/$defs/{i}") for i, tool in enumerate(tools)}}


def _parameters(tool: Tool) -> dict[str, Any]:
    if tool.function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | tool.function.parameters


def _call_schema(index: int, tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{index}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """The schema as it must be written at `to`, a place in a larger one: what it refers to in itself has moved too."""
    if not isinstance(schema, dict):
        return schema
    moved = dict(schema)
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    for key in SCHEMAS_BY_NAME:
        if isinstance(moved.get(key), dict):
            moved[key] = {name: _moved(inner, to) for name, inner in moved[key].items()}
    for key in (*LISTS_OF_SCHEMAS, *ONE_SCHEMA):
        if isinstance(moved.get(key), list):
            moved[key] = [_moved(inner, to) for inner in moved[key]]
        elif isinstance(moved.get(key), dict):
            moved[key] = _moved(moved[key], to)
    return moved
