"""The body of chat, and its conversion to a prompt and engine parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ....stages.errors import Refused
from ....stages.messages import ChatPrompt, Prompt
from ....stages.params import MAX_LOGPROBS, SamplingParams
from ....stages.structured_outputs import StructuredOutputs
from ...errors import wrong_field
from ..openai.chat_messages import MAX_MESSAGES, NOT_OVER, Message, TemplateKwargs
from ..openai.generation_body import GenerationBody
from ..openai.prompt_echo import EchoOptions
from ..openai.tools import NamedTool, Tool, ToolChoice, Tools, check_tools, forced_schema
from ..schema.relations import Relation, requires

Budget = Annotated[int, Field(ge=0, lt=2**31)]


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    INSTEAD: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("prompt", "input"), "messages"),
        **dict.fromkeys(("system", "instructions"), "a message of role system"),
        "max_output_tokens": "max_completion_tokens",
        "stop_sequences": "stop",
        "text": "response_format",
        "reasoning": "reasoning_effort",
        "thinking": "chat_template_kwargs",
    }
    RELATIONS: ClassVar[tuple[Relation, ...]] = (
        *GenerationBody.RELATIONS,
        requires("top_logprobs", {"type": "integer"}, "logprobs", True),
        NOT_OVER,
    )

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})] = Field(
        description="the turns of the chat, oldest first"
    )
    max_completion_tokens: int | None = Field(None, description="newer name of max_tokens, before which it goes")
    logprobs: bool | None = Field(None, description="returns the log-probability of each token")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="with logprobs: returns as many of the likeliest tokens at each place"
    )
    add_generation_prompt: bool = Field(True, description="opens a turn of the assistant behind the messages")
    continue_final_message: bool = Field(
        False, description="the answer continues the last message instead of answering it"
    )
    chat_template_kwargs: TemplateKwargs = Field(None, description="variables for the chat template")
    documents: Annotated[list[dict[str, str]], Field(max_length=256)] | None = Field(
        None, description="documents for a chat template that shows them"
    )
    tools: Tools | None = Field(None, description="functions that the model may call")
    tool_choice: ToolChoice | None = Field(
        None, description="whether a function may or must be called, or the one that must be"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="how much the model reasons, for a chat template that shows it; none: not at all"
    )
    include_reasoning: bool | None = Field(None, description="false: leaves the reasoning out of the answer")
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = Field(None, description="the same as thinking_budget, by vLLM's name")

    @property
    def chat(self) -> ChatBody:
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.tools is None or self.tool_choice == "none" else self.tools

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the tools that may be called."""
        return tuple(tool.function.name for tool in self.offered_tools)

    @property
    def named_tool(self) -> str | None:
        """The tool that must be called, if the body names one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def is_call_forced(self) -> bool:
        """Whether the answer must consist of calls."""
        return self.tool_choice == "required" or self.named_tool is not None

    @property
    def continued_text(self) -> str | None:
        """The text that the answer continues; None if the answer is a new turn."""
        if not self.continue_final_message:
            return None
        content = self.messages[-1].content
        return content if isinstance(content, str) else ""

    @property
    def max_thinking_tokens(self) -> int | None:
        """The thinking budget in tokens, from either field."""
        return self.thinking_budget if self.thinking_token_budget is None else self.thinking_token_budget

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template; `chat_template_kwargs` wins over the derived ones."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = variables["thinking"] = False
        return variables | (self.chat_template_kwargs or {})

    def _own_params(self) -> dict[str, Any]:
        longest = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {"max_tokens": longest, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def sampling_params(self, model_defaults: SamplingParams) -> SamplingParams:
        """Adds the schema of a forced call, which replaces any other output format."""
        params = super().sampling_params(model_defaults)
        schema = forced_schema(self.offered_tools, self.tool_choice, self.parallel_tool_calls is not False)
        if schema is None:
            return params
        if self.use_beam_search:
            problem = "forced calls are not supported with use_beam_search; leave one of the two out"
            raise wrong_field("tool_choice", problem)
        try:
            form = StructuredOutputs(json=schema, disable_any_whitespace=True)
            return replace(params, structured_outputs=form)
        except Refused as refused:
            raise wrong_field("tools", refused.text.problem, code=refused.code) from None

    def client_name(self, param: str) -> str:
        if param.startswith("structured_outputs") and self.is_call_forced:
            return "tools"
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if param == "thinking_budget" and self.thinking_token_budget is not None:
            return "thinking_token_budget"
        return {"logprobs": "top_logprobs", "prompt": "messages"}.get(param, super().client_name(param))

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise wrong_field("messages", "is empty; send at least one message", code="empty_prompt")
        check_tools(self.tools, self.tool_choice)

    def echo_options(self) -> EchoOptions:
        return replace(super().echo_options(), logprobs=bool(self.logprobs))

    def prompts(self) -> tuple[Prompt, ...]:
        """The chat, as one prompt."""
        chat = ChatPrompt(
            messages=tuple(message.for_template() for message in self.messages),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
            documents=tuple(self.documents or ()),
            tools=tuple(tool.for_template() for tool in self.offered_tools),
        )
        return (Prompt(chat=chat),)
