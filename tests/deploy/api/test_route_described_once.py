"""A new folder of routes is named in one list: the server, the OpenAPI document and the pages have it then."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Annotated, Any

import aiohttp
import jsonschema_rs
import pytest
from aiohttp import web
from pydantic import Field

from millrace.deploy.api.openai.api_routes import ApiRoutes, post
from millrace.deploy.api.openai.prepared_request import ignored_headers
from millrace.deploy.api.routes import table
from millrace.deploy.api.schema import operation as schema_operation
from millrace.deploy.api.schema.body import Body
from millrace.deploy.api.schema.operation import Operation
from millrace.deploy.api.schema.shapes import Shape
from millrace.deploy.api.schema.validation import read_body
from millrace.deploy.config import ServerConfig
from millrace.deploy.http.body_reader import read
from millrace.deploy.http.responses import answer
from millrace.deploy.openapi.document import openapi
from millrace.deploy.server.server import Server
from millrace.stages.testing.scripted.engine import scripted_engine
from tests.docs import generated

PATH = "/v1/tea"


class TeaBody(Body):
    """`POST /v1/tea`."""

    leaf: str
    steeping_s: Annotated[float, Field(ge=0, le=600, description="steeping in seconds")] = 150.0


class Tea(Shape):
    """A cup."""

    leaf: str
    steeping_s: float


class TeaRoutes(ApiRoutes):
    """A route that a user might add."""

    def table(self) -> list[web.RouteDef]:
        return [post(PATH, self.brew)]

    @staticmethod
    def operations() -> Sequence[Operation]:
        return (
            Operation(
                method="POST",
                path=PATH,
                name="brewTea",
                group="tea",
                summary="A cup | of tea",
                body=TeaBody,
                answers=schema_operation.json(Tea),
            ),
        )

    async def brew(self, request: web.Request) -> web.Response:
        """`POST /v1/tea`."""
        config = self.service.config
        make = partial(read_body, TeaBody, strict_fields=config.strict_fields)
        body, ignored = await read(request, config, self._threads, make)
        return answer(body.model_dump(), headers=ignored_headers(ignored))


@pytest.fixture(autouse=True)
def table_with_tea(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "API_ROUTES", (*table.API_ROUTES, TeaRoutes))


async def ask(*requests: tuple[str, str, Any]) -> list[tuple[int, Any]]:
    """(status, JSON) of each."""
    found = []
    async with Server(ServerConfig(port=0, api_key=("k",))) as server, scripted_engine(answer="hello there") as engine:
        server.attach(engine)
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as session:
            for method, path, body in requests:
                async with session.request(method, server.url + path, json=body) as response:
                    found.append((response.status, json.loads(await response.text())))
    return found


@pytest.mark.slow
def test_a_new_route_answers_validates_and_is_in_the_document() -> None:
    good, wrong, missing, shown = asyncio.run(
        ask(
            ("POST", PATH, {"leaf": "assam"}),
            ("POST", PATH, {"leaf": "assam", "steeping_s": 700}),
            ("POST", PATH, {}),
            ("GET", "/openapi.json", None),
        )
    )
    assert good == (200, {"leaf": "assam", "steeping_s": 150.0})
    assert wrong[0] == 400 and wrong[1]["error"]["param"] == "steeping_s"
    assert missing[1]["error"]["code"] == "missing_required_parameter"
    document = shown[1]
    described = document["paths"][PATH]["post"]
    assert described["operationId"] == "brewTea" and described["tags"] == ["tea"]
    assert {"200", "400", "401", "413"} <= {*described["responses"]}
    fields = document["components"]["schemas"]["TeaBody"]["properties"]
    assert fields["steeping_s"] == {
        "type": "number", "minimum": 0, "maximum": 600, "default": 150.0, "title": "Steeping S",
        "description": "steeping in seconds",
    }  # fmt: skip
    schema = {"$ref": "#/components/schemas/Tea", "components": document["components"]}
    assert jsonschema_rs.Draft202012Validator(schema).is_valid(good[1])


def test_a_new_route_is_on_the_page_of_all_routes() -> None:
    page = generated.routes()
    assert "\n## Tea\n" in page
    assert "| `POST /v1/tea` | A cup \\| of tea | key |" in page


@pytest.mark.slow
def test_a_route_that_the_list_does_not_name_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert PATH not in openapi(ServerConfig(), "1", None)["paths"] and PATH not in generated.routes()


@pytest.mark.slow
def test_a_strict_server_refuses_other_fields_of_a_new_route_in_document_and_deed() -> None:
    assert (
        openapi(ServerConfig(strict_fields=True), "1", None)["components"]["schemas"]["TeaBody"]["additionalProperties"]
        is False
    )


HANDLER = "millrace.deploy.api.chat.routes"
MOST_CALLS = 4  # of other modules into the handler's, up to the first byte of a streamed chat


def test_few_calls_lead_into_the_module_of_the_handler_before_the_first_byte() -> None:
    """A coroutine that is resumed counts once: how often it waits is up to the clock."""
    seen: dict[FrameType, tuple[str, str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__") == HANDLER:
            caller = "" if frame.f_back is None else frame.f_back.f_globals.get("__name__", "")
            if caller != HANDLER:
                seen.setdefault(frame, (caller, frame.f_code.co_name))

    async def first_byte() -> bytes:
        async with Server(ServerConfig(port=0)) as server, scripted_engine(answer="hello there") as engine:
            server.attach(engine)
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 8}
            async with aiohttp.ClientSession() as session:
                sys.setprofile(note)
                try:
                    async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
                        return await response.content.readany()
                finally:
                    sys.setprofile(None)

    assert asyncio.run(first_byte()).startswith(b"data: ")
    assert ("millrace.deploy.server.kept_answers", "create") in seen.values()
    assert len(seen) <= MOST_CALLS, seen
