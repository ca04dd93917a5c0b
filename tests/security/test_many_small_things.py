"""Trailers, chunks and pipelined requests in great number."""

from __future__ import annotations

from tests.counts import FULL
from tests.deploy.running import head_bytes, post_bytes, read_answer, send
from tests.security.oracle import LAG_MS, TEXT, check_error
from tests.security.wire import tell

CHUNKED = head_bytes("POST", TEXT, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_a_body_in_single_bytes_is_a_body(server):
    data = b'{"prompt": "hi", "max_tokens": 1}'
    with server.connect() as connection:
        send(connection, CHUNKED + b"".join(chunk(data[i : i + 1]) for i in range(len(data))) + b"0\r\n\r\n")
        assert read_answer(connection).status == 200


def test_a_million_chunks_of_one_byte_delay_no_other_request(server):
    server.stats()
    told = tell(server, CHUNKED + chunk(b" ") * 10**6 + b"0\r\n\r\n", patience_s=30.0)
    assert told.num_responses == 1
    check_error(told.answer(), (400, 413))
    assert server.stats()["lag_ms"] <= 2 * LAG_MS  # aiohttp parses what one read brings in one go


def test_a_million_trailers_are_refused(server):
    told = tell(server, CHUNKED + chunk(b"{}") + b"0\r\n" + b"A: b\r\n" * 10**6 + b"\r\n", patience_s=30.0)
    assert told.num_responses == 1
    check_error(told.answer(), (400, 413, 431))
    assert server.get("/health").status == 200


def test_pipelined_requests_are_answered_in_order_and_bounded(server):
    server.stats()
    num = 10_000 if FULL else 1_000
    with server.connect() as connection:
        connection.setblocking(False)
        data = memoryview(head_bytes("GET", "/health", {}) * num + head_bytes("GET", "/nope", {"Connection": "close"}))
        received = bytearray()
        import select

        while True:
            readable, writable, _ = select.select([connection], [connection] if data else [], [], 20.0)
            assert readable or writable, "neither reading nor writing"
            if writable:
                data = data[connection.send(data[:65536]) :]
            if readable:
                part = connection.recv(65536)
                if not part:
                    break
                received += part
    assert received.count(b"HTTP/1.1 200") == num
    assert received.count(b"HTTP/1.1 404") == 1 and received.rfind(b"HTTP/1.1 404") > received.rfind(b"HTTP/1.1 200")
    assert server.stats()["lag_ms"] <= LAG_MS


def test_pipelined_generations_run_one_after_the_other(server):
    body = {"prompt": "hi", "max_tokens": 2, "ignore_eos": True}
    one = post_bytes(TEXT, body, {"Connection": "keep-alive"})
    with server.connect() as connection:
        send(connection, one * 20 + post_bytes(TEXT, body))
        from tests.security.wire import listen

        told = listen(connection, 60.0)
    assert told.data.count(b"HTTP/1.1 200") == 21
