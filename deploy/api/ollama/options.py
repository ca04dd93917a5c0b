"""The `options` of a request: Ollama's names of sampling fields, and their conversion to those of a chat body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from ....stages.params import MAX_STOPS, NUMBERS
from ...errors import ApiError
from ..adapter.chat_adapter import Chat
from ..schema import hints
from ..schema.body import Body
from ..schema.unsupported import Harmless
from ..schema.validation import NoteIgnored, read_body

# options of Ollama's loader, and of methods that are off: they change no answer here
WITHOUT_EFFECT = frozenset(
    {"num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa"}
    | {"low_vram", "f16_kv", "logits_all", "vocab_only", "embedding_only", "draft_num_predict"}
    | {"mirostat_tau", "mirostat_eta"}
)
SAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty"),
)
NAMES = {  # chat's field -> where it stands in this API, for error texts
    **{name: f"options.{name}" for name in SAME},
    "repetition_penalty": "options.repeat_penalty",
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
}
_LEAST, _MOST = NUMBERS["repetition_penalty"]
PENALTY: hints.Schema = {
    "anyOf": [{"const": 0}, {"type": "number", "minimum": _LEAST, "maximum": _MOST}, {"type": "null"}],
    "description": "0 and 1 are off; of all tokens of prompt and answer",
}


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class OllamaOptions(Body):
    """`options` of a request. Options of Ollama's loader, such as `num_ctx`, are accepted and have no effect."""

    UNSUPPORTED: ClassVar[Harmless] = {
        "tfs_z": (None, 1),
        "mirostat": (None, 0),
        "penalize_newline": (None, True, False),
    }

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None  # -1: another one for each request
    stop: Annotated[
        list[str] | None, Field(max_length=MAX_STOPS), BeforeValidator(_one_or_many), WithJsonSchema(hints.STOP)
    ] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None  # tokens; below 1: up to the end of the context
    repeat_penalty: Annotated[float | None, WithJsonSchema(PENALTY)] = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # 0: no penalties; -1: over the whole context

    @property
    def longest(self) -> int | None:
        """The most tokens of an answer; None: what the context leaves."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    def chat(self) -> Chat:
        """The fields of a chat body for these options."""
        fields: Chat = {name: getattr(self, name) for name in SAME}
        fields |= {"max_completion_tokens": self.longest, "repetition_penalty": self.repeat_penalty or None}
        if self.seed == -1:
            fields["seed"] = None
        if self.repeat_last_n == 0:
            fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return fields

    def has_window(self, max_model_len: int) -> bool:
        """Whether penalties are to forget tokens before the last `repeat_last_n`, which they do not here."""
        has_penalty = self.repeat_penalty not in (None, 0, 1) or self.presence_penalty or self.frequency_penalty
        return bool(has_penalty) and 0 < (self.repeat_last_n or 0) < max_model_len


def ignored_options(
    given: Mapping[str, Any] | None, max_model_len: int, strict_fields: bool, note: NoteIgnored | None = None
) -> list[str]:
    """The names of options that were not obeyed. `ApiError` 400 for one that would change the answer."""
    if not given:
        return []
    known = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    try:
        options, ignored = read_body(OllamaOptions, known, strict_fields, note)
    except ApiError as error:
        raise error.named(lambda name: f"options.{name}") from None
    if options.has_window(max_model_len):
        ignored.append("repeat_last_n")
    return [f"options.{name}" for name in ignored]
