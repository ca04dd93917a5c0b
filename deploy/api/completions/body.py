"""The body of completions, and its conversion to prompts and engine parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from ....stages.messages import Prompt
from ....stages.params import MAX_LOGPROBS
from ...errors import wrong_field
from ..openai.generation_body import GenerationBody
from ..openai.prompt_echo import EchoOptions
from ..openai.prompts import read_prompts
from ..schema import hints
from ..schema.hints import has, off_with
from ..schema.relations import Relation


def _check_streamed_echo(body: CompletionBody) -> None:
    if body.echo and body.stream and body.logprobs is not None and (body.n or 1) > 1:
        raise wrong_field("echo", "requires n = 1 together with logprobs and stream; leave one of them out")


NO_ECHO_OF_A_SEARCH = Relation(off_with("use_beam_search", {"const": True}, {"echo": False}))  # see `WITH_SEARCH`
EMPTY_ANSWERS = Relation(  # max_tokens = 0 only if the prompt is returned; see `least_max_tokens`
    {
        "if": {"anyOf": [has("echo", {"const": True}), has("prompt_logprobs", {"type": "integer"})]},
        "else": {"properties": {"max_tokens": {"minimum": 1}}},
    }
)
ONE_STREAMED_ECHO = Relation(
    {
        "if": {"allOf": [has("echo", {"const": True}), has("stream", {"const": True})]}
        | has("logprobs", {"type": "integer"}),
        "then": {"properties": {"n": {"maximum": 1}}},
    },
    _check_streamed_echo,
)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    INSTEAD: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "max_tokens"),
        "input": "prompt",
        "messages": "prompt, or use /v1/chat/completions",
        "stop_sequences": "stop",
        "top_logprobs": "logprobs",
    }
    RELATIONS: ClassVar[tuple[Relation, ...]] = (
        *GenerationBody.RELATIONS,
        NO_ECHO_OF_A_SEARCH,
        EMPTY_ANSWERS,
        ONE_STREAMED_ECHO,
    )
    LEAST_MAX_TOKENS: ClassVar[int] = 0

    prompt: Annotated[Any, WithJsonSchema(hints.PROMPT)] = Field(
        description="a text, texts, token ids or lists of token ids"
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="returns the log-probability of each token, and as many of the likeliest at each place"
    )
    echo: bool | None = Field(None, description="returns the prompt before the answer")
    add_special_tokens: bool | None = Field(
        None, description="false: the tokenizer adds none, as a text prompt spells its own"
    )

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

    def echo_options(self) -> EchoOptions:
        options = super().echo_options()
        has_logprobs = self.logprobs is not None
        return replace(
            options, echo=bool(self.echo), echo_logprobs=bool(self.echo) and has_logprobs, logprobs=has_logprobs
        )

    def prompts(self) -> tuple[Prompt, ...]:
        """One prompt, or several."""
        return read_prompts(self.prompt, add_special_tokens=self.add_special_tokens)
