"""The official client over a socket of `/v1/responses`, unmodified except for its URL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.deploy.running import RunningServer
from tests.deploy.sockets import ENDLESS, on_loop, serving, until

ASKED: dict[str, Any] = {"model": "scripted", "input": "Tell me a story", "temperature": 0, "max_output_tokens": 20}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def events_of(connection: Any) -> list[Any]:
    """The events of one response, up to the last."""
    events = []
    for event in connection:
        events.append(event)
        if event.type in ("response.completed", "response.incomplete", "response.failed", "error"):
            return events
    raise AssertionError("the connection was closed")


def as_streamed(event: Any) -> dict[str, Any]:
    """An event without the fields that differ between responses."""
    text = json.dumps(event.to_dict())
    plain = json.loads(text)
    ids = {plain.get("item_id"), plain.get("item", {}).get("id"), plain.get("response", {}).get("id")} - {None}
    for item in plain.get("response", {}).get("output", []):
        ids.add(item["id"])
    for id in ids:
        text = text.replace(id, "ID")
    plain = json.loads(text)
    for name in ("created_at", "completed_at"):
        plain.get("response", {}).pop(name, None)
    usage = plain.get("response", {}).get("usage") or {}
    usage.pop("input_tokens_details", None)  # the second one finds more of its prompt cached
    return plain


def joined(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_the_events_are_those_of_the_stream(client: openai.OpenAI):
    with client.beta.responses.connect() as connection:
        connection.response.create(**ASKED)
        ours = events_of(connection)
    theirs = list(client.responses.create(stream=True, **ASKED))
    assert joined(ours) == joined(theirs) != ""

    def but_deltas(events: list[Any]) -> list[dict[str, Any]]:
        """The events without text deltas and numbers: both depend on how timing splits the text."""
        kept = [as_streamed(event) for event in events if event.type != "response.output_text.delta"]
        return [{name: value for name, value in event.items() if name != "sequence_number"} for event in kept]

    assert but_deltas(ours) == but_deltas(theirs)
    assert [event.sequence_number for event in ours] == list(
        range(ours[0].sequence_number, ours[-1].sequence_number + 1)
    )


def test_one_response_goes_on_from_another(client: openai.OpenAI):
    with client.beta.responses.connect() as connection:
        connection.response.create(**ASKED)
        first = events_of(connection)[-1].response
        connection.response.create(**ASKED | {"input": "And then?"}, previous_response_id=first.id)
        second = events_of(connection)[-1].response
    assert second.previous_response_id == first.id and second.output[0].content[0].text
    again = client.responses.create(**ASKED | {"input": "And then?"}, previous_response_id=first.id)
    assert again.output[0].content[0].text == second.output[0].content[0].text
    assert client.responses.retrieve(second.id).id == second.id


def test_what_is_wrong_is_told_and_the_socket_goes_on(client: openai.OpenAI):
    with client.beta.responses.connect() as connection:
        for fields, param, status in (
            ({"temperature": 3.5}, "temperature", 400),
            ({"model": "none"}, "model", 404),
            ({"previous_response_id": "resp_none"}, "previous_response_id", 404),
            ({"background": True}, "background", 400),
        ):
            connection.response.create(**ASKED | fields)
            error = events_of(connection)[-1]
            assert (error.type, error.error.param, error.status) == ("error", param, status), error
        connection.response.create(**ASKED)
        assert joined(events_of(connection))


def test_many_at_a_time_with_stream_ids(client: openai.OpenAI):
    with client.beta.responses.connect() as connection:
        for lane in ("a", "b"):
            for text in ("one", "two"):
                connection.send({"type": "response.create", "stream_id": lane, **ASKED, "input": f"{lane} {text}"})
        found: dict[str, list[Any]] = {"a": [], "b": []}
        while sum(event.type == "response.incomplete" for events in found.values() for event in events) < 4:
            event = connection.recv()
            found[event.stream_id].append(event)
    for lane, events in found.items():
        ids = [event.response.id for event in events if event.type in ("response.created", "response.incomplete")]
        assert ids[0] == ids[1] != ids[2] == ids[3], "one after the other"
        whole = client.responses.create(**ASKED | {"input": f"{lane} one"}).output[0].content[0].text
        assert joined(events).startswith(whole)


@on_loop
async def test_the_asynchronous_client_too_and_what_it_leaves_behind_ends():
    async with serving(step_s=0.005, script=ENDLESS) as running:
        async with openai.AsyncOpenAI(base_url=running.server.url + "/v1", api_key="unused") as client:
            async with client.beta.responses.connect() as connection:
                await connection.response.create(**ASKED)
                events = []
                async for event in connection:
                    events.append(event)
                    if event.type == "response.incomplete":
                        break
                assert joined(events) == events[-1].response.output[0].content[0].text != ""
                await connection.response.create(**ASKED | {"max_output_tokens": 400})
                await until(lambda: running.server.service.live)
        await running.check_ended()


@on_loop
async def test_draining_waits_for_the_response_and_closes_with_1001():
    async with serving(step_s=0.002, script=ENDLESS) as running:
        async with running.http.ws_connect(running.server.url + "/v1/responses") as socket:
            await socket.send_json({"type": "response.create"} | ASKED)
            first = await socket.receive_json(timeout=60)
            assert first["type"] == "response.created"
            draining = asyncio.create_task(running.server.drain())
            kinds = []
            while (message := await socket.receive(timeout=60)).type.name == "TEXT":
                kinds.append(json.loads(message.data)["type"])
            assert kinds[-2:] == ["response.incomplete", "error"] and socket.close_code == 1001
            assert await draining


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "type"),
        ({"type": "response.inject", "response_id": "a", "input": []}, "type"),
        ({"type": "response.create", "input": "a", "stream_id": 1}, "stream_id"),
        ({"type": "response.create", "input": "a", "stream": False}, "stream"),
        ({"type": "response.create", "input": "a", "generate": False}, "generate"),
        ({"type": "response.create", "input": 1}, "input"),
    ],
)
@on_loop
async def test_a_message_that_is_wrong_is_told_where(message, param):
    async with serving() as running, running.http.ws_connect(running.server.url + "/v1/responses") as socket:
        await socket.send_json(message)
        error = await socket.receive_json(timeout=60)
        assert (error["type"], error["error"]["param"], error["status"]) == ("error", param, 400)
