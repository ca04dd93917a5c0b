"""What the OpenAPI document can not say: how fields that are fine one by one must fit one another by number.

JSON Schema compares a field with constants only. Each relation is a claim about bodies that are valid by the schema:
broken, it is a 400 that names `param`, which `test_api_conformance.py` shows. Generators leave such bodies out
where valid ones are wanted. Numbers are those of the scripted model: a byte is a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.deploy.parsing import JsonLimits
from millrace.stages.limits import MAX_SEQUENCES

Body = Mapping[str, Any]
DEFAULT_MAX_TOKENS = 16  # of a completion


@dataclass(frozen=True)
class Relation:
    """`holds(body, context)`; `broken` is a smallest body that breaks it with a context of 512."""

    name: str
    param: str | None
    holds: Callable[[Body, int], bool]
    broken: Body


def prompts(body: Body) -> list[Any]:
    """Each of them, in any of the forms."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [] if prompt is None else [prompt]


def num_tokens(prompt: Any) -> int:
    return len(prompt.encode()) if isinstance(prompt, str) else len(prompt)


def num_chat_tokens(body: Body) -> int:
    """Each message in two special tokens, and one that begins the answer."""
    return 1 + sum(2 + num_tokens(_text(message["content"])) for message in body.get("messages") or ())


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def max_tokens(body: Body) -> int | None:
    newer, older = body.get("max_completion_tokens"), body.get("max_tokens")
    given = older if newer is None else newer
    return DEFAULT_MAX_TOKENS if given is None and "prompt" in body else given


def fits(body: Body, context: int) -> bool:
    asked = max_tokens(body) or 1
    longest = max([num_tokens(prompt) for prompt in prompts(body)] or [num_chat_tokens(body)])
    return longest + asked <= context


def is_wide_enough(body: Body, _context: int) -> bool:
    n, best_of = body.get("n") or 1, body.get("best_of")
    return best_of is None or (best_of >= n if body.get("use_beam_search") else best_of == n)


def is_short_enough(body: Body, _context: int) -> bool:
    longest = max_tokens(body)
    return longest is None or (body.get("min_tokens") or 0) <= longest


def has_short_numbers(value: Any, _context: int = 0) -> bool:
    """Those of fields that nobody knows too: the parser looks at them before anybody knows which field is which."""
    if isinstance(value, Mapping):
        return all(has_short_numbers(part) for part in value.values())
    if isinstance(value, list):
        return all(has_short_numbers(part) for part in value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return not is_number or max(map(len, re.findall("[0-9]+", json.dumps(value)))) <= JsonLimits().digits


PROMPT = {"prompt": "a"}
RELATIONS = (
    Relation("prompt and answer fit the context", "prompt", fits, {"prompt": "aa", "max_tokens": 511}),
    Relation(
        "at most 512 choices in all",
        "n",
        lambda body, _: max(1, len(prompts(body))) * (body.get("n") or 1) <= MAX_SEQUENCES,
        {"prompt": ["a"] * 5, "n": 128, "max_tokens": 1},
    ),
    Relation("best_of is n, or at least n in a search", "best_of", is_wide_enough, PROMPT | {"n": 2, "best_of": 3}),
    Relation("numbers are of 20 digits at most", None, has_short_numbers, PROMPT | {"unknown": 10**20}),
    Relation("min_tokens is at most max_tokens", "min_tokens", is_short_enough, PROMPT | {"min_tokens": 17}),
)


def with_whole_numbers(value: Any) -> Any:
    """The same with 1 for 1.0. To JSON Schema both are integers; here a count or a token id is written without a point,
    as that one can not be told from a mistake (T26)."""
    if isinstance(value, Mapping):
        return {name: with_whole_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [with_whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
