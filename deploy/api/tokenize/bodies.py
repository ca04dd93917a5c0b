"""The bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from ...errors import wrong_field
from ..openai.chat_messages import MAX_MESSAGES, NOT_OVER, Message, TemplateKwargs
from ..openai.generation_body import ModelName
from ..openai.tools import Tools, check_tools
from ..schema import hints
from ..schema.body import Body
from ..schema.hints import has
from ..schema.relations import Relation
from ..schema.unsupported import TOKENIZING, Harmless


def _check_either(body: TokenizeBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise wrong_field("prompt", "exactly one of prompt and messages is required")


EITHER = Relation({"oneOf": [has("prompt", {"type": "string"}), has("messages", {"type": "array"})]}, _check_either)


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt or a chat."""

    FOREIGN: ClassVar[Harmless] = TOKENIZING
    RELATIONS: ClassVar[tuple[Relation, ...]] = (EITHER, NOT_OVER)

    model: ModelName = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    return_token_strs: bool | None = None

    def check(self) -> None:
        super().check()
        check_tools(self.tools, None)


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: ModelName = None
    tokens: Annotated[list[int], WithJsonSchema(hints.TOKEN_IDS)]
