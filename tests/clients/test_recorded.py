"""Bodies as Open WebUI and Continue send them are answered with what those clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import KEY
from tests.clients.recorded import EVERYTHING, Call
from tests.deploy.running import Answer, RunningServer

pytestmark = [pytest.mark.clients, pytest.mark.slow]

READ: dict[str, tuple[str, ...]] = {  # path -> what the clients read of its answer
    "/api/version": ("version",),
    "/api/tags": ("models",),
    "/api/ps": ("models",),
    "/api/show": ("parameters", "template", "model_info", "capabilities"),
    "/api/embed": ("embeddings",),
    "/api/embeddings": ("embedding",),
    "/v1/models": ("data",),
    "/v1/embeddings": ("data",),
}


@pytest.mark.parametrize("call", EVERYTHING.values(), ids=EVERYTHING)
def test_what_a_client_sends_is_answered_with_what_it_reads(demo: RunningServer, call: Call):
    method, path, body = call
    key = {"Authorization": f"Bearer {KEY}"}
    answer = demo.get(path, key) if method == "GET" else demo.post(path, body, key)
    assert answer.status == 200, answer.body
    if path in READ:
        assert all(answer.json[name] for name in READ[path])
    else:
        _, end = told(answer, path, body.get("stream", path.startswith("/api/")))
        assert end["num_tokens"] > 0 and end["reason"] in ("stop", "length", "tool_calls")


def told(answer: Answer, path: str, is_stream: bool) -> tuple[str, dict[str, Any]]:
    """The text, which may be empty, and how it ended."""
    if path.startswith("/api/"):
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert is_stream or len(lines) == 1
        messages = [line.get("message") or {"content": line["response"]} for line in lines]
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        last = lines[-1]
        assert last["done"] and last["total_duration"] > 0
        end = {"num_tokens": last["eval_count"], "reason": last["done_reason"], "tool_calls": calls}
        return "".join(message["content"] for message in messages), end
    chunks = answer.events()[:-1] if is_stream else [answer.json]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    num_tokens = usages[-1]["completion_tokens"] if usages else len(choices)
    calls = [call for part in parts for call in part.get("tool_calls") or ()]
    text = "".join(part.get("content") or part.get("text") or "" for part in parts)
    return text, {"num_tokens": num_tokens, "reason": reasons[-1], "tool_calls": calls}
