"""The OpenAPI document and its page: made from the code, and equal to what the server does."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import aiohttp
import jsonschema_rs
import pytest
from pydantic import Field

from millrace.deploy.api.adapter.chat_adapter import read_adapted
from millrace.deploy.api.chat import operations as chat_operations
from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.completions.body import CompletionBody
from millrace.deploy.api.messages.bodies import MessagesBody
from millrace.deploy.api.responses.bodies import ResponsesBody
from millrace.deploy.api.schema.hints import ModelLimits, number_pattern
from millrace.deploy.api.schema.relations import Relation, switched
from millrace.deploy.api.schema.unsupported import UNSUPPORTED
from millrace.deploy.api.schema.validation import read_body
from millrace.deploy.config import ServerConfig
from millrace.deploy.errors import CODES, ApiError
from millrace.deploy.openapi.document import openapi, served
from millrace.deploy.openapi.operations import all_operations
from millrace.deploy.server.server import Server
from millrace.stages.errors import Refused
from millrace.stages.messages import Request
from millrace.stages.params import SamplingParams
from millrace.stages.request_limits import RequestLimits
from millrace.stages.testing.scripted.engine import ScriptedEngine
from tests.docs import generated

LIMITS = ModelLimits(vocab_size=260, max_model_len=512, model_names=("scripted", "other"))
KEYS = {"api_key": ("k",), "admin_key": ("a",)}


def document(**settings: Any) -> dict[str, Any]:
    return openapi(ServerConfig(**settings), "1.0", LIMITS)


def validator(document: dict[str, Any], model: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{model}", "components": document["components"]}
    )


@pytest.mark.parametrize("settings", [{}, KEYS, {"disable_docs": True}, {"api_key": ("k",)}])
def test_every_route_is_in_the_table_and_every_entry_is_a_route(settings):
    config = ServerConfig(**settings)
    app = Server(config)._make_app()
    routes = {
        (route.method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical if route.resource else ""))
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    assert routes == {(operation.method, operation.path) for operation in served(config)}


def test_the_table_says_whose_key_opens_a_route():
    """Open operations need no key, admin operations the admin key, all others an API key, as on the server."""
    app = Server(ServerConfig(**KEYS))._make_app()
    (check,) = [middleware for middleware in app.middlewares if "check_keys" in middleware.__qualname__]
    others = inspect.getclosurevars(check).nonlocals["others"]
    said = {(operation.method, operation.path): operation.access for operation in all_operations()}
    for route in app.router.routes():
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical)
        keys = others.get(route.handler)
        is_key = keys is None or (keys and keys.kind == "API key")  # some take the admin key, too
        access = "key" if is_key else ("admin" if keys else "open")
        assert said.pop((route.method, path), access) == access, path
    assert not said, "entries of no route"


def test_each_entry_has_a_name_of_its_own_and_known_errors():
    names = [operation.name for operation in all_operations()]
    assert len(set(names)) == len(names)
    for operation in all_operations():
        assert set(operation.errors) <= set(CODES)
        assert set(operation.parameters) == set(re.findall(r"\{(\w+)\}", operation.path))


def test_the_document_is_valid_and_every_reference_leads_somewhere():
    made = document(**KEYS)
    assert made["openapi"] == "3.1.0"
    for name in made["components"]["schemas"]:
        validator(made, name)  # raises for a schema that is none

    def references(part: Any) -> set[str]:
        if isinstance(part, dict):
            own = {part["$ref"]} if "$ref" in part else set()
            return own.union(*map(references, part.values()))
        return set().union(*map(references, part)) if isinstance(part, list) else set()

    schemas = {f"#/components/schemas/{name}" for name in made["components"]["schemas"]}
    assert references(made) <= schemas
    assert "x-limits" not in str(made)


def test_every_field_of_a_body_is_in_the_document():
    schemas = document()["components"]["schemas"]
    for body in (ChatBody, CompletionBody):
        assert set(schemas[body.__name__]["properties"]) == {*body.model_fields, *UNSUPPORTED}
    for other in (ResponsesBody, MessagesBody):
        named = {field.alias or name for name, field in other.model_fields.items()}
        assert set(schemas[other.__name__]["properties"]) == {*named, *other.UNSUPPORTED, *other.PASSED}


@pytest.mark.parametrize("model", ["ChatBody", "CompletionBody"])
def test_every_field_that_generates_says_what_it_means(model: str):
    fields = document()["components"]["schemas"][model]["properties"]
    assert [name for name, schema in fields.items() if not schema.get("description")] == []


class LouderBody(ChatBody):
    """A chat with one field more."""

    RELATIONS: ClassVar[tuple[Relation, ...]] = (*ChatBody.RELATIONS, switched("stream", {"echoes": (None,)}))

    volume: Annotated[int, Field(ge=0, le=11)] = Field(5, description="how loud | the answer is")
    echoes: int | None = Field(None, description="how often it comes back")


def test_a_new_field_and_its_rule_are_checked_shown_and_on_the_page(monkeypatch: pytest.MonkeyPatch):
    chats = tuple(replace(one, body=LouderBody) if one.body is ChatBody else one for one in chat_operations.OPERATIONS)
    monkeypatch.setattr(chat_operations, "OPERATIONS", chats)
    monkeypatch.setattr(generated, "FIELD_BODIES", (LouderBody,))
    made = document()
    shown = made["components"]["schemas"]["LouderBody"]["properties"]["volume"]
    assert (shown["minimum"], shown["maximum"], shown["default"]) == (0, 11, 5)
    assert "| `volume` | integer from 0 to 11 | `5` | how loud \\| the answer is |" in generated.fields()
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    for more, problem in (
        ({}, None),
        ({"volume": 11, "echoes": 2, "stream": True}, None),
        ({"volume": 12}, "volume = 12: must be less than or equal to 11"),
        ({"echoes": 2}, "echoes: requires stream = true"),
    ):
        assert validator(made, "LouderBody").is_valid(chat | more) is (problem is None), more
        if problem is None:
            assert read_body(LouderBody, chat | more, strict_fields=True)[0].volume in (5, 11)
            continue
        with pytest.raises(ApiError) as refused:
            read_body(LouderBody, chat | more, strict_fields=True)
        assert refused.value.message == problem


PROMPT = {"prompt": "a"}
SCHEMAS = document()
REQUEST_LIMITS = RequestLimits(vocab_size=LIMITS.vocab_size, max_model_len=LIMITS.max_model_len)


def takes(raw: dict[str, Any]) -> bool:
    """Whether the server does, by the code that it reads bodies with."""
    try:
        body, _ = read_body(CompletionBody, raw, strict_fields=False)
        params = body.sampling_params(SamplingParams())
        body.beam_params()
        REQUEST_LIMITS.check(Request("r", body.prompts(), params))
        REQUEST_LIMITS.complete_params(params, 1)
    except (ApiError, Refused):
        return False
    return True


@pytest.mark.parametrize(
    ("body", "is_valid"),
    [
        ({}, True),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1], [2, 259]]}, True),
        ({"prompt": [260]}, False),
        ({"prompt": ["a", 1]}, False),
        ({"stop": "x"}, True),
        ({"stop": ["x"] * 17}, False),
        ({"logit_bias": {"259": 100}}, True),
        ({"logit_bias": {"260": 1}}, False),
        ({"logit_bias": {"007": 1}}, False),
        ({"max_tokens": 511}, True),
        ({"max_tokens": 512}, False),
        ({"max_tokens": 0}, False),
        ({"temperature": 2.0}, True),
        ({"temperature": 2.1}, False),
        ({"top_p": 0.0}, False),
        ({"model": "other"}, True),
        ({"model": "nobody"}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {}, "stream": True}, True),
        ({"stream_options": None}, True),
        ({"use_beam_search": True, "n": 64}, True),
        ({"use_beam_search": True, "n": 65}, False),
        ({"use_beam_search": True, "temperature": 0.5}, False),
        ({"length_penalty": 2.0}, False),
        ({"early_stopping": 0}, False),
        *[({name: ""}, True) for name in ("guided_json", "guided_regex", "guided_grammar")],
        *[({name: "a" * 70_000}, False) for name in ("guided_json", "guided_regex", "guided_grammar")],
        ({"guided_json": {}}, True),
        ({"guided_json": False}, False),
        ({"unknown": [1]}, True),
        *[({"tool_choice": value}, value in (None, "auto")) for value in (None, "auto", {}, "required")],
        *[({"suffix": value}, value is False) for value in (False, 0, "x")],
    ],
    ids=str,
)
def test_what_the_document_calls_valid_is_what_the_server_takes(body, is_valid):
    body = PROMPT | body
    assert validator(SCHEMAS, "CompletionBody").is_valid(body) is is_valid
    if "model" not in body:  # which is looked up behind the body, and is a 404
        assert takes(body) is is_valid


@pytest.mark.parametrize("content", [None, "", "x", [], [{"type": "text", "text": "x"}], 5, [5], {}], ids=repr)
def test_what_a_tool_answered_may_be_left_out_or_null_and_else_is_text(content):
    block = {"type": "tool_result", "tool_use_id": "t", "content": content}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    try:
        read_adapted(MessagesBody, body, strict_fields=False)[0].chat()
        is_taken = True
    except ApiError:
        is_taken = False
    assert validator(SCHEMAS, "MessagesBody").is_valid(body) is is_taken
    assert is_taken is (content is None or isinstance(content, (str, list)) and content != [5])


def test_with_strict_fields_the_document_has_no_others():
    strict = validator(document(strict_fields=True), "CompletionBody")
    assert strict.is_valid(PROMPT) and not strict.is_valid(PROMPT | {"unknown": 1})


@pytest.mark.parametrize("most", [0, 1, 7, 9, 10, 99, 100, 259, 1000, 8192])
def test_the_pattern_of_token_ids_is_that_of_the_numbers_up_to_the_last(most):
    pattern = re.compile(number_pattern(most))
    for number in range(most + 1200):
        assert bool(pattern.match(str(number))) is (number <= most), number
    assert not pattern.match("00") and not pattern.match("01") and not pattern.match("")


def test_keys_are_in_the_document_if_they_are_asked_for():
    keyed, unkeyed = document(**KEYS), document()
    assert keyed["paths"]["/v1/models"]["get"]["security"] == [{"key": []}, {"keyHeader": []}]
    assert keyed["paths"]["/admin/cache/reset"]["post"]["security"] == [{"adminKey": []}, {"adminKeyHeader": []}]
    assert keyed["paths"]["/health"]["get"]["security"] == []
    assert "401" in keyed["paths"]["/v1/models"]["get"]["responses"]
    assert "401" not in unkeyed["paths"]["/v1/models"]["get"]["responses"]
    assert "/admin/cache/reset" not in unkeyed["paths"] and not unkeyed["components"]["securitySchemes"]


async def ask(config: ServerConfig, *requests: tuple[str, dict[str, str]], with_engine: bool = True) -> list[Any]:
    """(status, headers, text) of each."""
    found = []
    async with Server(config) as server, ScriptedEngine() as engine:
        if with_engine:
            server.attach(engine)
        async with aiohttp.ClientSession() as session:
            for path, headers in requests:
                async with session.get(server.url + path, headers=headers) as response:
                    found.append((response.status, response.headers, await response.text()))
    return found


def test_the_document_asks_for_the_key_and_its_page_asks_the_reader():
    bearer = {"Authorization": "Bearer k"}
    config = ServerConfig(port=0, api_key=("k",))
    paths = ("/openapi.json", "/docs")
    answers = asyncio.run(ask(config, *((path, headers) for path in paths for headers in ({}, bearer))))
    assert [status for status, _, _ in answers] == [401, 200, 200, 200]
    assert "'unsafe-inline'" not in answers[2][1]["Content-Security-Policy"].split("style-src")[0]


def test_they_can_be_switched_off():
    answers = asyncio.run(ask(ServerConfig(port=0, disable_docs=True), ("/openapi.json", {}), ("/docs", {})))
    assert [status for status, _, _ in answers] == [404, 404]


def test_while_the_model_loads_the_document_is_there_without_its_limits():
    (answer,) = asyncio.run(ask(ServerConfig(port=0), ("/openapi.json", {}), with_engine=False))
    assert answer[0] == 200 and "x-limits" not in answer[2] and '"scripted"' not in answer[2]


@pytest.mark.slow
def test_the_document_is_the_same_where_python_drops_docstrings() -> None:
    code = (
        "import json; from millrace.deploy.config import ServerConfig\n"
        "from millrace.deploy.openapi.document import openapi\n"
        "print(json.dumps(openapi(ServerConfig(), '1', None)))"
    )
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(openapi(ServerConfig(), "1", None)))
