"""The bodies of chat and completions, and their conversion to engine parameters.

Names are OpenAI's and vLLM's. Types are strict (a bool or a string is not a number). Ranges of sampling fields are
checked by `SamplingParams`, by name. Checks that depend on the model follow at intake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError

from ....kernels.layout.sampling_fields import FROM_CHECKPOINT
from ....stages.beam_search.algorithm import (
    EARLY_STOPPINGS,
    MAX_LENGTH_PENALTY,
    BeamParams,
    refuse_sampling,
)
from ....stages.errors import Refused
from ....stages.messages import ChatPrompt, Prompt
from ....stages.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
)
from ....stages.structured_outputs import StructuredOutputs
from ...errors import ApiError, describe, shorten, wrong_field
from ..schema import fields as schema_fields
from ..schema import hints
from ..schema.body import SamplingBody
from ..schema.relations import (
    EMPTY_ANSWERS,
    NO_ECHO_OF_A_SEARCH,
    ONE_STREAMED_ECHO,
    STREAMS_ONLY,
    TOP_LOGPROBS,
    WITH_SEARCH,
    WITHOUT_SEARCH,
)
from ..schema.unsupported import GENERATION, UNSUPPORTED, Harmless
from .beam_fields import beam_params, check_beams
from .chat_messages import MAX_MESSAGES, NOT_OVER, Message, TemplateKwargs, check_last_turn
from .prompt_echo import EchoOptions
from .prompts import read_prompts
from .structured_fields import field_of, structured_outputs
from .tools import NamedTool, Tool, ToolChoice, Tools, check_tools, forced_schema

MAX_TIMEOUT_S = 86_400.0

Budget = Annotated[int, Field(ge=0, lt=2**31)]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _bias_by_id(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and key == str(int(key))):
            shown = repr(shorten(key, 64))
            raise PydanticCustomError("invalid_value", "keys must be token ids, not {key}", {"key": shown})
    return {int(key): value for key, value in bias.items()}


def _early_stopping(value: Any) -> Any:
    if value is not None and not isinstance(value, bool) and value != "never":  # 0 == False
        raise PydanticCustomError("invalid_type", 'must be true, false or "never"')
    return value


ModelName = Annotated[str | None, WithJsonSchema(hints.MODEL)]


class StreamOptions(BaseModel):
    """Options for usage data in a stream."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(SamplingBody):
    """Base class of the chat and completion bodies."""

    UNSUPPORTED: ClassVar[Harmless] = UNSUPPORTED
    FOREIGN: ClassVar[Harmless] = GENERATION
    RELATIONS: ClassVar[tuple[JsonSchemaValue, ...]] = (
        STREAMS_ONLY,
        WITH_SEARCH,
        WITHOUT_SEARCH,
    )

    model: ModelName = None
    n: int | None = None
    max_tokens: int | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None  # number of answers, or beams; the n best are returned
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    early_stopping: Annotated[
        Any, BeforeValidator(_early_stopping), WithJsonSchema({"enum": [*EARLY_STOPPINGS, None]})
    ] = None
    stop: Annotated[
        list[str] | None,
        Field(max_length=MAX_STOPS),
        BeforeValidator(_one_or_many),
        WithJsonSchema(hints.STOP),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, Field(max_length=MAX_STOP_TOKEN_IDS), WithJsonSchema(hints.STOP_TOKEN_IDS)
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        Field(max_length=MAX_ALLOWED_TOKEN_IDS),
        WithJsonSchema(schema_fields.ALLOWED_TOKEN_IDS),
    ] = None
    bad_words: Annotated[list[str] | None, Field(max_length=MAX_BAD_WORDS), WithJsonSchema(schema_fields.BAD_WORDS)] = (
        None
    )
    truncate_prompt_tokens: Annotated[int | None, WithJsonSchema(schema_fields.TRUNCATE_PROMPT_TOKENS)] = None
    truncation_side: Annotated[str | None, WithJsonSchema(schema_fields.TRUNCATION_SIDE)] = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_token_details: bool | None = None  # with logprobs
    return_metrics: bool | None = None
    return_progress: bool | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    return_tokens_as_token_ids: bool | None = None
    logit_bias: Annotated[
        Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS), AfterValidator(_bias_by_id)] | None,
        WithJsonSchema(hints.LOGIT_BIAS),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.:=+~-]{1,128}$")] = None
    request_id: str | None = None
    user: Annotated[str | None, Field(max_length=512)] = None
    metadata: Any = None  # see `metadata_pairs`
    logits_processors: Annotated[Any, WithJsonSchema(schema_fields.LOGITS_PROCESSORS)] = None  # see `processors.py`
    # the values of these fields are read in structured_fields.py
    response_format: Annotated[Any, WithJsonSchema(schema_fields.RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[Any, WithJsonSchema(schema_fields.STRUCTURED_OUTPUTS)] = None
    guided_json: Annotated[Any, WithJsonSchema(schema_fields.GUIDED_JSON)] = None
    guided_regex: Annotated[Any, WithJsonSchema(schema_fields.GUIDED_REGEX)] = None
    guided_choice: Annotated[Any, WithJsonSchema(schema_fields.GUIDED_CHOICE)] = None
    guided_grammar: Annotated[Any, WithJsonSchema(schema_fields.GUIDED_GRAMMAR)] = None

    def sampling_params(self, model_defaults: SamplingParams) -> SamplingParams:
        """The sampling parameters.

        `ApiError` names a field that is out of range or not allowed in a beam search.
        """
        if self.use_beam_search:
            model_defaults = SamplingParams(temperature=0.0)
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given.update({"structured_outputs": structured_outputs(self)} | self._own_params())
        for field in FROM_CHECKPOINT:
            if given[field.name] is None:
                given[field.name] = getattr(model_defaults, field.name)
        chosen = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if name in chosen:
                chosen[name] = tuple(chosen[name])
        try:
            params = SamplingParams(**chosen)
            if self.use_beam_search:
                refuse_sampling(params)
            return params
        except Refused as refused:
            raise self._client_error(refused) from None

    def beam_params(self) -> BeamParams | None:
        """The beam search, or None. `ApiError` names a field that is out of range."""
        try:
            return beam_params(self)
        except Refused as refused:
            raise self._client_error(refused) from None

    def _client_error(self, refused: Refused) -> ApiError:
        error = describe(refused)
        assert error is not None
        return error.named(self.client_name)

    def _own_params(self) -> dict[str, Any]:
        """`max_tokens` and `logprobs`, whose fields differ between the two endpoints."""
        raise NotImplementedError

    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts to complete."""
        raise NotImplementedError

    def client_name(self, param: str) -> str:
        """This endpoint's name of a field of `SamplingParams` or `BeamParams`, or of a member of such a field."""
        if param.startswith("structured_outputs"):
            field = field_of(self)
            return param if field == "structured_outputs" else field
        return ("n" if self.best_of is None else "best_of") if param == "width" else param

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "requires stream = true")
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name, None)
            if value is not None and value < self.least_max_tokens:
                raise wrong_field(name, f"must be at least {self.least_max_tokens}", str(value))
        if self.return_progress and not self.stream:
            raise wrong_field("return_progress", "requires stream = true")
        if self.stream and self.prompt_logprobs is not None:
            raise wrong_field("prompt_logprobs", "not supported with stream = true; leave one of the two out")
        check_beams(self)

    @property
    def ranks(self) -> bool:
        """Whether more answers are generated than returned."""
        return False

    @property
    def least_max_tokens(self) -> int:
        return 1

    def echo_options(self) -> EchoOptions:
        """The prompt data that the answer must contain."""
        return EchoOptions(
            prompt_logprobs=self.prompt_logprobs is not None,
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
        )


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
    RELATIONS: ClassVar[tuple[JsonSchemaValue, ...]] = (
        *GenerationBody.RELATIONS,
        TOP_LOGPROBS,
        NOT_OVER,
    )

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = None
    documents: Annotated[list[dict[str, str]], Field(max_length=256)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None  # the same, by vLLM's name

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
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_field("top_logprobs", "requires logprobs = true")
        check_last_turn(self)
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


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    INSTEAD: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "max_tokens"),
        "input": "prompt",
        "messages": "prompt, or use /v1/chat/completions",
        "stop_sequences": "stop",
        "top_logprobs": "logprobs",
    }
    RELATIONS: ClassVar[tuple[JsonSchemaValue, ...]] = (
        *GenerationBody.RELATIONS,
        NO_ECHO_OF_A_SEARCH,
        EMPTY_ANSWERS,
        ONE_STREAMED_ECHO,
    )
    LEAST_MAX_TOKENS: ClassVar[int] = 0

    prompt: Annotated[Any, WithJsonSchema(hints.PROMPT)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None  # False: a text prompt spells its own BOS

    def _own_params(self) -> dict[str, Any]:
        fields = {"max_tokens": 16 if self.max_tokens is None else self.max_tokens, "logprobs": self.logprobs}
        if self.ranks:
            fields |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        if self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return fields

    def client_name(self, param: str) -> str:
        if param == "prompt_logprobs" and self.prompt_logprobs is None:
            return "logprobs"
        if param == "n" and self.ranks:
            return "best_of"
        return super().client_name(param)

    @property
    def ranks(self) -> bool:
        return not self.use_beam_search and self.best_of is not None and self.best_of > (self.n or 1)

    @property
    def least_max_tokens(self) -> int:
        return 0 if self.echo or self.prompt_logprobs is not None else 1

    def check(self) -> None:
        super().check()
        if self.echo and self.stream and self.logprobs is not None and (self.n or 1) > 1:
            raise wrong_field("echo", "requires n = 1 together with logprobs and stream; leave one of them out")

    def echo_options(self) -> EchoOptions:
        options = super().echo_options()
        has_logprobs = self.logprobs is not None
        return replace(
            options, echo=bool(self.echo), echo_logprobs=bool(self.echo) and has_logprobs, logprobs=has_logprobs
        )

    def prompts(self) -> tuple[Prompt, ...]:
        """One prompt, or several."""
        return read_prompts(self.prompt, add_special_tokens=self.add_special_tokens)


_SAMPLING_FIELDS = [name for name in GenerationBody.model_fields if name in SamplingParams.__dataclass_fields__]
