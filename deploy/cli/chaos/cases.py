"""What the clients ask, and the right answers: those of one engine that nothing disturbs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from ....stages.errors import NotStartedError

if TYPE_CHECKING:
    import aiohttp

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BEGINNINGS = (
    *("Once upon a time", "The dog", "One day, a girl named Lily", "My cat is", "Zoe and Tom went", "In the wood"),
    *("There was a big red ball", "A ship", "Mom said", "The sun was hot"),
)
STOPS = (".", " the", "and", " was", "\n", "Tom")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG_TOKENS = 160  # of an answer that lasts
REFERENCE_TIMEOUT_S = 300.0
REFERENCE_TRIES = 3


@dataclass(frozen=True, slots=True)
class RightChoice:
    """One choice of an answer."""

    text: str
    finish_reason: str


@dataclass(slots=True)
class Case:
    """One request, asked again and again. `turns_after`: the case whose answer this conversation goes on from."""

    number: int
    path: str
    body: dict[str, Any]
    turns_after: Case | None = None
    choices: tuple[RightChoice, ...] = ()
    num_tokens: int = 0  # of all choices
    kind: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)  # of a conversation, its answer too


def draw_cases(draw: random.Random, num_cases: int) -> list[Case]:
    """Requests of all kinds; the first ones are of different kinds, so few are enough for each to be there."""
    makers = (_plain, _seeded, _many, _stops, _long, _schema, _turn, _shared)
    cases: list[Case] = []
    for number in range(num_cases):
        cases.append(makers[number % len(makers)](draw, number, cases))
    return cases


def _plain(draw: random.Random, number: int, cases: Sequence[Case]) -> Case:
    body = {"prompt": draw.choice(BEGINNINGS), "max_tokens": draw.randint(1, 60), "temperature": 0}
    return Case(number, COMPLETIONS, body, kind="greedy")


def _seeded(draw: random.Random, number: int, cases: Sequence[Case]) -> Case:
    body = {"prompt": draw.choice(BEGINNINGS), "max_tokens": draw.randint(8, 60)}
    return Case(number, COMPLETIONS, body | {"temperature": 0.9, "seed": draw.randrange(1 << 30)}, kind="seed")


def _many(draw: random.Random, number: int, cases: Sequence[Case]) -> Case:
    body = {"prompt": draw.choice(BEGINNINGS), "max_tokens": draw.randint(4, 40), "n": draw.randint(2, 3)}
    return Case(number, COMPLETIONS, body | {"temperature": 1.0, "seed": draw.randrange(1 << 30)}, kind="n")


def _stops(draw: random.Random, number: int, cases: Sequence[Case]) -> Case:
    body = {"prompt": draw.choice(BEGINNINGS), "max_tokens": 60, "temperature": 0}
    return Case(number, COMPLETIONS, body | {"stop": draw.sample(STOPS, 2)}, kind="stop")


def _long(draw: random.Random, number: int, cases: Sequence[Case]) -> Case:
    body = {"prompt": draw.choice(BEGINNINGS), "max_tokens": LONG_TOKENS, "ignore_eos": True, "temperature": 0.8}
    return Case(number, COMPLETIONS, body | {"seed": draw.randrange(1 << 30)}, kind="long")


def _schema(draw: random.Random, number: int, cases: Sequence[Case]) -> Case:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": f"{draw.choice(BEGINNINGS)}: a person"}]
    body = {"messages": messages, "max_tokens": 60, "temperature": 0.7, "seed": draw.randrange(1 << 30)}
    return Case(number, CHAT, body | {"response_format": form}, kind="schema")


def _turn(draw: random.Random, number: int, cases: Sequence[Case]) -> Case:
    before = [case for case in cases if case.kind == "turns"]
    last = before[-1] if before and len(before) % 3 else None  # three turns, and then another conversation
    body = {"messages": [{"role": "user", "content": draw.choice(BEGINNINGS)}], "max_tokens": 30, "temperature": 0}
    return Case(number, CHAT, body, turns_after=last, kind="turns")


def _shared(draw: random.Random, number: int, cases: Sequence[Case]) -> Case:
    prompt = f"{' '.join(BEGINNINGS)} {' '.join(BEGINNINGS[:4])} {draw.choice(BEGINNINGS)}"
    return Case(number, COMPLETIONS, {"prompt": prompt, "max_tokens": 24, "temperature": 0}, kind="prefix")


async def learn(session: aiohttp.ClientSession, url: str, cases: Sequence[Case], at_once: int) -> None:
    """Asks for all right answers, `at_once` at a time: so few that none is preempted. Raises `NotStartedError`."""
    gate = asyncio.Semaphore(at_once)

    async def ask(some: Sequence[Case]) -> None:
        async with gate:
            for case in some:  # each turn needs the answer of the one before
                await _learn_one(session, url, case)

    turns = [case for case in cases if case.kind == "turns"]
    await asyncio.gather(ask(turns), *(ask([case]) for case in cases if case.kind != "turns"))


async def _learn_one(session: aiohttp.ClientSession, url: str, case: Case) -> None:
    if case.turns_after is not None:
        case.body["messages"] = [*case.turns_after.messages, *case.body["messages"]]
    answer = orjson.loads(await _asked(session, url, case))
    choices = sorted(answer["choices"], key=lambda one: int(one["index"]))
    case.choices = tuple(RightChoice(text_of(one), one["finish_reason"]) for one in choices)
    case.num_tokens = answer["usage"]["completion_tokens"]
    if case.kind == "turns":
        case.messages = [*case.body["messages"], {"role": "assistant", "content": case.choices[0].text}]


async def _asked(session: aiohttp.ClientSession, url: str, case: Case) -> bytes:
    """Asks again after a refusal: a machine that stood still for a while may have cost a helper process its time."""
    for tries_left in reversed(range(REFERENCE_TRIES)):
        async with asyncio.timeout(REFERENCE_TIMEOUT_S), session.post(url + case.path, json=case.body) as response:
            data = await response.read()
            if response.status == 200:
                break
            if not tries_left:
                raise NotStartedError(f"the reference answered {response.status} to case {case.number}: {data[:300]!r}")
    return data


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, of either API, whole or a piece of it."""
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice.get("delta") or {}
    return str(message.get("content") or "")
