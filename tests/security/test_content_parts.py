"""Message parts that are not text."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, LONG_BODY_S, refused

KINDS = ["image_url", "input_audio", "video_url", "file", "image", "audio_url", "refusal", "tool_use", "x" * 10_000]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[:20])
def test_parts_other_than_text_are_refused_by_their_type(server, kind):
    part = {"type": kind, kind: {"url": "http://169.254.169.254/latest"}}
    for content in ([part], [{"type": "text", "text": "look"}, part], [part] * 100):
        body = {"messages": [{"role": "user", "content": content}]}
        refused(server, lambda body=body: server.post(CHAT, body), code="unsupported_content_type", param="messages")


@pytest.mark.memory(left_mib=9)  # what a body of megabytes was read into is kept for the next one
def test_four_mebibytes_of_base64_are_refused_undecoded(server):
    url = "data:image/png;base64," + "A" * (4 * 1024 * 1024 - 300)
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    refused(server, lambda: server.post(CHAT, body), code="unsupported_content_type", budget_s=LONG_BODY_S)


@pytest.mark.parametrize(
    "part", [{"type": "text"}, {"type": "text", "text": 5}, {"text": "a"}, {}, "a", None, {"type": 5}]
)
def test_a_part_without_text_is_refused(server, part):
    body = {"messages": [{"role": "user", "content": [part]}]}
    refused(server, lambda: server.post(CHAT, body), param="messages")


def test_links_and_images_in_text_are_text(server):
    text = "![x](http://169.254.169.254/) file:///etc/passwd data:image/png;base64,AAAA"
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}], "max_tokens": 2}
    assert server.post(CHAT, body).status == 200
