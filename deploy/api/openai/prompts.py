"""The four forms of a prompt in completions: a text, texts, token ids, lists of token ids.

Limits that depend on the model are checked later: length and vocabulary at intake, and at tokenize whether a text has
a token, as an empty one has with a tokenizer that adds BOS.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ....stages.messages import Prompt
from ....stages.request_limits import MAX_CHARS_PER_TOKEN, MAX_PROMPTS
from ...errors import ApiError, wrong_field

LEAST_CHARS = 1 << 20  # tokenized even if the context is shorter: documents are counted, then split


def read_prompts(
    value: Any, name: str = "prompt", most: int = MAX_PROMPTS, add_special_tokens: bool | None = None
) -> tuple[Prompt, ...]:
    """Reads prompts in any of the four forms, at most `most`.

    With `add_special_tokens` False the tokenizer adds none to a text. `ApiError` 400 names the field as `name`.
    """
    prompts = _read(value, name, most)
    if add_special_tokens is False:
        prompts = tuple(replace(prompt, add_special_tokens=False) for prompt in prompts)
    return prompts


def _read(value: Any, name: str, most: int) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (Prompt(text=value),)
    if not isinstance(value, list):
        raise _wrong(name, "must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not value:
        raise wrong_field(name, "is an empty list; send at least one text or token id", code="empty_prompt")
    if type(value[0]) is int:
        return (_ids(value, name),)
    if len(value) > most:
        raise wrong_field(name, f"has {len(value)} entries; must have at most {most}")
    if all(isinstance(item, str) for item in value):
        return tuple(Prompt(text=item) for item in value)
    if all(isinstance(item, list) for item in value):
        return tuple(_ids(item, name) for item in value)
    raise _wrong(name, "mixes forms; send only texts, or only token ids, or only lists of token ids")


def _ids(token_ids: list[Any], name: str) -> Prompt:
    if not token_ids:
        raise wrong_field(name, "holds an empty list; send at least one token id", code="empty_prompt")
    if set(map(type, token_ids)) != {int}:  # a loop in C: 5 ms for a prompt of 256k ids
        raise _wrong(name, "token ids must be integers")
    if min(token_ids) < 0 or max(token_ids) >= 2**31:
        raise wrong_field(name, "token ids must be in the model's vocabulary")
    return Prompt(token_ids=np.array(token_ids, np.int32))


def _wrong(name: str, problem: str) -> ApiError:
    return wrong_field(name, problem, code="invalid_type")


def check_length(count: int, max_model_len: int, param: str) -> None:
    """Raises `ApiError` for a text of `count` characters if that is too long to be tokenized beside other requests."""
    most = max(MAX_CHARS_PER_TOKEN * max_model_len, LEAST_CHARS)
    if count > most:
        problem = f"has {count} characters: at most {most}; send the text in pieces"
        raise wrong_field(param, problem, code="context_length_exceeded")
