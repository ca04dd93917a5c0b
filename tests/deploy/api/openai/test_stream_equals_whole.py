"""A joined stream equals the whole answer, for random prompts and parameters over HTTP.

About a hundred pairs; a thousand with MILLRACE_FULL=1.
"""

from __future__ import annotations

import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from tests.counts import count
from tests.deploy.running import RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NUM_PAIRS = count(100, 1000)
LETTERS = "etaoin shrdlu.,é漢🙂"


def draw(dice: Random) -> tuple[str, dict[str, Any]]:
    """A route and a body.

    The scripted device answers with a hash of the prompt, spelled in few bytes. So halves of é occur that do or do not
    fit together, and so do short stop strings.
    """
    prompt = "".join(dice.choices(LETTERS, k=dice.randint(1, 40)))
    body: dict[str, Any] = {"max_tokens": dice.randint(1, 30), "seed": dice.randrange(1000)}
    body["n"] = dice.choice((1, 1, 2, 5))
    options: dict[str, Any] = {
        "temperature": dice.choice((0, 1)),
        "stop": ["".join(dice.choices(LETTERS[:13], k=dice.randint(1, 3))) for _ in range(dice.randint(1, 3))],
        "include_stop_str_in_output": dice.random() < 0.5,
        "ignore_eos": True,
        "min_tokens": dice.randint(0, body["max_tokens"]),
        "stop_token_ids": [ord(dice.choice("etaoin"))],
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    body |= {name: value for name, value in options.items() if dice.random() < 0.4}
    if dice.random() < 0.5:
        logprobs = {"logprobs": True, "top_logprobs": dice.randint(0, 3)} if dice.random() < 0.4 else {}
        return CHAT, body | {"messages": [{"role": "user", "content": prompt}]} | logprobs
    if dice.random() < 0.4:
        body["logprobs"] = dice.randint(0, 3)
    body["echo"] = dice.random() < 0.3 and not ("logprobs" in body and body["n"] > 1)
    return TEXT, body | {"prompt": [prompt, prompt[::-1]] if dice.random() < 0.3 else prompt}


def stream(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    return server.post(path, body | {"stream": True}).events()


def joined(path: str, events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The joined pieces of each choice."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": [], "token_ids": [], "ends": []})
    for event in events:
        for piece in event["choices"]:
            choice = choices[piece["index"]]
            choice["text"] += piece["delta"].get("content", "") if path == CHAT else piece["text"]
            choice["logprobs"] += columns(path, piece["logprobs"])
            choice["token_ids"] += piece.get("token_ids", [])
            if piece["finish_reason"] is not None:
                choice["ends"].append((piece["finish_reason"], piece["stop_reason"]))
    return dict(choices)


def whole(path: str, answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if path == CHAT else choice["text"],
            "logprobs": columns(path, choice["logprobs"]),
            "token_ids": choice.get("token_ids", []),
            "ends": [(choice["finish_reason"], choice["stop_reason"])],
        }
        for choice in answer["choices"]
    }


def columns(path: str, logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry per token."""
    if logprobs is None:
        return []
    return logprobs["content"] if path == CHAT else list(zip(*logprobs.values(), strict=True))


@pytest.mark.slow
def test_the_pieces_of_a_stream_join_to_the_whole_answer(server: RunningServer):
    seed = int(os.environ.get("MILLRACE_SEED", "7"))
    dice, seen = Random(seed), defaultdict(int)
    pairs = [draw(dice) for _ in range(NUM_PAIRS)]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda pair: (server.post(*pair).json, stream(server, *pair)), pairs))
    for number, ((path, body), (answer, streamed)) in enumerate(zip(pairs, answers, strict=True)):
        at_once, (*events, done) = whole(path, answer), streamed
        where = f"seed {seed}, pair {number}: {path} {body}"
        assert done == "[DONE]" and joined(path, events) == at_once, where
        for choice in at_once.values():
            seen[choice["ends"][0][0]] += 1
            seen["stop string"] += isinstance(choice["ends"][0][1], str)
            seen["more than ASCII"] += not choice["text"].isascii()
            seen["half a character"] += "\ufffd" in choice["text"]
            if path == CHAT and choice["logprobs"]:
                assert "".join(entry["token"] for entry in choice["logprobs"]) == choice["text"], where
    wanted = ("stop", "length", "stop string", "more than ASCII", "half a character")
    assert all(seen[name] >= NUM_PAIRS / 20 for name in wanted), dict(seen)
