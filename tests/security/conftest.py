from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from tests.counts import FULL, count
from tests.deploy.running import RunningServer
from tests.security.audit import Audit
from tests.security.oracle import ADMIN_KEY, CANARIES, KEY, TEXT
from tests.security.watch import Watch, warm_up

SHARED = ("server", "keyed_server", "two_keys_server", "slow_server")
NUM_CANARIES = count(2, full=8)
PAUSE_S = 0.1 if FULL else 0.8  # of a canary between two streams, which together take a third of a processor at 0.1


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "memory(peak_mib, left_mib): other limits of memory, for a reason beside it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/security/" in str(item.path):
            item.add_marker(pytest.mark.security)


@pytest.fixture(scope="session")
def audit() -> Audit:
    """The audit of servers in this process, which also holds their clients."""
    return Audit(allowed=["socket.connect 127.0.0.1:", "socket.getaddrinfo '127.0.0.1'"])


@pytest.fixture(autouse=True)
def watches(request: pytest.FixtureRequest) -> Iterator[None]:
    """The checks of memory and of forbidden acts around each test of a server that several share."""
    servers = [request.getfixturevalue(name) for name in SHARED if name in request.fixturenames]
    limits = request.node.get_closest_marker("memory")
    watches = [Watch(server, **({} if limits is None else limits.kwargs)) for server in servers]
    yield
    for watch in watches:
        watch.check()


@pytest.fixture(scope="package")
def server() -> Iterator[RunningServer]:
    """An open server. Greedy streams run on it throughout, and none may notice what the tests do."""
    with RunningServer(server={"log_format": "json"}, audit=True) as running:
        warm_up(running, fully=True)
        with CanaryStreams(running, num=NUM_CANARIES) as canaries:
            yield running
        assert not canaries.complaints
        assert canaries.num_finished > 0
        running.wait_until_idle()
        for line in running.errors().splitlines():
            assert json.loads(line), "a line of the log is no JSON"


@pytest.fixture(scope="package")
def keyed_server() -> Iterator[RunningServer]:
    """A server that asks for a key, has an admin key, and takes no unknown field."""
    keys = {"api_key": [KEY], "admin_key": [ADMIN_KEY]}
    with RunningServer(server=keys | {"strict_fields": True, "log_format": "json"}, audit=True) as running:
        warm_up(running, {"Authorization": f"Bearer {KEY}"})
        yield running


@pytest.fixture(scope="package")
def two_keys_server() -> Iterator[RunningServer]:
    """A server of key-a and key-b, who share no cache, with long steps."""
    keys = {"api_key": ["key-a", "key-b"], "cache_salt_per_key": True}
    with RunningServer(server=keys, step_s=0.01, script={"eos_probability": 0.0}, audit=True) as running:
        warm_up(running, {"Authorization": "Bearer key-a"})
        yield running


@pytest.fixture(scope="package")
def slow_server() -> Iterator[RunningServer]:
    """A server with long steps, two slots, and little patience."""
    options = {
        "step_s": 0.01,
        "script": {"eos_probability": 0.0},
        "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 64},
        "server": {
            "header_timeout_s": 1.0,
            "body_timeout_s": 1.0,
            "keep_alive_s": 1.5,
            "stalled_reader_s": 1.0,
            "max_connections": 64,
        },
    }
    with RunningServer(**options, audit=True) as running:
        warm_up(running)
        yield running


class CanaryStreams:
    """Threads that ask for the same greedy stream again and again and compare it with the first one."""

    def __init__(self, server: RunningServer, num: int) -> None:
        self.complaints: list[str] = []
        self.num_finished = 0
        self._server = server
        self._is_over = threading.Event()
        body = {"prompt": CANARIES[0], "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        self._text = server.post(TEXT, body).json["choices"][0]["text"]
        self._body = body | {"stream": True}
        self._threads = [threading.Thread(target=self._run) for _ in range(num)]

    def _run(self) -> None:
        while not self._is_over.wait(PAUSE_S):
            try:
                events = self._server.post(TEXT, self._body).events()
            except (OSError, AssertionError) as error:
                self.complaints.append(f"a canary was cut off: {error!r}")
                continue
            text = "".join(event["choices"][0]["text"] for event in events[:-1])
            if text != self._text:
                self.complaints.append(f"a canary said {text!r} instead of {self._text!r}")
            self.num_finished += 1

    def __enter__(self) -> CanaryStreams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
