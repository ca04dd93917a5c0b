"""The bodies of `/api/chat` and `/api/generate`, and their conversion to chats and completions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from ....stages.params import MAX_LOGPROBS
from ...errors import ApiError, shorten
from ..adapter.chat_adapter import AdaptedBody, Chat, renamed
from ..openai.generation_body import ModelName
from ..openai.tools import Tool, not_too_many
from ..schema import fields as schema_fields
from ..schema.hints import TOKEN_IDS, Schema, nullable
from ..schema.unsupported import GENERATION, NOTHING, Harmless
from . import options
from .options import OllamaOptions
from .turns import chat_message, wrong_type

EFFORTS = {"max": "xhigh"}  # Ollama's value -> chat's, where they differ
NAMES = options.NAMES | {  # chat's field -> this API's, for error texts
    "response_format": "format",
    "response_format.json_schema": "format",
    "structured_outputs": "format",
    "structured_outputs.json": "format",
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
    "tool_choice": "tools",
    "logprobs": "top_logprobs",
}
FORMAT: Schema = {
    "anyOf": [{"enum": ["", "json", None]}, {"type": "object"}],
    "description": '"json", or the JSON schema of the answer',
}
KEEP_ALIVE: Schema = {
    "type": ["string", "number", "null"],
    "description": "without effect: the model stays in memory while the server runs",
}


def _keep_alive(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int, float, type(None))):
        raise PydanticCustomError("invalid_type", "must be a text or a number of seconds")
    return value


def _think(value: Any) -> Any:
    if not isinstance(value, bool | None) and value not in ("low", "medium", "high", "max"):
        raise PydanticCustomError("invalid_value", "must be true, false, low, medium, high or max")
    return value


KeepAlive = Annotated[Any, AfterValidator(_keep_alive), WithJsonSchema(KEEP_ALIVE)]


class OllamaBody(AdaptedBody):
    """Base class of the bodies that generate."""

    PASSED: ClassVar[tuple[str, ...]] = ()
    UNSUPPORTED: ClassVar[Harmless] = dict.fromkeys(("images", "suffix", "template", "_debug_render_only"), NOTHING)
    FOREIGN: ClassVar[Harmless] = GENERATION
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("truncate", "shift")

    model: ModelName = None
    stream: bool | None = None  # null and absent: true
    format: Annotated[Any, WithJsonSchema(FORMAT)] = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    think: Annotated[bool | Literal["low", "medium", "high", "max"] | None, BeforeValidator(_think)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def is_stream(self) -> bool:
        return self.stream is not False

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: Ollama's clients load a model so, or unload it."""

    @property
    def longest(self) -> int | None:
        """The most tokens of the answer; None: what the context leaves."""
        return None if self.options is None else self.options.longest

    def check(self) -> None:
        super().check()
        if self.format is not None and not isinstance(self.format, dict) and self.format not in ("", "json"):
            message = f'format = {shorten(repr(self.format), 64)}: must be "json" or a JSON schema, as an object'
            raise ApiError("invalid_value", message, param="format")
        if self.is_empty and self.keep_alive in (0, "0", "0s"):
            message = "keep_alive = 0: this server keeps its one model in memory; to free that, stop the server"
            raise ApiError("unsupported_operation", message, param="keep_alive")

    def chat(self) -> Chat:
        """The chat body for this request, without a model."""
        chat: Chat = {"messages": self.messages_for_chat(), "response_format": self._response_format()}
        chat |= {} if self.options is None else self.options.chat()
        if self.logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.think is not None:
            thinks = self.think is not False
            chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
            if isinstance(self.think, str):
                chat["reasoning_effort"] = EFFORTS.get(self.think, self.think)
        return chat

    @abstractmethod
    def messages_for_chat(self) -> list[dict[str, Any]]:
        """The messages of the chat body."""

    def name_of(self, param: str) -> str:
        """This API's name of chat's field."""
        return renamed(param, NAMES)

    def _response_format(self) -> dict[str, Any] | None:
        if not self.format and not isinstance(self.format, dict):
            return None
        if self.format == "json":
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": self.format, "strict": True}}


class OllamaTool(Tool):
    """One entry of `tools`, which need not say that it is a function."""

    type: Literal["function"] = "function"


class OllamaChatBody(OllamaBody):
    """`POST /api/chat`."""

    messages: Annotated[Any, WithJsonSchema(schema_fields.OLLAMA_MESSAGES)] = None
    tools: (
        Annotated[
            list[OllamaTool],
            BeforeValidator(not_too_many),
            Field(json_schema_extra={"maxItems": schema_fields.MAX_TOOLS}),
        ]
        | None
    ) = None

    @property
    def is_empty(self) -> bool:
        return self.messages is None or self.messages == []

    def chat(self) -> Chat:
        chat = super().chat()
        chat["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools or ()] or None
        last = chat["messages"][-1]
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
        return chat

    def messages_for_chat(self) -> list[dict[str, Any]]:
        if not isinstance(self.messages, list | None):
            raise wrong_type("messages", "a list")
        messages = [chat_message(message, f"messages[{i}]") for i, message in enumerate(self.messages or ())]
        return messages or [{"role": "user", "content": ""}]


class OllamaGenerateBody(OllamaBody):
    """`POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt is not put into the chat template
    context: Annotated[list[int] | None, WithJsonSchema(nullable(TOKEN_IDS))] = (
        None  # of the last answer: tokens so far
    )

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def check(self) -> None:
        super().check()
        for name in ("system", "context"):
            if self.raw and getattr(self, name):
                raise ApiError("invalid_value", f"{name}: must be left out with raw = true", param=name)

    def messages_for_chat(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt or ""}]

    def completion(self) -> Chat:
        """The completion body for a raw prompt. Its `max_tokens` is left to the caller."""
        chat = self.chat()
        for name in ("messages", "chat_template_kwargs", "reasoning_effort", "max_completion_tokens"):
            chat.pop(name, None)
        if self.logprobs:
            chat["logprobs"] = chat.pop("top_logprobs") or 0
        return chat | {"prompt": self.prompt or "", "max_tokens": self.longest}

    def name_of(self, param: str) -> str:
        return renamed(param, NAMES | {"messages": "prompt", "context": "context"}).partition("[")[0]
