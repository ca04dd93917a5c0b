"""The openai package of npm, unmodified but for where it looks; `openai_client.mjs` is the program that uses it.

    npm install --prefix DIR openai && MILLRACE_NODE_MODULES=DIR/node_modules python -m pytest tests/clients

Skipped where there is no node, or the variable names no folder with the package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import KEY
from tests.deploy.running import RunningServer

NODE = shutil.which("node")
NODE_MODULES = Path(os.environ.get("MILLRACE_NODE_MODULES", "node_modules")).absolute()
SCRIPT = Path(__file__).with_name("openai_client.mjs")

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(NODE is None, reason="node is missing"),
    pytest.mark.skipif(
        not (NODE_MODULES / "openai").is_dir(),
        reason="openai of npm is missing: npm install --prefix DIR openai, and MILLRACE_NODE_MODULES=DIR/node_modules",
    ),
]


def result_of(case: str, server: RunningServer) -> Any:
    """What the program printed."""
    command = [str(NODE), str(SCRIPT), str(NODE_MODULES), server.url + "/v1", KEY, case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_coat(coat: Any) -> None:
    assert coat["colour"] in ("red", "green", "blue") and coat["layers"] in (1, 2, 3) and len(coat) == 2


def test_models_are_listed(demo: RunningServer):
    assert result_of("models", demo) == {"ids": ["demo"]}


def test_a_chat_answers_and_streams_the_same(demo: RunningServer):
    found = result_of("chat", demo)
    choice = found["whole"]["choices"][0]
    assert found["streamed"] == choice["message"]["content"] != "" and choice["finish_reason"] == "stop"
    told = found["whole"]["usage"]["completion_tokens"]
    assert found["last"]["usage"]["completion_tokens"] == told > 0 and found["last"]["choices"] == []


def test_completions_answer_and_stream_the_same(demo: RunningServer):
    found = result_of("completions", demo)
    choice = found["whole"]["choices"][0]
    assert found["streamed"] == choice["text"] == "".join(choice["logprobs"]["tokens"]) != ""


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(demo: RunningServer):
    found = result_of("logprobs", demo)
    whole = found["whole"]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in found["streamed"]] == [entry["token"] for entry in whole] and len(whole) == 4
    for one, other in zip(found["streamed"], whole, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3) and len(one["top_logprobs"]) == 2


def test_tools_are_called_and_their_results_go_back(demo: RunningServer):
    found = result_of("tools", demo)
    calls = [found[name]["choices"][0]["message"]["tool_calls"] for name in ("first", "streamed")]
    assert [[call["function"]["name"] for call in each] for each in calls] == [["paint"]] * 2
    check_coat(json.loads(calls[0][0]["function"]["arguments"]))
    assert calls[0][0]["function"]["arguments"] == calls[1][0]["function"]["arguments"]
    final = found["final"]["choices"][0]["message"]
    assert final["content"] and "tool_calls" not in final


def test_its_own_loop_runs_the_tools_that_a_model_calls(parrot: RunningServer):
    found = result_of("run_tools", parrot)
    assert found["painted"] == [{"colour": "red", "layers": 2}]
    assert [turn["role"] for turn in found["messages"]] == ["user", "assistant", "tool"]
    assert found["messages"][1]["content"] == "On it." and found["messages"][2]["content"] == "dry"


def test_its_parse_helper_reads_an_answer_of_a_schema(demo: RunningServer):
    choice = result_of("parse", demo)["whole"]["choices"][0]
    check_coat(choice["message"]["parsed"])


def test_embeddings_are_the_same_by_either_encoding(demo: RunningServer):
    found = result_of("embeddings", demo)
    floats, unsaid = ([item["embedding"] for item in found[name]["data"]] for name in ("floats", "unsaid"))
    assert len(floats) == 2 and np.allclose(floats, unsaid, atol=1e-2)
    assert np.allclose(np.linalg.norm(floats, axis=1), 1, atol=1e-3)


def test_responses_answer_stream_stay_and_are_parsed(demo: RunningServer):
    found = result_of("responses", demo)
    assert found["whole"]["output_text"] == found["streamed"] == found["again"] != ""
    check_coat(found["parsed"])


def test_errors_have_the_packages_own_classes(demo: RunningServer):
    found = result_of("errors", demo)
    assert found["key"]["class"] == "AuthenticationError"
    assert (found["model"]["class"], found["model"]["code"]) == ("NotFoundError", "model_not_found")
    assert (found["temperature"]["class"], found["temperature"]["param"]) == ("BadRequestError", "temperature")


def test_a_stream_that_is_left_makes_no_more_tokens(demo: RunningServer):
    def metric(name: str) -> float:
        lines = demo.get("/metrics", {"Authorization": f"Bearer {KEY}"}).body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    before = metric("vllm:generation_tokens_total")
    assert len(result_of("leave", demo)["pieces"]) == 3
    deadline = time.monotonic() + 60
    while metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert 3 <= metric("vllm:generation_tokens_total") - before < 1000
