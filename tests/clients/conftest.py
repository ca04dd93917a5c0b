from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.deploy.running import RunningServer

KEY = "a key of the tests"  # what every client of these tests is given, with the address


@pytest.fixture(scope="package")
def demo() -> Iterator[RunningServer]:
    """The bundled model. It cannot call tools or write JSON by itself: where it does, a grammar made it."""
    flags = ["--port", "0", "--api-key", KEY, "--max-num-seqs", "8", "--pooling", "mean"]
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}"
    flags += ["--chat-template", template]  # the bundled model's own shows no tools
    with RunningServer(command=[sys.executable, "-m", "millrace.deploy", "serve", *flags]) as running:
        yield running


@pytest.fixture(scope="package")
def parrot() -> Iterator[RunningServer]:
    """A server that answers with the last user's words: the tests say there what the model says."""
    engine = {"max_model_len": 2048, "num_gpu_blocks": 512}
    with RunningServer(parrot=True, server={"api_key": [KEY], "served_model_name": ["demo"]}, engine=engine) as running:
        yield running
        running.wait_until_idle()
