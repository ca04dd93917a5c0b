"""Text Generation Inference's dialect: `{"inputs": "...", "parameters": {...}, "stream": false}`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Field, WithJsonSchema

from ....kernels.layout.sampling_fields import NO_CHECKPOINT
from ....stages.params import MAX_LOGPROBS, MAX_STOPS
from ...errors import ApiError
from ..openai.answers import AnswerBuilder
from ..openai.choice_state import ChoiceState
from ..openai.logprob_fields import finite
from ..schema.body import Body
from ..schema.hints import LIMITS, NOT_EMPTY, STOP_STRING, Schema, array, nullable
from ..schema.unsupported import Harmless

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ....stages.messages import TokenLogprobs
    from ....stages.outputs import ChoiceDelta

TGI_STREAM_PATH = "/generate_stream"
SAME = ("top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "seed", "stop")
NAMES = {  # a completion's field -> this dialect's, for error texts
    **{name: f"parameters.{name}" for name in (*SAME, "temperature")},
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "logprobs": "parameters.top_n_tokens",
    "truncate_prompt_tokens": "parameters.truncate",
    "structured_outputs": "parameters.grammar",
    "structured_outputs.json": "parameters.grammar",
    "structured_outputs.regex": "parameters.grammar",
    "model": "parameters.adapter_id",
}
MAX_NEW_TOKENS = nullable({"type": "integer", "minimum": 1, LIMITS: {"maximum": "longest_prompt"}})
GRAMMAR: Schema = nullable(
    {
        "type": "object",
        "properties": {"type": {"enum": ["json", "regex", "json_schema"]}, "value": {"type": ["object", "string"]}},
        "required": ["type", "value"],
    }
)


class TgiParameters(Body):
    """`parameters` of a request. Where nothing is said of sampling, the likeliest token is taken."""

    UNSUPPORTED: ClassVar[Harmless] = {
        "watermark": (None, False),
        "decoder_input_details": (None, False),
        "best_of": (None, 1),
    }

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[list[str] | None, WithJsonSchema(nullable(array(STOP_STRING, MAX_STOPS)))] = None
    max_new_tokens: Annotated[int | None, Field(ge=1), WithJsonSchema(MAX_NEW_TOKENS)] = None  # None: what is left
    truncate: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: Annotated[Any, WithJsonSchema(GRAMMAR)] = None
    adapter_id: str | None = None

    @property
    def samples(self) -> bool:
        """Whether a token is drawn, as TGI decides it."""
        changes = (
            self.temperature not in (None, 1.0),
            self.top_k,
            self.top_p not in (None, 1.0),
            self.typical_p not in (None, 1.0),
        )
        return bool(self.do_sample or any(changes))

    def structured_outputs(self) -> dict[str, Any] | None:
        if self.grammar is None:
            return None
        value = self.grammar.get("value") if isinstance(self.grammar, dict) else None
        kind = self.grammar.get("type") if value is not None else None
        match kind:
            case "json":
                return {"json": value}
            case "json_schema":
                return {"json": value.get("schema", value) if isinstance(value, dict) else value}
            case "regex":
                return {"regex": value}
        message = "parameters.grammar: must have a type of json, json_schema or regex, and a value"
        raise ApiError("invalid_value", message, param="parameters.grammar")


class TgiBody(Body):
    """`POST /generate_stream`, and `POST /generate` with `inputs`."""

    inputs: Annotated[str, WithJsonSchema(NOT_EMPTY)]
    parameters: TgiParameters | None = None
    stream: bool | None = None

    def completion(self, is_stream: bool) -> dict[str, Any]:
        """The body of a completion for this request; what is not said is TGI's default, not the model's."""
        parameters = self.parameters or TgiParameters()
        off = NO_CHECKPOINT | {"temperature": 1.0 if parameters.samples else 0.0}
        given: dict[str, Any] = {name: getattr(parameters, name) for name in (*SAME, "temperature")}
        given |= {"truncate_prompt_tokens": parameters.truncate, "model": parameters.adapter_id}
        given["structured_outputs"] = parameters.structured_outputs()
        if not parameters.samples:
            given["temperature"] = None
        if parameters.details or is_stream:
            given["logprobs"] = parameters.top_n_tokens or 0
        fixed = {"prompt": self.inputs, "stream": is_stream, "include_stop_str_in_output": True}
        fixed |= {"max_tokens": parameters.max_new_tokens or 1}  # else set behind
        return off | {k: v for k, v in given.items() if v is not None} | fixed


class TgiAnswerBuilder(AnswerBuilder):
    """A text with details, or an event for each token."""

    PREFIX = "tgi-"
    WHOLE = CHUNK = "tgi"
    HAS_DONE = False

    def __init__(self, answer_id: str, body: TgiBody, outbox: RequestOutbox, special_ids: Collection[int]) -> None:
        super().__init__(answer_id, 0, "", has_usage=False, has_running_usage=False)
        self._parameters = body.parameters or TgiParameters()
        self._outbox = outbox
        self._special_ids = special_ids
        self._texts = [body.inputs] if self._parameters.return_full_text else []  # of the answer so far
        self._num_sent = 0

    def keep(self, choice: ChoiceState, delta: ChoiceDelta) -> None:
        choice.add(delta, keep=True)

    def whole(self, choices: Sequence[ChoiceState], usage: dict[str, Any]) -> dict[str, Any]:
        choice = choices[0]
        answer: dict[str, Any] = {"generated_text": "".join([*self._texts, *choice.texts])}
        if self._parameters.details:
            tokens = [self._token(token) for token in choice.logprobs]
            answer["details"] = self._end(choice.finish_reason, choice.stop_reason, choice.num_tokens)
            answer["details"] |= {"prefill": [], "tokens": tokens}
            if self._parameters.top_n_tokens:
                answer["details"]["top_tokens"] = [self._likeliest(token) for token in choice.logprobs]
        return answer

    def chunks(
        self, choice: ChoiceState, delta: ChoiceDelta, running_usage: dict[str, Any] | None = None
    ) -> list[bytes]:
        self._texts.append(delta.text)
        events = [{"token": self._token(token)} | self._top(token) for token in delta.logprobs]
        ends: dict[str, Any] = {"generated_text": None, "details": None}
        if delta.finish_reason is not None:
            if not events:
                last = delta.token_ids[-1] if delta.token_ids else 0
                events = [{"token": {"id": last, "text": "", "logprob": 0.0, "special": True}}]
            details = self._end(delta.finish_reason, delta.stop_reason, choice.num_tokens)
            ends["generated_text"] = "".join(self._texts)
            ends["details"] = details | {"input_length": self._outbox.num_prompt_tokens}
        made = []
        for i, event in enumerate(events):
            self._num_sent += 1
            more = ends if i == len(events) - 1 else dict.fromkeys(ends)
            made.append(orjson.dumps({"index": self._num_sent} | event | more))
        return made

    def _end(self, reason: str | None, stop_reason: str | int | None, num_tokens: int) -> dict[str, Any]:
        finish: Literal["length", "eos_token", "stop_sequence"] = "length"
        if reason == "stop":
            finish = "eos_token" if stop_reason is None else "stop_sequence"
        return {"finish_reason": finish, "generated_tokens": num_tokens, "seed": self._parameters.seed}

    def _token(self, token: TokenLogprobs) -> dict[str, Any]:
        special = token.token_id in self._special_ids
        return {"id": token.token_id, "text": token.token, "logprob": finite(token.logprob), "special": special}

    def _likeliest(self, token: TokenLogprobs) -> list[dict[str, Any]]:
        return [
            {"id": token_id, "text": text, "logprob": finite(logprob), "special": token_id in self._special_ids}
            for token_id, text, _, logprob in token.top
        ]

    def _top(self, token: TokenLogprobs) -> dict[str, Any]:
        return {"top_tokens": self._likeliest(token)} if self._parameters.top_n_tokens else {}


def tgi_error(error: ApiError) -> dict[str, Any]:
    """An error in this dialect's shape."""
    kinds = {429: "overloaded", 503: "overloaded", 500: "generation"}
    return {"error": error.message, "error_type": kinds.get(error.status, "validation")}
