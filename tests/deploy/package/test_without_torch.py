"""An installation without PyTorch, Triton and transformers: what pip installs, and a server in such a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from tests.deploy.test_native_start import needs_native
from tests.docs import without_torch
from tests.docs.generated import ROOT

SERVE = """
import sys
sys.modules.update(dict.fromkeys(("torch", "triton", "transformers")))  # importing one is an error
from millrace.deploy.cli.main import main
sys.exit(main(["serve", "--port", "0", "--log-level", "error"]))
"""
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


def test_the_file_for_pip_has_the_dependencies_but_the_large_ones() -> None:
    text = (ROOT / without_torch.FILE).read_text()
    assert text == without_torch.requirements(), "run python -m tests.docs"
    names = [line.split(">")[0] for line in text.splitlines() if not line.startswith("#")]
    assert "numpy" in names and not without_torch.LEFT_OUT & set(names)


@needs_native
@pytest.mark.slow
def test_a_server_without_the_large_packages_has_all_that_serving_needs() -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]

        def ask(path: str, **body: Any) -> Any:
            data = json.dumps(body).encode() if body else None
            request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.read()

        messages = [{"role": "user", "content": "Hello"}]
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        chat = json.loads(ask("/v1/chat/completions", messages=messages, response_format=form, max_tokens=40))
        assert json.loads(chat["choices"][0]["message"]["content"])["a"] in ("x", "y")
        assert json.loads(ask("/v1/embeddings", input="Hello"))["data"][0]["embedding"]
        assert b"vllm:generation_tokens_total" in ask("/metrics") and b"<html" in ask("/dashboard")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
