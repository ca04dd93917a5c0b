"""Names of models that are paths. No file is looked for, whatever the spelling."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, TEXT, check_error, refused

NAMES = [
    "../..",
    "../../etc/passwd",
    "/etc/passwd",
    "..\\..",
    "scripted/../scripted",
    "scripted\x00",
    "\x00",
    "%2e%2e%2f",
    "\uff0f\uff0e\uff0e",
    "file:///etc/passwd",
    "http://169.254.169.254/",
    "//evil.example/share",
    "~root",
    "scripted ",
    "Scripted",
    "",
    "x" * 10_240,
    "org/model:lora",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
def test_a_name_that_is_not_served_is_404_and_no_path(server, name):
    for path, body in (
        (TEXT, {"prompt": "a"}),
        (TEXT, {"prompt": "a", "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ):
        body = body | {"model": name, "max_tokens": 1}
        refused(server, lambda p=path, b=body: server.post(p, b), 404, code="model_not_found", param="model")


@pytest.mark.parametrize("name", ["..%2f..", "%2e%2e", "etc%2fpasswd", "%00", "a//b", "%ef%bc%8f", "x" * 7000])
def test_a_path_in_the_path_is_404(server, name):
    for path in (f"/v1/models/{name}", f"/v1/requests/{name}"):
        method = "GET" if "models" in path else "DELETE"
        check_error(server.get(path, method=method), (400, 404))
