"""Requests of which two readers could see different ends. One request, at most one answer, and no doubt."""

from __future__ import annotations

import pytest

from tests.security.oracle import check_error
from tests.security.wire import tell

BODY = b'{"prompt": "a", "max_tokens": 1}'
HIDDEN = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def request(*headers: bytes, body: bytes = BODY, line: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    fixed = (line, b"Host: localhost", b"Content-Type: application/json", b"Connection: close")
    return b"\r\n".join([*fixed, *headers]) + b"\r\n\r\n" + body


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED_BODY = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)

REFUSED = {
    "CL and TE": request(LENGTH, b"Transfer-Encoding: chunked", body=CHUNKED_BODY),
    "TE and CL": request(b"Transfer-Encoding: chunked", LENGTH, body=CHUNKED_BODY),
    "two CL": request(LENGTH, b"Content-Length: 5"),
    "two equal CL": request(LENGTH, LENGTH),
    "CL list": request(b"Content-Length: 5, 5"),
    "CL plus": request(b"Content-Length: +%d" % len(BODY)),
    "CL minus": request(b"Content-Length: -1"),
    "CL hex": request(b"Content-Length: 0x20"),
    "CL underscore": request(b"Content-Length: 3_2"),
    "CL text": request(b"Content-Length: abc"),
    "CL empty": request(b"Content-Length: "),
    "CL float": request(b"Content-Length: 3.0"),
    "CL digits of another script": request("Content-Length: ٣".encode()),
    "CL huge": request(b"Content-Length: " + b"9" * 30),
    "TE xchunked": request(b"Transfer-Encoding: xchunked", body=CHUNKED_BODY),
    "TE identity": request(b"Transfer-Encoding: identity", LENGTH),
    "TE gzip only": request(b"Transfer-Encoding: gzip", body=CHUNKED_BODY),
    "TE chunked not last": request(b"Transfer-Encoding: chunked, gzip", body=CHUNKED_BODY),
    "TE twice": request(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=CHUNKED_BODY),
    "TE chunked chunked": request(b"Transfer-Encoding: chunked, chunked", body=CHUNKED_BODY),
    "TE vertical tab": request(b"Transfer-Encoding: \x0bchunked", body=CHUNKED_BODY),
    "TE quoted": request(b'Transfer-Encoding: "chunked"', body=CHUNKED_BODY),
    "space before colon": request(b"Content-Length : %d" % len(BODY)),
    "tab before colon": request(b"Content-Length\t: %d" % len(BODY)),
    "space before TE colon": request(b"Transfer-Encoding : chunked", body=CHUNKED_BODY),
    "obs-fold": request(LENGTH, b"X-A: b\r\n folded"),
    "obs-fold of TE": request(b"Transfer-Encoding:\r\n chunked", body=CHUNKED_BODY),
    "NUL in a value": request(LENGTH, b"X-A: b\x00c"),
    "bare CR in a value": request(LENGTH, b"X-A: b\rX-B: c"),
    "no colon": request(LENGTH, b"X-A"),
    "no name": request(LENGTH, b": b"),
    "odd name": request(LENGTH, b"X(A): b"),
    "name in another script": request(LENGTH, "X-\u00e9: b".encode()),
    "first header folded": b"POST /v1/completions HTTP/1.1\r\n Host: localhost\r\n" + LENGTH + b"\r\n\r\n" + BODY,
    "chunk size minus": request(b"Transfer-Encoding: chunked", body=b"-1\r\n\r\n0\r\n\r\n"),
    "chunk size plus": request(b"Transfer-Encoding: chunked", body=b"+20\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size 0x": request(b"Transfer-Encoding: chunked", body=b"0x20\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size underscore": request(b"Transfer-Encoding: chunked", body=b"2_0\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size text": request(b"Transfer-Encoding: chunked", body=b"zz\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size empty": request(b"Transfer-Encoding: chunked", body=b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size huge": request(b"Transfer-Encoding: chunked", body=b"f" * 30 + b"\r\n" + BODY),
    "chunk longer than said": request(b"Transfer-Encoding: chunked", body=b"2\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk ended by LF LF": request(b"Transfer-Encoding: chunked", body=b"%x\n%s\n0\n\n" % (len(BODY), BODY)),
    "version 1.2.3": request(LENGTH, line=b"POST /v1/completions HTTP/1.2.3"),
    "version 9": request(LENGTH, line=b"POST /v1/completions HTTP/9.9"),
    "no version": request(LENGTH, line=b"POST /v1/completions"),
    "two targets": request(LENGTH, line=b"POST /v1/completions /health HTTP/1.1"),
    "bad method": request(LENGTH, line=b"PO ST /v1/completions HTTP/1.1"),
    "method with NUL": request(LENGTH, line=b"PO\x00ST /v1/completions HTTP/1.1"),
    "LF in the line": request(LENGTH, line=b"POST /v1/completions\nX HTTP/1.1"),
    "two Host": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100 + b"\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_of_doubtful_ends_is_refused_and_the_connection_closes(server, name):
    told = tell(server, REFUSED[name] + HIDDEN, patience_s=4.0)
    assert told.is_closed
    assert told.num_responses <= 1
    assert b'"alive"' not in told.data, "what was hidden in the body was answered"
    if told.data:
        check_error(told.answer(), (400, 405, 408, 413, 415, 431))


ALLOWED = {
    "chunk extension": request(b"Transfer-Encoding: chunked", body=b"%x;a=b\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "trailer": request(b"Transfer-Encoding: chunked", body=b"%x\r\n%s\r\n0\r\nX-A: b\r\n\r\n" % (len(BODY), BODY)),
    "TE in capitals": request(b"Transfer-Encoding: Chunked", body=CHUNKED_BODY),
    "leading zeros": request(b"Content-Length: 00%d" % len(BODY)),
    "upgrade with a body": request(LENGTH, b"Upgrade: websocket", b"Sec-WebSocket-Key: x"),
    "bare LF": request(LENGTH).replace(b"\r\n", b"\n"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_request_of_one_reading_has_one_answer(server, name):
    told = tell(server, ALLOWED[name] + HIDDEN, patience_s=4.0)
    assert told.is_closed and told.num_responses == 1
    assert told.status in (200, 400)
    assert b'"alive"' not in told.data


@pytest.mark.parametrize("version", [b"", b" HTTP/0.9", b" HTTP/2.0"])
def test_a_request_of_another_http_is_refused_in_words_of_http_1_1(server, version):
    told = tell(server, request(LENGTH, line=b"POST /v1/completions" + version), patience_s=4.0)
    assert told.is_closed and told.data.startswith(b"HTTP/1.1 400 ")
    check_error(told.answer(), (400,))
