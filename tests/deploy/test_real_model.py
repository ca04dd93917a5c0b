"""`millrace serve` and `millrace complete` with a checkpoint, from the command line."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.running import RunningServer
from tests.model.checkpoints import make_checkpoint

COMMAND = [sys.executable, "-m", "millrace.deploy"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model") / "tiny"
    make_checkpoint("qwen2", root)
    return root


@pytest.mark.slow
def test_a_checkpoint_is_served_and_completed_alike(checkpoint):
    with RunningServer(
        command=[*COMMAND, "serve", str(checkpoint), "--port", "0", "--served-model-name", "tiny"]
    ) as server:
        assert server.ready["models"] == ["tiny"]
        (model,) = server.get("/v1/models").json["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 2048)
        asked = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        whole = server.post("/v1/completions", asked)
        assert whole.status == 200 and whole.json["usage"]["completion_tokens"] == 8
        text = whole.json["choices"][0]["text"]
        events = server.post("/v1/completions", asked | {"stream": True}).events()
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
        beams = {"prompt": "Once upon a time", "use_beam_search": True, "max_tokens": 8, "ignore_eos": True}
        assert server.post("/v1/completions", beams).json["choices"][0]["text"] == text, "one beam is greedy"
        best = server.post("/v1/completions", beams | {"n": 3, "logprobs": 1}).json["choices"]
        likely = [sum(choice["logprobs"]["token_logprobs"]) for choice in best]
        assert len(likely) == 3 and likely == sorted(likely, reverse=True)
        chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
        assert chat.status == 200
        shown = server.post("/api/show", {"model": "tiny"}).json  # to clients of Ollama, by what the template shows
        assert ("tools" in shown["capabilities"]) == ("tools" in shown["template"]) is False
        tokens = server.post("/tokenize", {"prompt": "Größe 🙂 漢"}).json["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json == {"prompt": "Größe 🙂 漢"}
        wrong = server.post("/v1/completions", asked | {"stop_token_ids": [640]})
        assert (wrong.status, wrong.error["param"]) == (400, "stop_token_ids")
        info = server.get("/server_info").json
        rows = {row["name"]: row["bytes"] for row in info["memory"]["rows"]}
        assert info["memory"]["total_bytes"] == sum(rows.values())
        assert rows["kv_cache"] == info["blocks"]["num_blocks"] * info["memory"]["kv_cache"]["bytes_per_block"]
        assert (info["config"]["engine"]["max_model_len"], info["model"]["device"]) == (2048, "cpu")
        phases = ("import", "resolve", "tokenizer", "weights", "cache", "rates", "pipeline", "warm_up")
        assert set(info["startup_s"]) - {"library"} == set(phases), "there is a library where torch does not compute"
        assert all(took >= 0 for took in info["startup_s"].values())
        (head, *table), num_rows = re.findall(r"^.*memory\.plan.*$|^  \| .*$", server.errors(), re.MULTILINE), len(rows)
        assert "memory.plan logger=millrace.stages" in head and len(table) == num_rows + 1  # and the total
        assert table[0].split()[1] == "weights" and table[-1].split()[1] == "total"
        server.signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.errors()


@pytest.mark.slow
def test_complete_runs_the_model_in_its_own_process(checkpoint):
    command = [*COMMAND, "complete", "Once upon a time", "--model", str(checkpoint), "--max-tokens", "5", "--stats"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    assert "TTFT" in done.stderr and "answer" in done.stderr


@pytest.mark.slow
def test_a_model_that_is_none_is_one_line_and_exit_code_3(tmp_path):
    arguments = [*COMMAND, "serve", str(tmp_path), "--port", "0"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert done.stderr.startswith("millrace: ") and done.stderr.count("\n") == 1 and str(tmp_path) in done.stderr


@pytest.mark.slow
def test_a_port_that_is_taken_is_exit_code_3(server: RunningServer):
    arguments = [*COMMAND, "serve", "--port", str(server.address[1])]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert f"127.0.0.1:{server.address[1]}" in done.stderr and "Traceback" not in done.stderr
