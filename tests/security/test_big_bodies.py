"""Bodies that are long, deep, wide, packed or endless."""

from __future__ import annotations

import gzip
import zlib

import pytest

from tests.deploy.running import head_bytes, read_answer, send
from tests.security.oracle import LONG_BODY_S, REFUSED_S, TEXT, check_error, refused
from tests.security.wire import listen, tell

MIB = 1024 * 1024
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("length", [10 * 1024**3, 4 * MIB + 1, 10**18])
def test_an_announced_length_over_the_limit_is_413_before_a_byte_is_read(server, length):
    data = head_bytes("POST", TEXT, JSON | {"Content-Length": str(length)})
    refused(server, lambda: server.raw(data), 413, code="body_too_large")


def test_too_many_of_the_longest_choices_are_refused_as_too_long_before_they_are_counted(server):
    """What Schemathesis makes of `maxItems` and `maxLength` together: 1,025 choices, some at 64 KiB."""
    choices = ["0", "a" * 65536] * 512 + ["0"]
    long = {"prompt": "a", "guided_choice": choices}  # 32 MiB, which the client sends whole
    refused(server, lambda: server.post(TEXT, long), 413, code="body_too_large", budget_s=LONG_BODY_S)
    few = {"prompt": "a", "guided_choice": ["0"] * 1025}
    refused(server, lambda: server.post(TEXT, few), 400, param="guided_choice")


def test_an_endless_chunked_body_is_413_once_it_is_too_long(server):
    with server.connect() as connection:
        send(connection, head_bytes("POST", TEXT, JSON | {"Transfer-Encoding": "chunked"}))
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        for _ in range(80):
            send(connection, piece)
        answer = read_answer(connection)
    check_error(answer, 413)


@pytest.mark.parametrize(
    "encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "gzip, gzip", "x-gzip", "identity, gzip"]
)
def test_packed_bodies_are_refused_unopened(server, encoding):
    bomb = gzip.compress(b" " * 8 * MIB) if "gzip" in encoding.lower() else zlib.compress(b" " * 8 * MIB)
    data = head_bytes("POST", TEXT, JSON | {"Content-Encoding": encoding, "Content-Length": str(len(bomb))}) + bomb
    refused(server, lambda: server.raw(data), 415, code="unsupported_media_type")


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "application/jsonp",
        "a",
    ],
)
def test_what_is_not_called_json_is_415(server, content_type):
    headers = {"Content-Type": content_type}
    refused(server, lambda: server.post(TEXT, {"prompt": "hi"}, headers), 415, code="unsupported_media_type")


@pytest.mark.memory(left_mib=9)  # what a body of megabytes was read into is kept for the next one
@pytest.mark.parametrize(
    "data",
    [
        b"[" * 10**5,
        b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
        b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}",
        b"{" + b",".join(b'"%x": 1' % i for i in range(250_000)) + b"}",
        b'{"prompt": "a", "n": ' + b"9" * 10**5 + b"}",
        b'{"prompt": "a", "n": ' + b"-" * 10**5 + b"}",
        b'{"prompt": "a", "x": 1.' + b"0" * 10**5 + b"}",
        b'{"prompt": "' + b"\\u0041" * 600_000 + b'"',
        b'{"prompt": [' + b"[]," * 10**6 + b"1]}",
    ],
    ids=["open", "objects", "40 deep", "keys", "digits", "signs", "fraction", "escapes", "arrays"],
)
def test_shapes_that_choke_parsers_are_refused(server, data):
    budget_s = REFUSED_S if len(data) < 64 * 1024 else LONG_BODY_S
    refused(server, lambda: server.post(TEXT, data), code="invalid_json", budget_s=budget_s)


def test_of_a_key_given_twice_the_last_one_counts(server):
    answer = server.post(TEXT, b'{"prompt": "a", "max_tokens": 9, "ignore_eos": true, "max_tokens": 2}')
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2


def test_a_body_of_exactly_the_limit_is_read(server):
    data = b'{"prompt": "a", "max_tokens": 1}'
    assert server.post(TEXT, data + b" " * (4 * MIB - len(data))).status == 200


def test_a_body_that_does_not_come_is_given_up(slow_server):
    with slow_server.connect() as connection:
        send(connection, head_bytes("POST", TEXT, JSON | {"Content-Length": "100"}) + b'{"prompt"')
        told = listen(connection, 60.0)
    assert told.is_closed and told.num_responses == 1 and 0.9 < told.seconds < 60.0
    check_error(told.answer(), 408)


def test_a_body_shorter_than_announced_ends_with_its_connection(server):
    with server.connect() as connection:
        send(connection, head_bytes("POST", TEXT, JSON | {"Content-Length": "100"}) + b'{"prompt"')
    assert server.get("/health").status == 200


def test_the_answer_to_a_long_body_arrives(server):
    """An early 413 must reach a client that is still sending."""
    headers = JSON | {"Content-Length": str(6 * MIB), "Connection": "close"}
    told = tell(server, head_bytes("POST", TEXT, headers) + b" " * 6 * MIB)
    assert told.status == 413
