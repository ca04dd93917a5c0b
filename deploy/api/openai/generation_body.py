"""What the bodies of chat, completions and token ids share, and their conversion to engine parameters.

Names are OpenAI's and vLLM's. Types are strict (a bool or a string is not a number). Ranges of sampling fields are
checked by `SamplingParams`, by name. Checks that depend on the model follow at intake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from ....kernels.layout.sampling_fields import FROM_CHECKPOINT
from ....stages.beam_search.algorithm import (
    EARLY_STOPPINGS,
    MAX_LENGTH_PENALTY,
    BeamParams,
    refuse_sampling,
)
from ....stages.errors import Refused
from ....stages.messages import Prompt
from ....stages.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
)
from ...errors import ApiError, shorten, wrong_field
from ..chat_format import Chat
from ..schema import fields as schema_fields
from ..schema import hints
from ..schema.body import SamplingBody
from ..schema.relations import Relation, switched
from ..schema.unsupported import GENERATION, UNSUPPORTED, Harmless
from .beam_fields import BEST_OF, WITH_SEARCH, WITHOUT_SEARCH, beam_params
from .prompt_echo import EchoOptions
from .structured_fields import field_of, structured_outputs

MAX_TIMEOUT_S = 86_400.0


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


IN_STREAMS = {"stream_options": (None,), "return_progress": (False, None)}  # field -> its values that ask for nothing
STREAMS = switched("stream", IN_STREAMS, {"prompt_logprobs": (None,)})


class GenerationBody(SamplingBody):
    """Base class of the chat and completion bodies."""

    UNSUPPORTED: ClassVar[Harmless] = UNSUPPORTED
    FOREIGN: ClassVar[Harmless] = GENERATION
    RELATIONS: ClassVar[tuple[Relation, ...]] = (STREAMS, WITH_SEARCH, BEST_OF, WITHOUT_SEARCH)

    model: ModelName = Field(None, description="a served name, or that of a LoRA adapter; null: the served model")
    n: int | None = None
    max_tokens: int | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(
        None, description="answers or beams to make, of which the n best are returned"
    )
    use_beam_search: bool | None = Field(None, description="searches for the likeliest answers instead of drawing one")
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = Field(
        None, description="of a beam search: a score is divided by the length to this power"
    )
    early_stopping: Annotated[
        Any, BeforeValidator(_early_stopping), WithJsonSchema({"enum": [*EARLY_STOPPINGS, None]})
    ] = Field(None, description="of a beam search: whether it ends once enough answers are finished")
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
    return_token_ids: bool | None = Field(None, description="returns the token ids of prompt and answer")
    return_token_details: bool | None = Field(
        None, description="with logprobs: returns id, rank, time and draft of each token"
    )
    return_metrics: bool | None = Field(None, description="returns times and counts of the request")
    return_progress: bool | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = Field(
        None, description="seconds until the request ends with an error; the header X-Request-Timeout says the same"
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="writes tokens of log-probabilities as token_id:N"
    )
    logit_bias: Annotated[
        Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS), AfterValidator(_bias_by_id)] | None,
        WithJsonSchema(hints.LOGIT_BIAS),
    ] = None
    stream: bool | None = Field(None, description="sends the answer as server-sent events while it is made")
    stream_options: StreamOptions | None = Field(None, description="what a stream says of token counts")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        0, description="requests with lower numbers are served first"
    )
    cache_salt: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.:=+~-]{1,128}$")] = Field(
        None, description="requests share cached prefixes only with those of the same salt"
    )
    prompt_cache_key: Annotated[str | None, Field(max_length=512)] = Field(
        None,
        description="of several engines, requests of the same one go to the same, unless another answers much sooner; "
        "the header X-Session-Id says the same",
    )
    request_id: str | None = Field(None, description="the id of the request; the header X-Request-Id says the same")
    user: Annotated[str | None, Field(max_length=512)] = Field(
        None, description="the client's name of its user; without effect"
    )
    metadata: Any = Field(None, description="pairs of text for stages of one's own")
    logits_processors: Annotated[Any, WithJsonSchema(schema_fields.LOGITS_PROCESSORS)] = Field(
        None, description="names of the server's logits processors, or objects with a name and arguments"
    )
    # the values of these fields are read in structured_fields.py
    response_format: Annotated[Any, WithJsonSchema(schema_fields.RESPONSE_FORMAT)] = Field(
        None, description="the form of the answer, by OpenAI's names"
    )
    structured_outputs: Annotated[Any, WithJsonSchema(schema_fields.STRUCTURED_OUTPUTS)] = None
    guided_json: Annotated[Any, WithJsonSchema(schema_fields.GUIDED_JSON)] = Field(
        None, description="older name of structured_outputs.json"
    )
    guided_regex: Annotated[Any, WithJsonSchema(schema_fields.GUIDED_REGEX)] = Field(
        None, description="older name of structured_outputs.regex"
    )
    guided_choice: Annotated[Any, WithJsonSchema(schema_fields.GUIDED_CHOICE)] = Field(
        None, description="older name of structured_outputs.choice"
    )
    guided_grammar: Annotated[Any, WithJsonSchema(schema_fields.GUIDED_GRAMMAR)] = Field(
        None, description="older name of structured_outputs.grammar"
    )

    @classmethod
    def flattened(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields of a request as this class has them."""
        return raw

    @property
    def chat(self) -> Chat | None:
        """The chat, where it needs the model's chat format; None for plain prompts."""
        return None

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
        return ApiError(refused.code, refused.text.named(self.client_name), param=self.client_name(refused.param or ""))

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
        super().check()
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name, None)
            if value is not None and value < self.least_max_tokens:
                raise wrong_field(name, f"must be at least {self.least_max_tokens}", str(value))

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


_SAMPLING_FIELDS = [name for name in GenerationBody.model_fields if name in SamplingParams.__dataclass_fields__]
