"""Nothing a client sends makes a line of the log, and no prompt is in it."""

from __future__ import annotations

import json

from tests.deploy.running import RunningServer, head_bytes
from tests.security.oracle import TEXT
from tests.security.watch import Watch, warm_up
from tests.security.wire import tell

EVIL = ["a\r\nfake: line", "\x1b[31mred\x1b[0m", "%s%s%n{0}", "\u2028line", '","level":"error', "x" * 2**20]
PROMPT = "the-prompt-that-must-not-be-logged"


def test_the_log_stays_one_json_object_a_line(tmp_path):
    with RunningServer(server={"log_format": "json", "log_level": "debug"}, audit=True) as server:
        warm_up(server)
        watch = Watch(server)
        for text in EVIL:
            for body in (
                {"prompt": PROMPT, "model": text},
                {"prompt": PROMPT, "user": text},
                {"prompt": PROMPT, "request_id": text, "max_tokens": 2},
                {"prompt": PROMPT, text: 1, "max_tokens": 2},
                {"prompt": PROMPT, "stop": text},
                {"prompt": PROMPT, "temperature": text},
            ):
                assert server.post(TEXT, body).status in (200, 400, 404)
            head = head_bytes(
                "GET", "/nope", {"User-Agent": text[:4000], "X-Request-Id": text[:4000], "Connection": "close"}
            )
            tell(server, head, patience_s=0.2)
            tell(
                server,
                f"GET /{text[:4000]} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode(),
                patience_s=0.2,
            )
        with server.connect() as connection:
            connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        watch.check()
        server.signal()
        assert server.process.wait(20) == 0
        lines = server.errors().splitlines()
    assert lines
    for line in lines:
        event = json.loads(line)
        assert isinstance(event, dict) and event["event"] and "fake: line" not in str(event["event"])
        assert len(line.encode()) <= 4096
        assert PROMPT not in line
        assert "\x1b" not in line
