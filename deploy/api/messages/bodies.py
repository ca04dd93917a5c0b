"""The bodies of `POST /v1/messages` and `count_tokens`, and their conversion to a chat body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from ....stages.params import MAX_STOPS
from ...errors import ApiError
from ..adapter.chat_adapter import EXTENSIONS, AdaptedBody, Chat, renamed
from ..openai.generation_body import ModelName
from ..schema import fields as schema_fields
from ..schema.hints import STOP_STRING, array, needs, nullable
from ..schema.unsupported import GENERATION, NOTHING, Harmless
from .turns import ChatMessages, chat_tool, is_prefill, read_messages, text_content

EFFORTS = {"max": "xhigh"}  # Anthropic's value -> chat's, where they differ
NAMES = {  # chat's field -> this API's, for error texts
    "max_completion_tokens": "max_tokens",
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "structured_outputs": "output_config.format",
    "structured_outputs.json": "output_config.format",
    "chat_template_kwargs": "thinking",
    "thinking_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "user": "metadata.user_id",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
# values of context_management that leave the context as it is
NO_EDITS: tuple[dict[str, Any], ...] = (
    {"edits": []},
    {"edits": None},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)


class Metadata(BaseModel):
    """`metadata` of a request."""

    model_config = ConfigDict(strict=True, extra="ignore")

    user_id: str | None = None


class Thinking(BaseModel):
    """`thinking`: whether to reason before the answer, and the budget in tokens."""

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=needs("type", "enabled", "budget_tokens"))

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class ToolChoice(BaseModel):
    """`tool_choice`: which tools may or must be called."""

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=needs("type", "tool", "name"))

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(BaseModel):
    """`output_config.format`: the JSON schema of the answer."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """`output_config`: the format of the answer and the reasoning effort."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensBody(AdaptedBody):
    """`POST /v1/messages/count_tokens`."""

    PASSED: ClassVar[tuple[str, ...]] = ()  # no answer is generated, so sampling fields have no effect
    UNSUPPORTED: ClassVar[Harmless] = {
        **dict.fromkeys(("container", "mcp_servers"), NOTHING),
        "context_management": (*NOTHING, *NO_EDITS),
    }
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        "service_tier",
        "cache_control",
        "inference_geo",
        "speed",
        "diagnostics",
    )

    model: ModelName = None
    messages: Annotated[Any, WithJsonSchema(schema_fields.ANTHROPIC_MESSAGES)]
    system: Annotated[Any, WithJsonSchema(schema_fields.ANTHROPIC_SYSTEM)] = None
    tools: Annotated[list[dict[str, Any]] | None, WithJsonSchema(schema_fields.ANTHROPIC_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def check(self) -> None:
        super().check()
        if self.thinking is not None and self.thinking.type == "enabled" and self.thinking.budget_tokens is None:
            message = "thinking.budget_tokens: required with type = enabled"
            raise ApiError("missing_required_parameter", message, param="thinking.budget_tokens")
        if self.tool_choice is not None and self.tool_choice.type == "tool" and self.tool_choice.name is None:
            message = "tool_choice.name: required with type = tool"
            raise ApiError("missing_required_parameter", message, param="tool_choice.name")

    def chat(self) -> tuple[Chat, list[str]]:
        """The chat body of this request, and for each of its messages the source field."""
        turns = ChatMessages()
        if self.system is not None:
            turns.add({"role": "system", "content": text_content(self.system, "system")}, "system")
        read_messages(self.messages, turns)
        choice = self.tool_choice
        chat: Chat = {
            "messages": turns.messages,
            "tools": [chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())] or None,
            "tool_choice": None if choice is None else _chat_tool_choice(choice),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "response_format": self._response_format(),
            **self._thoughts(),
        }
        if turns.messages and is_prefill(turns.messages[-1]):
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
        return chat, turns.sources

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.output_config.format if self.output_config is not None else None
        if wanted is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema_, "strict": True}}

    def _thoughts(self) -> Chat:
        effort = self.output_config.effort if self.output_config is not None else None
        chat_fields: Chat = {"reasoning_effort": EFFORTS.get(effort or "", effort)}
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            chat_fields["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
            chat_fields["thinking_budget"] = self.thinking.budget_tokens
        return chat_fields


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    PASSED: ClassVar[tuple[str, ...]] = EXTENSIONS
    FOREIGN: ClassVar[Harmless] = GENERATION
    INSTEAD: ClassVar[Mapping[str, str]] = NAMES

    max_tokens: int
    stop_sequences: Annotated[
        list[str] | None, Field(max_length=MAX_STOPS), WithJsonSchema(nullable(array(STOP_STRING, MAX_STOPS)))
    ] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    stream: bool | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens < 1:
            message = f"max_tokens = {self.max_tokens}: must be at least 1"
            raise ApiError("invalid_value", message, param="max_tokens")
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            message = f"thinking.budget_tokens = {budget}: must be less than max_tokens, which is {self.max_tokens}"
            raise ApiError("invalid_value", message, param="thinking.budget_tokens")

    def chat(self) -> tuple[Chat, list[str]]:
        chat, sources = super().chat()
        given = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        user = self.metadata.user_id if self.metadata is not None else None
        pairs = None if user is None else {"user_id": user}
        return chat | given | {"stop": self.stop_sequences, "user": user, "metadata": pairs}, sources


def name_of(sources: list[str]) -> Callable[[str], str]:
    """A function from chat's name of a field to this API's.

    Message i came from field `sources[i]`.
    """
    names = NAMES | {f"messages[{i}]": source for i, source in enumerate(sources)}

    def name(param: str) -> str:
        return renamed(param.replace(".function.parameters", ".input_schema").replace(".function.", "."), names)

    return name


def _chat_tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
