from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from tests.deploy.running import RunningServer

KEY = "a key of the tests"  # what every client of these tests is given, with the address
TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}"
SETTINGS = {"max_num_seqs": "8", "pooling": "mean", "chat_template": TEMPLATE}  # the model's own shows no tools


@pytest.fixture(scope="package")
def demo() -> Iterator[RunningServer]:
    """The bundled model. It cannot call tools or write JSON by itself: where it does, a grammar made it.

    With MILLRACE_TEST_FRONTS it has so many front processes. With MILLRACE_TEST_URL it is the server there, which must
    have these settings and key.
    """
    if url := os.environ.get("MILLRACE_TEST_URL"):
        yield cast(RunningServer, SimpleNamespace(url=url))
        return
    flags = ["--port", "0", "--api-key", KEY, "--front-processes", os.environ.get("MILLRACE_TEST_FRONTS", "1")]
    for name, value in SETTINGS.items():
        flags += [f"--{name.replace('_', '-')}", value]
    with RunningServer(command=[sys.executable, "-m", "millrace.deploy", "serve", *flags]) as running:
        yield running


@pytest.fixture(scope="package")
def parrot() -> Iterator[RunningServer]:
    """A server that answers with the last user's words: the tests say there what the model says."""
    engine = {"max_model_len": 2048, "num_gpu_blocks": 512}
    with RunningServer(parrot=True, server={"api_key": [KEY], "served_model_name": ["demo"]}, engine=engine) as running:
        yield running
        running.wait_until_idle()
