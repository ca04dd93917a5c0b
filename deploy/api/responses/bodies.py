"""The body of `POST /v1/responses`, and its conversion to a chat body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from ....stages.params import MAX_LOGPROBS
from ...errors import ApiError, shorten, wrong_field
from ..adapter.chat_adapter import EXTENSIONS, AdaptedBody, Chat, renamed
from ..openai.generation_body import ModelName
from ..schema import fields as schema_fields
from ..schema.hints import has, needs, nullable
from ..schema.metadata import MAX_KEY_CHARS, MAX_PAIRS, MAX_VALUE_CHARS
from ..schema.relations import Relation
from ..schema.unsupported import GENERATION, NOTHING, Harmless

LOGPROBS = "message.output_text.logprobs"

# values for tools that only OpenAI hosts are accepted without effect
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
EFFORTS = {"max": "xhigh"}  # this API's value -> chat's, where they differ
NAMES = {  # chat's field -> this API's, for error texts
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "structured_outputs": "text.format",
    "structured_outputs.json": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def _metadata(pairs: dict[str, str]) -> dict[str, str]:
    for key, value in pairs.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise PydanticCustomError(
                "invalid_value",
                f"keys must have at most {MAX_KEY_CHARS} characters and values {MAX_VALUE_CHARS}, unlike {{key}}",
                {"key": repr(shorten(key, MAX_KEY_CHARS))},
            )
    return pairs


METADATA = nullable(
    {
        "type": "object",
        "maxProperties": MAX_PAIRS,
        "propertyNames": {"maxLength": MAX_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
    }
)


class TextFormat(BaseModel):
    """`text.format`: the format of the answer."""

    model_config = ConfigDict(
        strict=True, extra="ignore", json_schema_extra=needs("type", "json_schema", "name", "schema")
    )

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(BaseModel):
    """`text`: options for the answer."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a wish, without effect


class ReasoningConfig(BaseModel):
    """`reasoning`: options for the reasoning. It is returned as it is, without a summary."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # without effect


def _check_store(body: ResponsesBody) -> None:
    if body.background and not body.is_stored:
        problem = "requires store = true, as the response could not be retrieved otherwise"
        raise wrong_field("background", problem)


STORED_IN_BACKGROUND = Relation(
    {"if": has("background", {"const": True}), "then": {"properties": {"store": {"enum": [True, None]}}}},
    _check_store,
)


class ResponsesBody(AdaptedBody):
    """`POST /v1/responses`."""

    PASSED: ClassVar[tuple[str, ...]] = (*EXTENSIONS, "top_k", "stop")
    UNSUPPORTED: ClassVar[Harmless] = dict.fromkeys(
        ("prompt", "conversation", "context_management", "moderation", "image"), NOTHING
    )
    FOREIGN: ClassVar[Harmless] = GENERATION
    INSTEAD: ClassVar[Mapping[str, str]] = NAMES
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        "service_tier",
        "stream_options",
        "max_tool_calls",
        "prompt_cache_retention",
        "prompt_cache_options",
        "access_programs",
    )

    RELATIONS: ClassVar[tuple[Relation, ...]] = (STORED_IN_BACKGROUND,)

    input: Annotated[Any, WithJsonSchema(schema_fields.RESPONSE_INPUT)]
    model: ModelName = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Includable] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[dict[str, Any]] | None, WithJsonSchema(schema_fields.RESPONSE_TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(schema_fields.RESPONSE_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[
        Annotated[dict[str, str], Field(max_length=MAX_PAIRS), AfterValidator(_metadata)] | None,
        WithJsonSchema(METADATA),
    ] = None
    user: Annotated[str | None, Field(max_length=512)] = None
    safety_identifier: Annotated[str | None, Field(max_length=512)] = None
    prompt_cache_key: Annotated[str | None, Field(max_length=512)] = None
    previous_response_id: Annotated[str | None, Field(max_length=128)] = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept for later retrieval."""
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def check(self) -> None:
        super().check()
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            message = f"max_output_tokens = {self.max_output_tokens}: must be at least 1"
            raise ApiError("invalid_value", message, param="max_output_tokens")
        wanted = self.text.format if self.text is not None else None
        if wanted is not None and wanted.type == "json_schema" and (wanted.schema_ is None or wanted.name is None):
            name = "schema" if wanted.schema_ is None else "name"
            message = f"text.format.{name}: required with type = json_schema"
            raise ApiError("missing_required_parameter", message, param=f"text.format.{name}")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Chat:
        """The chat body of this request: the instructions, then `messages`."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        effort = self.reasoning.effort if self.reasoning is not None else None
        return {
            "messages": [*system, *messages],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": True if self.has_logprobs else None,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
            "response_format": self._response_format(),
            "tools": [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
            "reasoning_effort": EFFORTS.get(effort or "", effort),
            "user": self.user,
            "metadata": self.metadata,
        }

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        schema = wanted.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}


def name_of(sources: Sequence[str], num_before: int) -> Any:
    """A function from chat's name of a field to this API's.

    Message i + `num_before` came from `sources[i]`, the messages before from `instructions`.
    """
    names = NAMES | {f"messages[{i}]": "instructions" for i in range(num_before)}
    names |= {f"messages[{i}]": source for i, source in enumerate(sources, num_before)}

    def name(param: str) -> str:
        return renamed(param.replace(".function.", "."), names)

    return name


def _chat_tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = (
            f"{path}.type = {shorten(repr(tool.get('type')), 64)}: must be function; other tools are not supported"
        )
        raise ApiError("unsupported_parameter", message, param=f"{path}.type")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        message = f"tool_choice.type = {shorten(repr(choice.get('type')), 64)}: must be function"
        raise ApiError("unsupported_parameter", message, param="tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}
