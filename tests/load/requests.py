"""Drawn requests of all kinds, and what their answers must be."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.byte_tokenizer import ByteTokenizer
from millrace.stages.testing.scripted.script import Script

BAD = (
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400),
    ("/v1/completions", "no object", 400),
    ("/v1/responses", {"input": 5}, 400),
    ("/v1/nothing", {}, 404),
)
_tokenizer, _script = ByteTokenizer(), Script()


@dataclass
class Tally:
    """What became of requests."""

    num_sent: int = 0
    num_answered: int = 0
    num_left: int = 0
    num_bad: int = 0
    complaints: list[str] = field(default_factory=list)

    def complain(self, text: str) -> None:
        if len(self.complaints) < 50:
            self.complaints.append(text)


def expected(prompt: str, max_tokens: int) -> str:
    """The scripted engine's greedy answer to a completion."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    ids = _script.expected(_tokenizer.encode_text(prompt), params)
    return _tokenizer.decode(ids, skip_special_tokens=True)


async def send_one(http: aiohttp.ClientSession, draw: random.Random, tally: Tally, *, knows_answers: bool) -> None:
    """One request: of 100, 5 are bad, 20 are left before their end, the others are read whole."""
    tally.num_sent += 1
    kind = draw.random()
    try:
        async with asyncio.timeout(120):
            if kind < 0.05:
                await _bad(http, draw, tally)
            elif kind < 0.25:
                await _left(http, draw, tally)
            elif kind < 0.6:
                await _plain(http, draw, tally, knows_answers)
            else:
                await _mixed(http, draw, tally)
    except (TimeoutError, aiohttp.ClientError) as error:
        tally.complain(f"{type(error).__name__}: {error}")


async def _bad(http: aiohttp.ClientSession, draw: random.Random, tally: Tally) -> None:
    path, body, status = draw.choice(BAD)
    async with http.post(path, json=body) as response:
        await response.read()
        tally.num_bad += 1
        if response.status != status:
            tally.complain(f"{path} {body}: {response.status} instead of {status}")


async def _left(http: aiohttp.ClientSession, draw: random.Random, tally: Tally) -> None:
    body = {"prompt": _words(draw), "max_tokens": 200, "ignore_eos": True, "stream": True}
    response = await http.post("/v1/completions", json=body)
    for _ in range(draw.randrange(4)):
        await response.content.readline()
    response.close()  # the connection with it
    tally.num_left += 1


async def _plain(http: aiohttp.ClientSession, draw: random.Random, tally: Tally, knows_answers: bool) -> None:
    prompt, count, is_stream = _words(draw), draw.randrange(1, 40), draw.random() < 0.5
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": is_stream}
    async with http.post("/v1/completions", json=body) as response:
        text = await response.text()
    tally.num_answered += 1
    if response.status != 200:
        tally.complain(f"{response.status}: {text[:200]}")
        return
    if is_stream:
        events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        if events[-1] != "[DONE]":
            tally.complain(f"a stream ends in {events[-1][:100]}")
        choices = [json.loads(event)["choices"] for event in events[:-1]]
        text = "".join(choice[0]["text"] for choice in choices if choice)
    else:
        text = json.loads(text)["choices"][0]["text"]
    if knows_answers and text != expected(prompt, count):
        tally.complain(f"{prompt!r}: {text!r} is not the answer")


async def _mixed(http: aiohttp.ClientSession, draw: random.Random, tally: Tally) -> None:
    chat = [{"role": "user", "content": _words(draw)}]
    some: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": _words(draw), "n": 3, "max_tokens": 20, "seed": draw.randrange(99)}),
        ("/v1/completions", {"prompt": _words(draw), "stop": ["a", "xyz"], "max_tokens": 30, "logprobs": 2}),
        ("/v1/completions", {"prompt": _words(draw) * 4, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 20, "stream": draw.random() < 0.5}),
        ("/v1/responses", {"input": _words(draw), "max_output_tokens": 20, "stream": draw.random() < 0.5}),
        ("/v1/messages", {"messages": chat, "model": "any", "max_tokens": 20}),
        ("/tokenize", {"prompt": _words(draw)}),
    ]
    path, body = draw.choice(some)
    if path == "/v1/messages":
        body = body | {"model": (await _model(http))}
    async with http.post(path, json=body) as response:
        text = await response.text()
    tally.num_answered += 1
    if response.status != 200:
        tally.complain(f"{path}: {response.status}: {text[:200]}")


async def _model(http: aiohttp.ClientSession) -> str:
    async with http.get("/v1/models") as response:
        name: str = (await response.json())["data"][0]["id"]
        return name


def _words(draw: random.Random) -> str:
    return " ".join(draw.choice(("stone", "river", "mill", "wheel", "grain")) for _ in range(draw.randrange(1, 12)))
