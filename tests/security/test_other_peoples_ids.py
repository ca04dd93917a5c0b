"""Invalid token ids, and ids of other clients' requests."""

from __future__ import annotations

import pytest

from tests.deploy.running import Answer, post_bytes, read_answer, send
from tests.security.oracle import LONG_BODY_S, TEXT, VOCABULARY, check_error, refused


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [10**6],
        [VOCABULARY],
        [2**31],
        [2**63],
        [97, -(2**40)],
        [1.0],
        ["97"],
        [None],
        [True],
        [[97]],
        "97",
        97,
        {},
    ],
    ids=str,
)
def test_an_id_outside_the_vocabulary_spells_nothing(server, tokens):
    refused(server, lambda: server.post("/detokenize", {"tokens": tokens}), param="tokens")


def test_a_wrong_id_among_very_many_is_found(server):
    tokens = [97] * 200_000 + [VOCABULARY]
    refused(server, lambda: server.post("/detokenize", {"tokens": tokens}), param="tokens", budget_s=LONG_BODY_S)


def test_only_its_own_key_ends_a_request(two_keys_server):
    """To another key it is not there, under its id or its X-Request-Id; the error is that of an unknown id."""

    def end(key: str, some_id: str) -> Answer:
        return two_keys_server.get(f"/v1/requests/{some_id}", {"Authorization": f"Bearer {key}"}, "DELETE")

    body = {"prompt": "a", "max_tokens": 200, "stream": True}
    with two_keys_server.connect() as connection:
        headers = {"Authorization": "Bearer key-a", "X-Request-Id": "mine"}
        send(connection, post_bytes(TEXT, body, headers))
        connection.recv(1, 2)
        nobodys = end("key-b", "nobodys")
        for some_id in ("mine", "cmpl-mine"):
            answer = end("key-b", some_id)
            check_error(answer, 404)
            assert answer.body == nobodys.body.replace(b"nobodys", some_id.encode())
        check_error(two_keys_server.get("/v1/requests/mine", method="DELETE"), 401)
        assert two_keys_server.stats()["live"] == 1
        assert end("key-a", "mine").json == {"id": "mine", "aborted": True}
        finishes = [event["choices"][0]["finish_reason"] for event in read_answer(connection).events()[:-1]]
        assert finishes[-1] == "abort"
    check_error(end("key-a", "mine"), 404)
