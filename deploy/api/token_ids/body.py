"""`POST /generate`: token ids in, token ids out, and the `.../render` bodies for it.

    {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "temperature": 0}, "stream": false}
 -> {"request_id": ..., "choices": [{"index": 0, "token_ids": [...], "logprobs": null, "finish_reason": "length", ...}]}

`token_ids` may be a list of lists. Sampling fields of completions go into `sampling_params`; the fields in `BESIDE` go
beside it. A field in the wrong place counts as unknown. Names are vLLM's; SGLang's `input_ids` is accepted too. Streams
are server-sent events of the same choices, each with its new ids, and end with [DONE]. The render routes compute
nothing: they convert a chat or a prompt to such a body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ...errors import ApiError
from ..completions.body import EMPTY_ANSWERS, CompletionBody
from ..openai.answers import AnswerBuilder
from ..openai.beam_fields import WITHOUT_SEARCH, search_schema
from ..openai.choice_state import ChoiceState
from ..openai.generation_body import IN_STREAMS
from ..openai.prompts import read_prompts
from ..schema import hints
from ..schema.relations import switched
from ..schema.unsupported import UNSUPPORTED

if TYPE_CHECKING:
    from ....stages.messages import Prompt, TokenLogprobs
    from ....stages.outputs import ChoiceDelta

BESIDE = (
    *("model", "stream", "stream_options", "return_progress", "return_metrics", "return_token_ids"),
    *(
        "return_token_details",
        "return_tokens_as_token_ids",
        "priority",
        "cache_salt",
        "request_id",
        "user",
        "timeout_s",
    ),
)


class GenerateBody(CompletionBody):
    """`POST /generate`, after `flatten` has converted it to the shape of completions."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of the body before `flatten`, with its sampling fields in `sampling_params`."""
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        schema = handler.resolve_ref_schema(reference)
        fields = schema["properties"]
        inside = (*sorted(SAMPLING), *(name for name in UNSUPPORTED if name not in cls.model_fields))
        sampling = {
            "type": ["object", "null"],
            "properties": {name: fields[name] for name in inside},
            "allOf": [search_schema({"echo": False}), WITHOUT_SEARCH.schema, EMPTY_ANSWERS.schema],
        }
        tokens = {"token_ids": hints.ONLY_TOKENS, "sampling_params": sampling}
        schema.update({"properties": tokens | {name: fields[name] for name in BESIDE}, "required": ["token_ids"]})
        schema["allOf"] = [switched("stream", IN_STREAMS).schema]  # its other relations are those of `sampling`
        return reference

    @classmethod
    def flattened(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return flatten(raw)

    def prompts(self) -> tuple[Prompt, ...]:
        return read_prompts(self.prompt, "token_ids", add_special_tokens=self.add_special_tokens)

    def client_name(self, param: str) -> str:
        return "token_ids" if param == "prompt" else super().client_name(param)


SAMPLING = frozenset(GenerateBody.model_fields) - {*BESIDE, "prompt"}
TAKEN = ("prompt", "token_ids", "input_ids", "sampling_params")


def flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the body to the shape of completions.

    `ApiError` 400 names a missing field or one of the wrong type. A field in the wrong place gets a name that says
    so, such as `in_sampling_params.stream`, and is then unknown.
    """
    token_ids = raw.get("token_ids", raw.get("input_ids"))
    if token_ids is None:
        raise ApiError("missing_required_parameter", "token_ids: a list of token ids is required", param="token_ids")
    first = token_ids[0] if isinstance(token_ids, list) and token_ids else None
    if not isinstance(token_ids, list) or isinstance(first, str):
        raise ApiError("invalid_type", "token_ids: must be a list of token ids, or of such lists", param="token_ids")
    sampling = raw.get("sampling_params")
    if not isinstance(sampling, dict | None):
        raise ApiError("invalid_type", "sampling_params: must be an object", param="sampling_params")
    beside = {name: value for name, value in raw.items() if name not in TAKEN}
    inside = _misplaced(sampling or {}, {*BESIDE, "prompt"}, "in")
    return _misplaced(beside, {*SAMPLING, *UNSUPPORTED} - {*BESIDE}, "outside") | inside | {"prompt": token_ids}


def _misplaced(fields: Mapping[str, Any], others: Set[str], where: str) -> dict[str, Any]:
    """Renames the fields that are in `others`, which belong elsewhere."""
    return {f"{where}_sampling_params.{name}" if name in others else name: value for name, value in fields.items()}


class TokenIdsAnswerBuilder(AnswerBuilder):
    """The answer of `/generate`: token ids instead of text."""

    PREFIX = "gen-"
    WHOLE = CHUNK = "token_ids"

    def whole(self, choices: Sequence[ChoiceState], usage: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = super().whole(choices, usage)
        return {"request_id": self.id} | body

    def chunks(
        self, choice: ChoiceState, delta: ChoiceDelta, running_usage: dict[str, Any] | None = None
    ) -> list[bytes]:
        if not (delta.token_ids or delta.finish_reason or running_usage is not None):
            return []
        return [self._encoded(self._chunk_choice(choice, delta), running_usage)]

    def _whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        part = self._prompt(choice)
        logprobs = self._kept_logprobs(choice)
        whole = self._choice(choice, choice.token_ids, logprobs, choice.finish_reason, choice.stop_reason)
        return whole if part is None else whole | {"prompt_logprobs": part.prompt_logprobs}

    def _chunk_choice(self, choice: ChoiceState, delta: ChoiceDelta) -> dict[str, Any]:
        logprobs = self.logprob_lists(choice, delta.logprobs) if self.has_logprobs and delta.logprobs else None
        return self._choice(choice, delta.token_ids, logprobs, delta.finish_reason, delta.stop_reason)

    def logprob_lists(self, choice: ChoiceState, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        return self._detailed(choice.completion_logprobs(tokens, as_ids=True), tokens)

    def _choice(
        self,
        choice: ChoiceState,
        token_ids: Sequence[int],
        logprobs: Mapping[str, Any] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "token_ids": token_ids,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
