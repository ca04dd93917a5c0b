"""What the OpenAPI document cannot say: how fields that are fine one by one must fit one another by number.

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

from millrace.deploy.api.token_ids.body import flatten
from millrace.deploy.errors import ApiError
from millrace.deploy.http.json_limits import JsonLimits
from millrace.stages.request_limits import MAX_SEQUENCES

Body = Mapping[str, Any]
DEFAULT_MAX_TOKENS = 16  # of a completion


@dataclass(frozen=True)
class Relation:
    """`holds(body, context)`; `broken` is a smallest body that breaks it with a context of 512."""

    name: str
    param: str | None
    holds: Callable[[Body, int], bool]
    broken: Body
    path: str = "/v1/completions"


def flat(body: Body) -> Body:
    """With sampling_params beside the rest, and token ids as the prompt that they are; where they are none, and the
    operation knows no such field, as it is. TGI's fields by the names of completions."""
    if isinstance(body.get("inputs"), str):
        parameters = body.get("parameters") or {}
        return {"prompt": body["inputs"], "max_tokens": parameters.get("max_new_tokens") or 1, "n": 1}
    try:
        return flatten(body) if "token_ids" in body else body
    except ApiError:
        return body


def prompts(body: Body) -> list[Any]:
    """Each of them, in any of the forms."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt] if prompt else []


def num_tokens(prompt: Any) -> int:
    return len(prompt.encode()) if isinstance(prompt, str) else len(prompt)


def num_chat_tokens(body: Body) -> int:
    """At most: each message in two special tokens, and one that begins the answer. All texts count, wherever."""
    told = [body.get(name) for name in ("instructions", "system", "messages", "input", "queries", "query", "tools")]
    return (
        1 + sum(map(_most_tokens, told)) + _most_tokens([body.get(name) for name in ("documents", "text_1", "text_2")])
    )


def _most_tokens(value: Any) -> int:
    if isinstance(value, str):
        return num_tokens(value) + 3
    if isinstance(value, Mapping):
        is_turn = not {"role", "type"}.isdisjoint(value)
        return 4 * is_turn + sum(_most_tokens(part) for name, part in value.items() if name not in ("role", "type"))
    return sum(map(_most_tokens, value)) if isinstance(value, list) else 0


def number(body: Body, name: str) -> int | None:
    """None too if it is none: where a field has no meaning it may hold anything."""
    given = body.get(name)
    return given if isinstance(given, int) else None


def max_tokens(body: Body) -> int | None:
    newer, older = body.get("max_completion_tokens", body.get("max_output_tokens")), body.get("max_tokens")
    given = older if newer is None else newer
    if not isinstance(given, int | None):
        return None  # of a wrong type, on purpose
    return DEFAULT_MAX_TOKENS if given is None and prompts(body) else given


def fits(body: Body, context: int) -> bool:
    asked = max_tokens(body) or 1
    longest = max([num_tokens(prompt) for prompt in prompts(body)] or [num_chat_tokens(body)])
    return longest + asked <= context


def has_few_choices(body: Body, _context: int) -> bool:
    return max(1, len(prompts(body))) * max(number(body, "n") or 1, number(body, "best_of") or 1) <= MAX_SEQUENCES


def is_wide_enough(body: Body, _context: int) -> bool:
    n, best_of = number(body, "n") or 1, number(body, "best_of")
    may_rank = body.get("use_beam_search") or ("prompt" in body and not body.get("stream"))
    return best_of is None or best_of == n or bool(best_of > n and may_rank)


def is_short_enough(body: Body, context: int) -> bool:
    """Of a chat that names no longest answer, the rest of the context is that."""
    longest = max_tokens(body)
    return (number(body, "min_tokens") or 0) <= (context - num_chat_tokens(body) if longest is None else longest)


def streams_what_it_can(body: Body, _context: int) -> bool:
    """Where the fields that disagree may be in different objects."""
    is_echoed = body.get("echo") and body.get("logprobs") is not None and (number(body, "n") or 1) > 1
    asks = body.get("use_beam_search") or body.get("prompt_logprobs") is not None or is_echoed
    return bool(body.get("stream") or not body.get("return_progress")) and not (body.get("stream") and asks)


def has_as_many(body: Body, _context: int) -> bool:
    """Queries and documents, by either name."""
    for query, document in (("queries", "documents"), ("text_1", "text_2")):
        queries, documents = (body.get(name) for name in (query, document))
        many = [len(texts) if isinstance(texts, list) else 1 for texts in (queries, documents)]
        if queries is not None and documents is not None and many[0] not in (1, many[1]):
            return False
    return True


def has_more_than_thoughts(body: Body, _context: int) -> bool:
    """Items of type reasoning belong to the message behind them."""
    items = body.get("input")
    is_thought = [isinstance(item, Mapping) and item.get("type") == "reasoning" for item in items or ()]
    return not isinstance(items, list) or not all(is_thought)


def thinks_less_than_it_may(body: Body, _context: int) -> bool:
    thinking = body.get("thinking") if isinstance(body.get("thinking"), Mapping) else {}
    budget, most = number(thinking, "budget_tokens"), number(body, "max_tokens")
    return budget is None or most is None or budget < most


def has_short_numbers(value: Any, _context: int = 0) -> bool:
    """Unknown fields included: the parser checks them before fields are told apart."""
    if isinstance(value, Mapping):
        return all(has_short_numbers(part) for part in value.values())
    if isinstance(value, list):
        return all(has_short_numbers(part) for part in value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return False
    return not is_number or max(map(len, re.findall("[0-9]+", json.dumps(value)))) <= JsonLimits().digits


PROMPT = {"prompt": "a"}
HI = [{"role": "user", "content": "hi"}]
RELATIONS = (
    Relation("prompt and answer fit the context", "prompt", fits, {"prompt": "aa", "max_tokens": 511}),
    Relation(
        "at most 512 choices in all",
        "n",
        has_few_choices,
        {"prompt": ["a"] * 5, "n": 128, "max_tokens": 1},
    ),
    Relation("best_of is n, or at least n in a search", "best_of", is_wide_enough, PROMPT | {"n": 3, "best_of": 2}),
    Relation("numbers are of 20 digits and 64 bits at most", None, has_short_numbers, PROMPT | {"unknown": 10**20}),
    Relation(
        "a stream is of no search and tells no prompt_logprobs",
        "prompt_logprobs",
        streams_what_it_can,
        PROMPT | {"stream": True, "prompt_logprobs": 1},
    ),
    Relation(
        "one query, or as many as documents", "queries", has_as_many, {"queries": ["a"] * 2, "documents": "a"}, "/score"
    ),
    Relation(
        "thoughts are fewer than max_tokens",
        None,
        thinks_less_than_it_may,
        {
            "max_tokens": 2,
            "thinking": {"type": "enabled", "budget_tokens": 2},
            "messages": [{"role": "user", "content": ""}],
        },
        "/v1/messages",
    ),
    Relation(
        "an input is more than thoughts",
        "input",
        has_more_than_thoughts,
        {"input": [{"type": "reasoning", "summary": []}]},
        "/v1/responses",
    ),
    Relation("min_tokens is at most max_tokens", "min_tokens", is_short_enough, PROMPT | {"min_tokens": 17}),
)


def with_whole_numbers(value: Any) -> Any:
    """The same with 1 for 1.0. To JSON Schema both are integers; here a count or a token id is written without a point,
    as that one cannot be told from a mistake."""
    if isinstance(value, Mapping):
        return {name: with_whole_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [with_whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
