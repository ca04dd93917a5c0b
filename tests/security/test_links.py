"""Links to elsewhere. Nothing is fetched: other parts than text are refused, and a link in a text is text."""

from __future__ import annotations

import socket

import pytest

from tests.security.oracle import CHAT, TEXT, refused

URLS = [
    "http://169.254.169.254/latest/meta-data/",
    "file:///etc/passwd",
    "http://good.example\\@evil.example/",
    "http://2852039166/",
    "http://[::ffff:169.254.169.254]/",
    "http://0x7f000001/",
    "gopher://127.0.0.1:6379/_x",
    "data:image/svg+xml;base64,PHN2Zy8+",
    "//evil.example/x.png",
    "http://evil.example/redirect?to=http://127.0.0.1/",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "audio_url", "video_url"])
def test_a_part_with_a_link_is_refused(server, kind, url):
    for link in (url, {"url": url}, {"data": url, "format": "wav"}):
        body = {"messages": [{"role": "user", "content": [{"type": kind, kind: link}]}]}
        refused(server, lambda body=body: server.post(CHAT, body), code="unsupported_content_type", param="messages")


def test_a_link_in_a_text_is_text_and_is_not_fetched(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        text = f"![picture]({url}) <img src='{url}'> {url}"
        assert server.post(TEXT, {"prompt": text, "max_tokens": 2}).status == 200
        body = {"messages": [{"role": "user", "content": text, "image_url": url}], "max_tokens": 2}
        assert server.post(CHAT, body).status == 200
        image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        assert server.post(CHAT, image).status == 400
        with pytest.raises(TimeoutError):
            listener.accept()
