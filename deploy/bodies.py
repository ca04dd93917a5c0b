"""The bodies of requests: which fields there are, of which types, and what they mean to the engine.

Names are OpenAI's and vLLM's. Types are strict (no bool is a number, no string is one). Ranges of sampling fields are
those of `SamplingParams`, which refuses them by name. What depends on the model is checked behind this, at intake.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from ..stages.beams import EARLY_STOPPINGS, MAX_LENGTH_PENALTY, BeamParams, refuse_sampling
from ..stages.errors import Refused
from ..stages.messages import ChatPrompt, Prompt
from ..stages.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_TOKEN_IDS, MAX_STOPS, SamplingParams
from . import documented
from .beams import WITH_SEARCH, WITHOUT_SEARCH, beam_params, check_beams
from .documented import has, nullable, only_with
from .errors import ApiError, shorten
from .prompts import read_prompts

MAX_MESSAGES = 4096

# What a client may hand to the chat template. Never what a template trusts: its own text, tools, or how to tokenize.
TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"})
MAX_KWARG_CHARS = 1024


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _bias_by_id(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and key == str(int(key))):
            shown = repr(shorten(key, 64))
            raise PydanticCustomError("invalid_value", "the keys must be token ids, and {key} is none", {"key": shown})
    return {int(key): value for key, value in bias.items()}


def _content(value: Any) -> Any:
    """Text, or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", "must be text, or a list of parts of type text")
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" and isinstance(kind, str):
            raise PydanticCustomError(
                "unsupported_content_type",
                "part {i} is of type {kind}: this model takes text parts only",
                {"i": i, "kind": repr(shorten(kind, 32))},
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError("invalid_type", 'part {i} must be {"type": "text", "text": ...}', {"i": i})
    return [{"type": "text", "text": part["text"]} for part in value]


def _early_stopping(value: Any) -> Any:
    if value is not None and not isinstance(value, bool) and value != "never":  # 0 == False
        raise PydanticCustomError("invalid_type", 'must be true, false or "never"')
    return value


def _template_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    for name, item in value.items():
        if name not in TEMPLATE_KWARGS:
            known = ", ".join(sorted(TEMPLATE_KWARGS))
            raise PydanticCustomError(
                "invalid_value", "{name} is none of {known}", {"name": repr(shorten(name, 64)), "known": known}
            )
        if not isinstance(item, (str, int, float, bool, type(None))) or len(str(item)) > MAX_KWARG_CHARS:
            raise PydanticCustomError("invalid_value", "{name} must be a text, number or boolean", {"name": name})
    return value


ModelName = Annotated[str | None, WithJsonSchema(documented.MODEL)]
TemplateKwargs = Annotated[
    dict[str, Any] | None,
    AfterValidator(lambda value: None if value is None else _template_kwargs(value)),
    WithJsonSchema(nullable(documented.scalars(TEMPLATE_KWARGS, MAX_KWARG_CHARS))),
]


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[dict[str, str]], BeforeValidator(_content), WithJsonSchema(documented.CONTENT)]
    name: str | None = Field(None, max_length=64)


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    RELATIONS: ClassVar[tuple[JsonSchemaValue, ...]] = ()  # what `check` asks of fields together, as a schema says it

    def check(self) -> None:
        """What no single field can say. `ApiError` names the field to change."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        documented.add_ranges(schema)
        if cls.RELATIONS:
            schema["allOf"] = list(cls.RELATIONS)
        return reference


class GenerationBody(Body):
    """What chat and completions have in common."""

    RELATIONS: ClassVar[tuple[JsonSchemaValue, ...]] = (
        only_with("stream_options", {"type": "object"}, {"stream": True}),
        WITH_SEARCH,
        WITHOUT_SEARCH,
    )

    # fields that take the checkpoint's own default when the client brings none
    MODEL_DEFAULTS: ClassVar = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

    model: ModelName = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = (
        None  # with use_beam_search: beams, of which the n best are returned
    )
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    early_stopping: Annotated[
        Any, BeforeValidator(_early_stopping), WithJsonSchema({"enum": [*EARLY_STOPPINGS, None]})
    ] = None
    stop: Annotated[
        list[str] | None,
        Field(max_length=MAX_STOPS),
        BeforeValidator(_one_or_many),
        WithJsonSchema(documented.STOP),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, Field(max_length=MAX_STOP_TOKEN_IDS), WithJsonSchema(documented.STOP_TOKEN_IDS)
    ] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[
        Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS), AfterValidator(_bias_by_id)] | None,
        WithJsonSchema(documented.LOGIT_BIAS),
    ] = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.:=+~-]{1,128}$")] = None
    request_id: str | None = None
    user: Annotated[str | None, Field(max_length=512)] = None

    def sampling_params(self, model_defaults: SamplingParams) -> SamplingParams:
        """The sampler's view. `ApiError` names the field that is out of range, or has no meaning in a beam search."""
        if self.use_beam_search:
            model_defaults = SamplingParams(temperature=0.0)
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given.update(self._own_params())
        for name in self.MODEL_DEFAULTS:
            if given[name] is None:
                given[name] = getattr(model_defaults, name)
        chosen = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        for name in ("stop", "stop_token_ids"):
            if name in chosen:
                chosen[name] = tuple(chosen[name])
        try:
            params = SamplingParams(**chosen)
            if self.use_beam_search:
                refuse_sampling(params)
            return params
        except Refused as refused:
            raise self._in_own_words(refused) from None

    def beam_params(self) -> BeamParams | None:
        """The beam search, if one is asked for. `ApiError` names the field that is out of range."""
        try:
            return beam_params(self)
        except Refused as refused:
            raise self._in_own_words(refused) from None

    def _in_own_words(self, refused: Refused) -> ApiError:
        param = self.client_name(refused.param)
        return ApiError(refused.code, _renamed(refused, param), param=param)

    def _own_params(self) -> dict[str, Any]:
        """`max_tokens` and `logprobs`, which the two endpoints spell differently."""
        raise NotImplementedError

    def client_name(self, param: str | None) -> str | None:
        """What this endpoint calls a field of `SamplingParams` or `BeamParams`."""
        return ("n" if self.best_of is None else "best_of") if param == "width" else param

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError("invalid_value", "stream_options: only with stream = true", param="stream_options")
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise ApiError("invalid_value", f"{name} = {value}: must be at least 1", param=name)
        check_beams(self)


