"""Hostile grammars cost their sender a 400 within the compiler's budget, and cost no other client anything."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.counts import FULL
from tests.deploy.running import RunningServer
from tests.security.oracle import CHAT, TEXT, check_error, refused

# The compiler has 2 s of CPU (tests/runtime/processes/test_helper_pool.py holds that limit), which take five times as
# long where others have the processor too; then the half second in which any refusal must come.
BUDGET_S = 10.5
COSTLY = ("nested counts, later", "huge pattern")  # as nested counts, 2 s each: only in the full run
WELL = {"structured_outputs": {"regex": "[a-z]{3}"}}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def regex(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": text}}


def grammar(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": text}}


MANY = {f"k{i}": {"type": "string"} for i in range(1500)}
REFUSED = {
    "lookahead": regex("(?=a)b"),
    "lookbehind": regex("a(?<!b)"),
    "back-reference": regex("(a)\\1"),
    "unbalanced group": regex("((("),
    "unbalanced class": regex("[a-"),
    "count turned round": regex("a{3,2}"),
    "nothing": regex("^$"),
    "nested counts": regex("((((a{100}){100}){100}){100})"),
    "nested counts, later": regex("b((((a{100}){100}){100}){100})"),
    "optional and counted": regex("(?:a?){500}a{500}"),
    "long regex": regex("a" * 1025),
    "empty grammar": grammar("start: "),
    "no grammar": grammar("%%%"),
    "no rule": grammar("start: a"),
    "left recursion": grammar("start: start"),
    "endless": grammar("start: /a/ start"),
    "broken GBNF": grammar("root ::= ("),
    "long grammar": grammar('start: "' + "a" * 65536 + '"'),
    "no choice": {"structured_outputs": {"choice": []}},
    "bad type": schema({"type": "bogus"}),
    "bad pattern": schema({"type": "string", "pattern": "(?!a)b"}),
    "huge pattern": schema({"type": "string", "pattern": "^((((a{100}){100}){100}){100})$"}),
    "keyword that is not served": schema({"type": "array", "uniqueItems": True}),
    "nothing fits": schema({"type": "integer", "minimum": 5, "maximum": 1}),
    "no value": schema({"enum": []}),
    "reference to itself": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "reference to nothing": schema({"$ref": "#/nowhere"}),
    "too many optional keys": schema({"type": "object", "properties": MANY}),
    "switches in the schema": schema({"x-guidance": {"lenient": True}, "not": {}}),
    "an unknown kind": {"structured_outputs": {"structural_tag": "{}"}},
}
SERVED = {  # hostile elsewhere; here they are automata of a few states, made as they are needed
    "nested stars": regex("(a+)+b"),
    "thirty stars": regex("(.*a){30}"),
    "long counts": regex("[0-9]{1,99999}"),
    "many items": schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
}


@pytest.mark.slow
def test_a_hostile_grammar_is_refused_in_time_and_the_next_one_is_served(server: RunningServer) -> None:
    served = {"prompt": "hi", "max_tokens": 4}
    assert server.post(TEXT, served | WELL).status == 200
    chosen = {name: hostile for name, hostile in REFUSED.items() if FULL or name not in COSTLY}
    for i, (name, hostile) in enumerate(chosen.items()):
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        options: dict[str, Any] = [{}, {"stream": True}, {"n": 2}][i % 3]
        path, body = (CHAT, chat) if i % 2 else (TEXT, served)
        fields = body | options | hostile

        def ask(path: str = path, fields: dict[str, Any] = fields) -> Any:
            return server.post(path, fields)

        answer = refused(server, ask, param=next(iter(hostile)), budget_s=BUDGET_S)
        assert answer.error["message"].startswith(next(iter(hostile))), (name, answer.error)
        if i % 5 == 0:
            assert server.post(TEXT, served | WELL).status == 200, name
    for name, unusual in SERVED.items():
        assert server.post(TEXT, served | unusual).status == 200, name
    assert server.post(TEXT, served | WELL | {"stream": True, "n": 2}).events()


@pytest.mark.slow
def test_a_schema_reaches_no_file_and_no_host_and_no_depth(server: RunningServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        for target in (url, "file:///etc/passwd", "//127.0.0.1/x", "other.json"):
            answer = server.post(TEXT, {"prompt": "hi"} | schema({"properties": {"a": {"$ref": target}}}))
            check_error(answer, 400)
            assert answer.error["param"] == "response_format" and "root:" not in answer.body.decode()
        with pytest.raises(TimeoutError):
            listener.accept()
    deep = "[" * 5000 + "]" * 5000
    body = json.dumps({"prompt": "hi"} | schema("DEEP")).replace('"DEEP"', deep).encode()
    check_error(server.post(TEXT, body), 400)
    for text in (deep, '{"items":' * 5000 + "{}" + "}" * 5000):
        answer = refused(
            server, lambda text=text: server.post(TEXT, {"prompt": "hi", "structured_outputs": {"json": text}})
        )
        assert answer.error["param"] == "structured_outputs"
