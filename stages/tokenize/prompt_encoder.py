"""Converts prompts to token ids with a checkpoint's tokenizer and chat template.

Their errors become `Refused`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...model.errors import TemplateError
from ...model.text.chat_template import ChatTemplate, missing_template
from ...model.text.tokenizer import Side, Tokenizer
from ..errors import ErrorText, Refused, field_text
from ..messages import ChatPrompt
from ..pooling_params import no_instruction
from .yes_no import YesNoPrompt


class ModelEncoder:
    """The `PromptEncoder` of a checkpoint. All methods are thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        model_id: str,
        pair_prompt: str = "",
        yes_no: YesNoPrompt | None = None,
    ) -> None:
        """`pair_prompt` is put before the first text of a pair. `yes_no` is the prompt of a model that judges pairs."""
        self.tokenizer = tokenizer
        self.template = template
        self.model_id = model_id
        self.pair_prompt = pair_prompt
        self.yes_no = yes_no
        # the chat template of an adapter by its name, None if it has none; raises TemplateError
        self.find_template: Callable[[str], ChatTemplate | None] = lambda name: None

    def encode_text(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer adds."""
        return self.tokenizer.encode(_unicode(text, "prompt"))

    def encode_words(self, text: str, param: str = "bad_words") -> list[int]:
        """Ids of a text without special tokens; `param` names it in errors."""
        return self.tokenizer.encode(_unicode(text, param), add_special_tokens=False)

    def encode_text_cut(
        self, text: str, most: int, side: Side | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Ids of a text, at most `most`, special tokens kept."""
        try:
            return self.tokenizer.encode_cut(_unicode(text, "prompt"), most, side, add_special_tokens)
        except ValueError as error:
            raise Refused(field_text("truncate_prompt_tokens", str(error))) from None

    def encode_pair_cut(
        self, first: str, second: str, most: int, side: Side | None = None, instruction: str | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of two texts, at most `most`, and 0 or 1 per id: the text that it belongs to.

        They are joined by the prompt of a model that judges pairs, or else by the tokenizer.
        """
        texts = (_unicode(self.pair_prompt + first, "prompt"), _unicode(second, "prompt"))
        if instruction is not None:
            if self.yes_no is None:
                raise no_instruction()
            _unicode(instruction, "instruction")
        try:
            if self.yes_no is not None:
                token_ids = self.yes_no.encode(*texts, most, side, instruction)
                return token_ids, [0] * len(token_ids)
            token_ids, type_ids = self.tokenizer.encode_pair_cut(*texts, most, side)
            return token_ids, type_ids if self.tokenizer.gives_types else [0] * len(token_ids)
        except ValueError as error:
            raise Refused(field_text("truncate_prompt_tokens", str(error))) from None

    def count_prompt(self, text: str) -> int:
        """Number of tokens of a text with another text behind it, so without the special token at its end."""
        ids = self.encode_text(text)
        return len(ids) - int(ids[-1] in self.tokenizer.special_ids) if ids else 0

    def encode_chat(self, chat: ChatPrompt) -> list[int]:
        """Ids of the rendered template.

        The text of a special token inside a message is encoded as plain text.
        """
        try:
            template = self.find_template(chat.adapter) if chat.adapter else None
            template = self.template if template is None else template
            if template is None:
                raise missing_template(self.model_id)
            rendered = template.render(
                chat.messages,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                documents=chat.documents or None,
                tools=chat.tools or None,
                kwargs=chat.template_kwargs,
            )
        except TemplateError as error:
            code = "template_limit" if "template_limit" in str(error) else "invalid_value"
            if "the prompt is longer than" in str(error):
                code = "context_length_exceeded"
            text = ErrorText(("", error.field, error.problem) if error.field else (str(error),))
            raise Refused(text, code=code, param=error.param) from None
        return self.tokenizer.encode_chat(_unicode(rendered.marked, "messages"), rendered.mark)


def _unicode(text: str, param: str) -> str:
    """Returns `text`, or raises `Refused` for an unpaired surrogate.

    A JSON escape can produce one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f" holds an unpaired surrogate (U+{ord(text[error.start]):04X})"
        raise Refused(ErrorText(("", param, problem))) from None
    return text