NOT_OVER = only_with("continue_final_message", {"const": True}, {"add_generation_prompt": False})


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    RELATIONS: ClassVar[tuple[JsonSchemaValue, ...]] = (
        *GenerationBody.RELATIONS,
        only_with("top_logprobs", {"type": "integer"}, {"logprobs": True}),
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

    def _own_params(self) -> dict[str, Any]:
        longest = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {"max_tokens": longest, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def client_name(self, param: str | None) -> str | None:
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return {"logprobs": "top_logprobs", "prompt": "messages"}.get(param or "", super().client_name(param))

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise ApiError("empty_prompt", "messages is empty: send at least one", param="messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("invalid_value", "top_logprobs: only with logprobs = true", param="top_logprobs")
        _check_last_turn(self)

    def prompts(self) -> tuple[Prompt, ...]:
        """The chat as the one prompt that it is."""
        messages = tuple(message.model_dump(exclude_none=True) for message in self.messages)
        chat = ChatPrompt(
            messages=messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs or {},
            documents=tuple(self.documents or ()),
        )
        return (Prompt(chat=chat),)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, WithJsonSchema(documented.PROMPT)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def _own_params(self) -> dict[str, Any]:
        return {"max_tokens": 16 if self.max_tokens is None else self.max_tokens, "logprobs": self.logprobs}

    def prompts(self) -> tuple[Prompt, ...]:
        """One prompt, or several."""
        return read_prompts(self.prompt)


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt or a chat."""

    RELATIONS: ClassVar[tuple[JsonSchemaValue, ...]] = (
        {"oneOf": [has("prompt", {"type": "string"}), has("messages", {"type": "array"})]},
        NOT_OVER,
    )

    model: ModelName = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("invalid_value", "send either prompt or messages", param="prompt")
        _check_last_turn(self)


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: ModelName = None
    tokens: Annotated[list[int], WithJsonSchema(documented.TOKEN_IDS)]


_SAMPLING_FIELDS = [name for name in GenerationBody.model_fields if name in SamplingParams.__dataclass_fields__]


def _check_last_turn(body: ChatBody | TokenizeBody) -> None:
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message: needs add_generation_prompt = false, as the last turn is not over"
        raise ApiError("invalid_value", message, param="continue_final_message")


def _renamed(refused: Refused, param: str | None) -> str:
    message = refused.message
    if param is not None and refused.param is not None and message.startswith(refused.param):
        message = param + message[len(refused.param) :]
    return message
