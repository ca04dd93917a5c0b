"""Tools in a request: their fields, the choice among them, the schema of a forced call.

How a model writes a call depends on its parser; see `api/parsers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ....model.schema.schema_keywords import map_schemas
from ...errors import shorten, wrong_field
from ..schema.fields import MAX_TOOLS

MAX_PATTERN_CHARS = 1024
MAX_ARGUMENTS_CHARS = 1 << 20
MAX_CALLED_CHARS = 1024  # of the name in an earlier call
NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})

# keywords by which a schema says what an object may hold
DESCRIBING = frozenset(
    {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required", "minProperties"}
    | {"$ref", "anyOf", "allOf", "oneOf", "const", "enum"}
)

# errors of Python's `re` for syntax that is valid in ECMA regular expressions
_ECMA_ONLY = ("bad escape", "unknown extension")


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    """Checks that a value is the JSON schema of an object with known types and patterns."""
    if value.get("type", "object") != "object":
        raise PydanticCustomError("invalid_value", "type must be object, as the arguments are an object")
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
                "invalid_value", "type = {shown} must be one of {known}", {"shown": shown, "known": known}
            )


def _check_pattern(pattern: Any) -> None:
    if pattern is None:
        return
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise PydanticCustomError(
            "invalid_value", "pattern must be a text of at most {most} characters", {"most": MAX_PATTERN_CHARS}
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        if not str(error).startswith(_ECMA_ONLY):
            shown = {"pattern": shorten(repr(pattern), 64), "error": shorten(str(error), 128)}
            raise PydanticCustomError(
                "invalid_value", "pattern = {pattern} must be a regular expression: {error}", shown
            ) from None


def _members(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it. The recursion is bounded, as the depth of a body is."""
    if not isinstance(schema, dict):
        return
    found = [schema]
    map_schemas(schema, lambda inner: found.extend(_schemas(inner)))
    yield from found


# -- fields


class Part(BaseModel):
    """Base class of the models here: strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Function(Part):
    """A function that may be called, and its parameters."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_schema)] | None = None


class Tool(Part):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as plain data for the chat template."""
        return self.model_dump(exclude_none=True)


class AssistantFunction(Part):
    """The function of a call in an earlier turn. A model, or a parser of a user, may have chosen any name."""

    name: Annotated[str, Field(max_length=MAX_CALLED_CHARS)]
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS_CHARS)] = "{}"


class CalledTool(Part):
    """One entry of an assistant's `tool_calls`."""

    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: AssistantFunction


class NamedFunction(Part):
    """The function that a `tool_choice` names."""

    name: str


class NamedTool(Part):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: Any) -> Any:
    """Validates `tool_choice`: none, auto, required or a named function."""
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


def not_too_many(value: Any) -> Any:
    """`value`, if it is no list of more than `MAX_TOOLS`."""
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise PydanticCustomError(
            "invalid_value", "must have at most {most} entries, so tools[{most}] is too many", {"most": MAX_TOOLS}
        )
    return value


Tools = Annotated[list[Tool], BeforeValidator(not_too_many), Field(json_schema_extra={"maxItems": MAX_TOOLS})]
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, BeforeValidator(_tool_choice)]


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Checks tools against each other and against `choice`. `ApiError` names the wrong one."""
    seen: set[str] = set()
    for i, tool in enumerate(tools or ()):
        if tool.function.name in seen:
            problem = "must be unique, and another tool has this name"
            raise wrong_field(f"tools[{i}].function.name", problem, repr(tool.function.name))
        seen.add(tool.function.name)
    if isinstance(choice, NamedTool) and choice.function.name not in seen:
        raise wrong_field("tool_choice", "must name a function in tools", shorten(repr(choice.function.name), 64))
    if choice == "required" and not seen:
        raise wrong_field("tool_choice", "requires tools; send at least one", "'required'")


# -- schemas of forced calls


def forced_schema(tools: Sequence[Tool], choice: ToolChoice | None, allows_parallel: bool) -> dict[str, Any] | None:
    """The JSON schema of an answer that must consist of calls; None if no call is forced.

    With a named tool it is the schema of its arguments, otherwise of a list of calls.
    """
    if isinstance(choice, NamedTool):
        named = next(tool for tool in tools if tool.function.name == choice.function.name)
        arguments: dict[str, Any] = required_first(_parameters(named))
        return arguments
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
    parameters = (required_first(_parameters(tool)) for tool in tools)
    return listed | {"$defs": {str(i): _moved(schema, f"#/$defs/{i}") for i, schema in enumerate(parameters)}}


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. Without any keyword that says what they may be, there are none."""
    parameters = tool.function.parameters or {}
    if not any(key in parameters for key in DESCRIBING):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | parameters


def _call_schema(index: int, tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{index}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def required_first(schema: Any) -> Any:
    """The schema with the required properties of each object before the others.

    Properties are written in this order, so an answer that breaks off has what is required.
    """
    if not isinstance(schema, dict):
        return schema
    ordered = map_schemas(schema, required_first)
    required, properties = schema.get("required"), _members(ordered.get("properties"))
    if isinstance(required, list) and properties:
        ordered["properties"] = dict(sorted(properties.items(), key=lambda item: item[0] not in required))
    return ordered


def _moved(schema: Any, to: str) -> Any:
    """Rewrites the local `$ref`s of a schema that is placed at path `to` in a larger schema."""
    if not isinstance(schema, dict):
        return schema
    moved = map_schemas(schema, lambda inner: _moved(inner, to))
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved
