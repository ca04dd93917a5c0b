"""SGLang's dialect: `{"text": "..." or "input_ids": [...], "sampling_params": {...}, "stream": false}`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import orjson
from pydantic import Field, WithJsonSchema

from ....kernels.layout.sampling_fields import NO_CHECKPOINT
from ...errors import ApiError
from ..openai.answers import AnswerBuilder
from ..openai.choice_state import ChoiceState
from ..openai.logprob_fields import finite
from ..schema import hints
from ..schema.body import Body
from ..schema.hints import nullable
from ..schema.unsupported import NOTHING, Harmless

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ....stages.outputs import ChoiceDelta

DEFAULT_MAX_NEW_TOKENS = 128
MOST_EVENTS = 64  # while an answer doubles: each event repeats all of it, so a long answer gets one every few tokens
SAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n"),
    *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias"),
)
FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
NAMES = {  # a completion's field -> this dialect's, for error texts
    **{name: f"sampling_params.{name}" for name in SAME},
    **{ours: f"sampling_params.{theirs}" for theirs, ours in RENAMED.items()},
    **{f"structured_outputs.{ours}": f"sampling_params.{theirs}" for theirs, ours in FORMS.items()},
}
SAMPLING: hints.Schema = {"type": ["object", "null"], "description": "fields of SGLang's sampling parameters"}


class SglangBody(Body):
    """`POST /generate` with `text` or `input_ids`."""

    UNSUPPORTED: ClassVar[Harmless] = {
        **dict.fromkeys(("image_data", "audio_data", "video_data", "lora_path", "input_embeds"), NOTHING),
        **dict.fromkeys(("custom_logit_processor", "session_params", "return_hidden_states"), NOTHING),
        "top_logprobs_num": (None, 0),
        "logprob_start_len": (None, -1),
    }

    text: Annotated[Any, WithJsonSchema(nullable(hints.PROMPT))] = None
    input_ids: Annotated[Any, WithJsonSchema(nullable(hints.ONLY_TOKENS))] = None
    sampling_params: Annotated[dict[str, Any] | None, WithJsonSchema(SAMPLING)] = None
    stream: bool | None = None
    return_logprob: bool | None = None
    rid: Annotated[str | None, Field(max_length=128)] = None

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list, as the prompts are or as several answers are asked for."""
        prompts = self.text if self.input_ids is None else self.input_ids
        several = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
        return several or (self.sampling_params or {}).get("n", 1) not in (None, 1)

    @property
    def has_length(self) -> bool:
        """Whether the request says how long its answer may be."""
        return (self.sampling_params or {}).get("max_new_tokens") is not None

    @property
    def prompt_field(self) -> str:
        return "text" if self.input_ids is None else "input_ids"

    def check(self) -> None:
        super().check()
        if (self.text is None) == (self.input_ids is None):
            raise ApiError("invalid_value", "text: send either text or input_ids", param="text")
        if self.input_ids is not None and not isinstance(self.input_ids, list):
            raise ApiError(
                "invalid_type", "input_ids: must be a list of token ids, or of such lists", param="input_ids"
            )

    def completion(self) -> tuple[dict[str, Any], list[str]]:
        """The body of a completion for this request, and the names of unknown sampling parameters."""
        given = {name: value for name, value in (self.sampling_params or {}).items() if value is not None}
        fields = {name: given.pop(name) for name in SAME if name in given}
        fields |= {ours: given.pop(theirs) for theirs, ours in RENAMED.items() if theirs in given}
        forms = {ours: given.pop(theirs) for theirs, ours in FORMS.items() if theirs in given}
        fields |= {"structured_outputs": forms} if forms else {}
        fields |= {"logprobs": 0} if self.return_logprob else {}
        fields |= {"request_id": self.rid} if self.rid is not None else {}
        prompt = self.text if self.input_ids is None else self.input_ids
        body = {"max_tokens": 1} | NO_CHECKPOINT | fields | {"prompt": prompt, "stream": bool(self.stream)}
        return body, [f"sampling_params.{name}" for name in given]


class SglangAnswerBuilder(AnswerBuilder):
    """Texts and token ids with their counts; the events of a stream hold all of the answer so far."""

    PREFIX = "sglang-"
    WHOLE = CHUNK = "sglang"

    def __init__(self, answer_id: str, body: SglangBody, outbox: RequestOutbox, num_prompts: int) -> None:
        super().__init__(answer_id, 0, "", has_usage=False, has_running_usage=False)
        self._body = body
        self._outbox = outbox
        self._num_prompts = num_prompts
        self._began_s = time.monotonic()
        self._num_sent: dict[int, int] = {}  # choice -> tokens in its last event

    def keep(self, choice: ChoiceState, delta: ChoiceDelta) -> None:
        choice.add(delta, keep=True)

    def whole(self, choices: Sequence[ChoiceState], usage: dict[str, Any]) -> Any:
        answers = [self._answer(choice) for choice in choices]
        return answers if self._body.is_list else answers[0]

    def chunks(
        self, choice: ChoiceState, delta: ChoiceDelta, running_usage: dict[str, Any] | None = None
    ) -> list[bytes]:
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        num_new = choice.num_tokens - self._num_sent.get(choice.index, 0)
        if delta.finish_reason is None and num_new <= choice.num_tokens // MOST_EVENTS:
            return []
        self._num_sent[choice.index] = choice.num_tokens
        index = {"index": choice.index} if self._body.is_list else {}
        return [orjson.dumps(self._answer(choice) | index)]

    def _answer(self, choice: ChoiceState) -> dict[str, Any]:
        outbox = self._outbox
        prompt = choice.index // max(1, len(outbox.choices) // self._num_prompts)
        begun = outbox.choices[choice.index].begun
        meta: dict[str, Any] = {
            "id": self.id,
            "finish_reason": _finish(choice),
            "prompt_tokens": len(outbox.prompt_token_ids(prompt)),
            "completion_tokens": choice.num_tokens,
            "cached_tokens": begun.num_cached,
            "e2e_latency": time.monotonic() - self._began_s,
        }
        if self._body.return_logprob:
            logprobs = [[finite(token.logprob), token.token_id, None] for token in choice.logprobs]
            meta |= {"output_token_logprobs": logprobs}
        return {"text": "".join(choice.texts), "output_ids": choice.token_ids, "meta_info": meta}


def _finish(choice: ChoiceState) -> dict[str, Any] | None:
    match choice.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": choice.num_tokens}
        case "stop":
            last = choice.token_ids[-1] if choice.token_ids else None
            return {"type": "stop", "matched": last if choice.stop_reason is None else choice.stop_reason}
    return {"type": "abort"}


def sglang_error(error: ApiError) -> dict[str, Any]:
    """An error in this dialect's shape."""
    return {"error": {"message": error.message}}
