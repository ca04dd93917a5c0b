"""`/api/generate`, and what clients ask about models, over bare sockets."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import pytest

from tests.deploy.api.ollama.test_chat import lines_of
from tests.deploy.running import RunningServer

PATH = "/api/generate"
OPTIONS = {"temperature": 0, "num_predict": 7}
USER, END, ASSISTANT = 258, 256, 259  # tokens of the scripted model


def ask(server: RunningServer, **fields: Any) -> Any:
    return server.post(PATH, {"stream": False, "options": OPTIONS} | fields).json


def test_a_prompt_is_one_turn_of_a_chat_and_a_raw_one_is_itself(server: RunningServer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = server.post("/api/chat", {"messages": messages, "stream": False, "options": OPTIONS}).json
    assert ask(server, prompt="hi", system="be brief")["response"] == chat["message"]["content"]
    raw = ask(server, prompt="hi", raw=True)
    text = server.post("/v1/completions", {"prompt": "hi", "temperature": 0, "max_tokens": 7}).json["choices"][0][
        "text"
    ]
    assert (raw["response"], raw["prompt_eval_count"]) == (text, 2) and "context" not in raw
    *pieces, last = lines_of(server.post(PATH, {"prompt": "hi", "raw": True, "options": OPTIONS}))
    assert "".join(line["response"] for line in pieces) == text and last["response"] == ""


def test_a_raw_prompt_may_use_all_of_the_context(server: RunningServer):
    answer = ask(server, prompt="hi", raw=True, options={"temperature": 0})
    assert answer["eval_count"] > 16  # what a completion has without max_tokens


def test_the_context_of_an_answer_goes_before_the_next_prompt(server: RunningServer):
    first = ask(server, prompt="hi")
    assert first["context"][:5] == [USER, 104, 105, END, ASSISTANT]
    assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
    second = ask(server, prompt="ho", context=first["context"])
    assert second["context"][: len(first["context"]) + 3] == [*first["context"], USER, 104, 111]
    assert second["prompt_eval_count"] == len(first["context"]) + 5


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix: this server does not fill in the middle"),
        ({"prompt": "a", "template": "{{ .Prompt }}"}, "template: a request cannot bring its own"),
        ({"prompt": "a", "images": ["aGk="]}, "images: this model takes text only"),
        ({"prompt": "a", "raw": True, "system": "b"}, "system"),
        ({"prompt": "a", "context": [260]}, "context"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x" * 9999}, "maximum context length"),
        ({"prompt": "a", "messages": [{}]}, "messages"),
        ({"prompt": "a", "raw": True, "options": {"top_p": 0}}, "options.top_p = 0"),
        ({"options": {"top_p": 0}}, "options.top_p = 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_is_named(server: RunningServer, body: Any, named: str):
    answer = server.post(PATH, body)
    assert answer.status == 400 and named in answer.json["error"]


def test_vectors_have_length_one_and_are_those_of_the_other_api(server: RunningServer):
    texts = ["the sky", "a dog"]
    told = server.post("/api/embed", {"model": "scripted", "input": texts, "options": {}, "keep_alive": "5m"}).json
    known = server.post("/v1/embeddings", {"input": texts, "normalize": True}).json["data"]
    assert np.allclose(told["embeddings"], [item["embedding"] for item in known], atol=1e-6)
    assert np.allclose(np.linalg.norm(told["embeddings"], axis=1), 1, atol=1e-5)
    assert told["total_duration"] > 0 and told["prompt_eval_count"] == 12
    one = server.post("/api/embeddings", {"prompt": "a dog"}).json
    assert np.allclose(one["embedding"], told["embeddings"][1], atol=1e-6)
    refused = server.post("/api/embed", {"input": [1, 2]})
    assert refused.status == 400 and refused.json["error"].startswith("input")


def test_models_are_listed_with_a_tag_and_described(server: RunningServer):
    (listed,) = server.get("/api/tags").json["models"]
    (loaded,) = server.get("/api/ps").json["models"]
    assert listed["name"] == listed["model"] == loaded["name"] == "scripted:latest"
    assert len(listed["digest"]) == 64 and loaded["context_length"] == 512
    assert datetime.fromisoformat(loaded["expires_at"]) > datetime.fromisoformat(listed["modified_at"])
    for field in ("model", "name"):
        shown = server.post("/api/show", {field: "scripted"}).json
        assert shown["capabilities"] == ["completion", "tools", "embedding"]
        assert shown["model_info"]["unknown.context_length"] == 512 and "num_ctx" in shown["parameters"]
    assert server.post("/api/show", {"model": "other"}).status == 404
    assert server.get("/api/version").json["version"].split(".")[0].isdigit()


def test_only_the_served_model_is_pulled_and_nothing_is_changed(server: RunningServer):
    assert lines_of(server.post("/api/pull", {"model": "scripted"})) == [{"status": "success"}]
    assert server.post("/api/pull", {"model": "scripted", "stream": False}).json == {"status": "success"}
    missing = server.post("/api/pull", {"model": "llama3"})
    assert missing.status == 404 and "millrace serve llama3" in missing.json["error"]
    for path in ("create", "copy", "push", "blobs/sha256:00"):
        refused = server.post(f"/api/{path}", {"model": "scripted"})
        assert refused.status == 403 and refused.json["error"].startswith(f"POST /api/{path}: ")
    assert server.get("/api/delete", method="DELETE").status == 403
    assert server.get("/api/nothing").json == {"error": "there is no such route"}
