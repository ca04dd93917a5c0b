"""Converts prompts to token ids with a checkpoint's tokenizer and chat template.

Their errors become `Refused`.
"""

from __future__ import annotations

from ...model.errors import TemplateError
from ...model.text.chat_template import ChatTemplate, missing_template
from ...model.text.tokenizer import Tokenizer
from ..errors import Refused
from ..messages import ChatPrompt


class ModelEncoder:
    """The `PromptEncoder` of a checkpoint. All methods are thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, model_id: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.model_id = model_id

    def encode_text(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer adds."""
        return self.tokenizer.encode(_unicode(text, "prompt"))

    def encode_words(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        return self.tokenizer.encode(_unicode(text, "bad_words"), add_special_tokens=False)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Ids of two texts joined by the tokenizer, and 0 or 1 per id: the text that it belongs to."""
        return self.tokenizer.encode_pair(_unicode(first, "prompt"), _unicode(second, "prompt"))

    def encode_chat(self, chat: ChatPrompt) -> list[int]:
        """Ids of the rendered template.

        The text of a special token inside a message is encoded as plain text.
        """
        try:
            if self.template is None:
                raise missing_template(self.model_id)
            rendered = self.template.render(
                chat.messages,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                documents=chat.documents or None,
                tools=chat.tools or None,
                kwargs=chat.template_kwargs,
            )
        except TemplateError as error:
            code = "template_limit" if "template_limit" in str(error) else "invalid_value"
            raise Refused(str(error), code=code, param=error.param) from None
        return self.tokenizer.encode_chat(_unicode(rendered.marked, "messages"), rendered.mark)


def _unicode(text: str, param: str) -> str:
    """Returns `text`, or raises `Refused` for an unpaired surrogate.

    A JSON escape can produce one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{param} holds an unpaired surrogate (U+{ord(text[error.start]):04X})", param=param) from None
    return text
