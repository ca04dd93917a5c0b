"""The oracle itself: that it notices memory and forbidden acts, and that no route of the server does it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.deploy.running import ROOT, RunningServer
from tests.security.frames import say, upgraded
from tests.security.oracle import CHAT, TEXT
from tests.security.watch import GRAMMAR, LEFT_MIB, PEAK_MIB, Watch

AUDITED = """
import io, os, pathlib, pickle, socket, subprocess, sys, tempfile, traceback
from tests.security.audit import Audit

root = pathlib.Path(tempfile.mkdtemp())
(root / "model").mkdir()
(root / "model" / "link").symlink_to("/etc/passwd")
(root / "model" / "weights").touch()
module = compile("import os", "x", "exec")
audit = Audit([root / "model"], ["subprocess.Popen /bin/true --allowed"])
with socket.create_server(("127.0.0.1", 0)) as listener:
    address = listener.getsockname()
    forbidden = {
        "open /etc/passwd": lambda: open("/etc/passwd"),
        "open /etc/hosts": lambda: os.open("/tmp/../etc/hosts", os.O_RDONLY),
        "open %s/model/link" % root: lambda: open(root / "model" / "link"),
        "pickle.find_class": lambda: pickle.loads(b"cos\\ngetpid\\n."),
        "exec": lambda: exec(module),
        "compile": lambda: compile("1", "y", "eval"),
        "os.system": lambda: os.system("true"),
        "subprocess.Popen /bin/true": lambda: subprocess.Popen(["/bin/true"]).wait(),
        "socket.connect 127.0.0.1:%d" % address[1]: lambda: socket.create_connection(address).close(),
        "socket.getaddrinfo": lambda: socket.getaddrinfo("localhost", 80),
    }
    allowed = [
        lambda: open(root / "model" / "weights"),
        lambda: tempfile.TemporaryFile(),
        lambda: open("/proc/self/statm"),
        lambda: open(traceback.__file__),
        lambda: open(os.open("/dev/null", os.O_RDONLY)),
        lambda: subprocess.Popen(["/bin/true", "--allowed"]).wait(),
    ]
    forbidden["open /etc/passwd"]()
    assert not audit.take(), "before it is armed, nothing is kept"
    audit.is_armed = True
    for told, do in forbidden.items():
        do()
        seen = audit.take()
        assert any(one.startswith(told) for one in seen), (told, seen)
    for do in allowed:
        do()
        seen = audit.take()
        assert not seen, seen
print("all seen")
"""

HELPER = """
import os
from tests.security.audited_helper import HelperAudit, complaints

audit = HelperAudit(but={"compile"})
answer = audit.watching(lambda opening: lambda question: eval(question))(b"")
assert answer(b"1 + 1") == 2
path = complaints(os.getppid())
try:
    told = path.read_text().splitlines()
    assert len(told) == 1 and told[0].startswith("helper: exec"), told  # `eval` compiles, which it may, and runs
finally:
    path.unlink()
print("seen")
"""

HUNGRY = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
print('{{"url": "http://127.0.0.1:1"}}', flush=True)
kept = []
for line in sys.stdin:
    what, _, size = line.strip().partition(" ")
    more = bytearray(int(size or 0) << 20)
    if what == "keep":
        kept.append(more)
    del more
    seen = ["open /etc/passwd"] if len(kept) == 2 else []
    print(json.dumps({{"seen": seen, "num_restarts": max(0, len(kept) - 2), "is_ready": len(kept) < 4}}), flush=True)
"""


