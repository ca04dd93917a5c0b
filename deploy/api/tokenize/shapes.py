"""Models of the answers of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from ..schema.shapes import Count, Shape


class Tokens(Shape):
    """The token ids of a prompt."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizedText(Shape):
    """The text of token ids."""

    prompt: str