def said(code: str) -> str:
    """By a process of its own, as a hook stays with its process."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_all_that_is_forbidden_is_seen_and_what_is_allowed_is_not():
    assert said(AUDITED) == "all seen\n"


@pytest.mark.slow
def test_what_a_helper_does_is_seen_but_that_it_compiles():
    assert said(HELPER) == "seen\n"


@pytest.fixture
def hungry() -> Iterator[RunningServer]:
    """It takes MiB when told to, and keeps them or not. What it keeps twice is as if it had opened a file; and three
    times, as if a stage had broken."""
    with RunningServer(command=[sys.executable, "-c", HUNGRY]) as running:
        yield running


def test_memory_that_is_taken_for_a_moment_is_seen_afterwards(hungry: RunningServer):
    watch = Watch(hungry)
    hungry.ask(f"take {int(PEAK_MIB) - 4}")
    watch.check()
    hungry.ask(f"take {int(PEAK_MIB) + 4}")
    with pytest.raises(AssertionError, match="memory: .* at the peak"):
        watch.check()
    Watch(hungry).check()


def test_memory_that_is_kept_is_seen_and_so_is_what_was_done(hungry: RunningServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.security.watch.PATIENCE_S", 0.1)
    watch = Watch(hungry)
    hungry.ask(f"keep {int(LEFT_MIB) + 2}")
    with pytest.raises(AssertionError, match="memory: .* are left"):
        watch.check()
    for told in ("forbidden: .*open /etc/passwd", "breakage: .*'num_restarts': 1", "breakage: .*'is_ready': False"):
        hungry.ask("keep 0")
        with pytest.raises(AssertionError, match=told):
            Watch(hungry).check()


HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODIES = [
    (TEXT, {"prompt": "hi", "max_tokens": 2, "logprobs": 2, "n": 2}),
    (TEXT, {"prompt": "hi", "max_tokens": 2, "stream": True}),
    (TEXT, {"prompt": "hi", "max_tokens": 2} | GRAMMAR),
    (TEXT, {"prompt": "hi", "max_tokens": 2, "use_beam_search": True, "n": 2}),
    (CHAT, HI),
    (CHAT, HI | {"stream": True}),
    (CHAT, HI | {"response_format": {"type": "json_object"}}),
    ("/v1/chat/completions/render", HI),
    ("/v1/completions/render", {"prompt": "hi"}),
    ("/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 2}}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "stream": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "background": True}),
    ("/v1/messages", HI),
    ("/v1/messages", HI | {"stream": True}),
    ("/v1/messages/count_tokens", {"messages": HI["messages"]}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/score", {"queries": "hi", "documents": ["you"]}),
    ("/rerank", {"query": "hi", "documents": ["you"]}),
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"messages": HI["messages"]}),
    ("/detokenize", {"tokens": [97]}),
    ("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 2}}),
    ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2}, "stream": True}),
    ("/generate_stream", {"inputs": "hi", "parameters": {"max_new_tokens": 2}}),
    ("/api/chat", {"messages": HI["messages"], "options": {"num_predict": 2}}),
    ("/api/generate", {"prompt": "hi", "options": {"num_predict": 2}, "stream": False}),
    ("/api/embed", {"input": "hi"}),
    ("/api/embeddings", {"prompt": "hi"}),
    ("/api/show", {"model": "scripted"}),
    ("/api/pull", {"model": "scripted"}),
]
PATHS = [
    *("/health", "/health/live", "/health/ready", "/version", "/server_info", "/metrics", "/v1/models"),
    *("/v1/models/scripted", "/openapi.json", "/docs", "/stream-demo", "/static/stream.js", "/dashboard", "/"),
    *("/load", "/v1/requests", "/v1/stages", "/info", "/api/tags", "/api/ps", "/api/version"),
    *("/ping", "/healthz", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready"),
]
REFUSED = {"/api/create", "/api/copy", "/api/push", "/api/delete"}  # whatever is asked

OTHER_NAMES = ("/v1/score", "/v1/rerank", "/v2/rerank", "/inference/v1/generate")  # of what is asked above


@pytest.mark.memory(left_mib=12.0)  # a thread that first starts here brings 2 MiB of trace records
def test_no_route_opens_connects_compiles_or_keeps_anything(server: RunningServer):
    """The fixture says so around each test: here each route of the document is asked, and once more."""
    asked = {path for path, _ in BODIES} | {*PATHS, *OTHER_NAMES, *REFUSED, "/v1/stream", "/dashboard/feed"}
    assert not {path for path in server.get("/openapi.json").json["paths"] if path not in asked and "{" not in path}
    for _ in range(2):
        for path, body in BODIES:
            assert server.post(path, body).status == 200, path
        for path in PATHS:
            assert server.get(path).status == 200, path
        with upgraded(server) as socket:
            socket.send(say({"type": "create", "id": "a", "endpoint": "completions", "body": BODIES[0][1]}))
            while not any(message["type"] == "done" for message in socket.listen(0.02).messages):
                assert not socket.told.is_cut
    assert server.ask("audit")["seen"] == []
