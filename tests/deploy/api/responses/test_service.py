"""`/v1/responses` through the official client, unmodified, and over bare sockets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.deploy.openai_shapes import check_events, check_response, text_of
from tests.deploy.running import Answer, RunningServer, post_bytes

GREEDY = {"model": "scripted", "temperature": 0, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}
PATH = "/v1/responses"
ASK = {"input": "Tell me a story", "temperature": 0, "max_output_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream. Each event name equals its type."""
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = []
    for frame in answer.body.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def wait_until_over(server: RunningServer, response_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        response = server.get(f"{PATH}/{response_id}").json
        if response["status"] not in ("queued", "in_progress"):
            return response
        time.sleep(0.01)
    raise TimeoutError(response)


# -- through the client


def test_the_client_creates_streams_retrieves_and_deletes(client):
    whole = client.responses.create(input="Tell me a story", **GREEDY)
    assert whole.status == "incomplete" and len(whole.output_text) > 9
    assert whole.usage.output_tokens == 12 and whole.usage.total_tokens == whole.usage.input_tokens + 12
    with client.responses.stream(input="Tell me a story", **GREEDY) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert told == whole.output_text
    kept = client.responses.retrieve(whole.id)
    assert kept.output_text == whole.output_text and kept.usage == whole.usage
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_the_client_makes_one_in_the_background_and_polls(client):
    response = client.responses.create(input="Tell me a story", background=True, **GREEDY)
    assert response.status == "queued" and response.background
    deadline = time.monotonic() + 60.0
    while response.status in ("queued", "in_progress") and time.monotonic() < deadline:
        response = client.responses.retrieve(response.id)
    assert len(response.output_text) > 9 and response.usage.output_tokens == 12


def test_the_client_cancels_and_goes_on_where_a_stream_was_cut(slow_server):
    asked = {"input": "a", "model": "scripted", "background": True, "stream": True, "max_output_tokens": 400}
    with openai.OpenAI(base_url=slow_server.url + "/v1", api_key="unused", max_retries=0) as client:
        cut = []
        with client.responses.create(**asked) as stream:
            for event in stream:
                cut.append(event)
                if event.type == "response.output_text.delta":
                    break
        response_id, last = cut[0].response.id, cut[-1].sequence_number
        assert client.responses.retrieve(response_id).status == "in_progress"
        rest = client.responses.retrieve(response_id, stream=True, starting_after=last)
        following = next(iter(rest))
        assert following.sequence_number == last + 1
        cancelled = client.responses.cancel(response_id)
        assert cancelled.status == "cancelled" and client.responses.cancel(response_id).status == "cancelled"
        events = [following, *rest]
    assert [event.sequence_number for event in events] == list(range(last + 1, last + 1 + len(events)))
    assert events[-1].response.status == "cancelled"
    told = "".join(event.delta for event in [*cut, *events] if event.type == "response.output_text.delta")
    assert told == events[-1].response.output_text
    slow_server.wait_until_idle()


def test_a_response_goes_on_from_an_earlier_one(client):
    first = client.responses.create(input="one", instructions="be brief", **GREEDY)
    second = client.responses.create(input="two", previous_response_id=first.id, **GREEDY)
    chat = [("user", "one"), ("assistant", first.output_text), ("user", "two")]
    spelled = client.responses.create(input=[{"role": role, "content": text} for role, text in chat], **GREEDY)
    assert second.output_text == spelled.output_text
    assert second.usage.input_tokens == spelled.usage.input_tokens  # instructions are not carried over
    listed = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.content[0].text for item in listed] == [text for _, text in chat]  # over two pages
    newest = client.responses.input_items.list(second.id, limit=1).data[0]
    assert (newest.role, newest.content[0].text) == ("user", "two")


def test_logprobs_come_if_asked_for(client):
    include = ["message.output_text.logprobs"]
    response = client.responses.create(input="Once", include=include, top_logprobs=2, **GREEDY)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == response.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_errors_have_the_clients_own_classes(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="a", **GREEDY | {"max_output_tokens": 600})
    assert refused.value.code == "context_length_exceeded" and "max_output_tokens = 600" in str(refused.value)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(input="a", previous_response_id="resp_none", **GREEDY)
    assert missing.value.param == "previous_response_id"


# -- over bare sockets


def test_a_stream_has_openais_events_and_adds_up_to_the_whole(server):
    whole = server.post(PATH, ASK).json
    events = events_of(server.post(PATH, ASK | {"stream": True}))
    check_response(whole)
    check_events(events)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [kind for kind in kinds if kind == "output_text.delta"]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds == [*opening, *deltas, "output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == text_of(whole)
    last = events[-1]["response"]
    assert text_of(last) == text_of(whole) and last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert server.get(f"{PATH}/{last['id']}").json == last


def test_it_says_what_chat_says(server):
    asked = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "max_tokens": 12}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = server.post("/v1/chat/completions", asked | {"messages": messages}).json
    limit = asked.pop("max_tokens")
    told = server.post(PATH, asked | {"instructions": "be brief", "input": "hi", "max_output_tokens": limit}).json
    assert text_of(told) == chat["choices"][0]["message"]["content"]
    assert told["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_cached_tokens_are_counted(server):
    asked = ASK | {"input": "the same long prompt, word for word, again and again"}
    told = [server.post(PATH, asked).json["usage"]["input_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert told[0] == 0 < told[1]


def test_a_stop_string_ends_it(server):
    text = text_of(server.post(PATH, ASK).json)
    stop = text[4:6]
    told = server.post(PATH, ASK | {"stop": [stop]}).json
    assert (told["status"], text_of(told)) == ("completed", text[: text.index(stop)])


def test_what_is_not_to_be_stored_is_not(server):
    told = server.post(PATH, ASK | {"store": False}).json
    assert server.get(f"{PATH}/{told['id']}").error["code"] == "response_not_found"


def test_truncation_leaves_out_the_oldest_turns(server):
    turns = [{"role": "user", "content": f"{i} " + "x" * 198} for i in range(4)]
    refused = server.post(PATH, ASK | {"input": turns})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    told = server.post(PATH, ASK | {"input": turns, "truncation": "auto"}).json
    assert told["usage"] == server.post(PATH, ASK | {"input": turns[2:]}).json["usage"] | {
        "input_tokens_details": told["usage"]["input_tokens_details"]
    }
    alone = server.post(PATH, ASK | {"input": "x" * 600, "truncation": "auto"})
    assert alone.error["code"] == "context_length_exceeded"
    nothing = server.post(PATH, ASK | {"input": [{"type": "reasoning", "summary": []}], "truncation": "auto"})
    assert (nothing.status, nothing.error["code"]) == (400, "empty_prompt")


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[RunningServer]:
    """Two keys, and room for about two responses."""
    with RunningServer(server={"api_key": ["mine", "yours"], "response_store_bytes": 8100}) as running:
        yield running


def test_another_keys_responses_are_not_there(keyed_server):
    mine, yours = ({"Authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    made = keyed_server.post(PATH, ASK, mine).json
    path = f"{PATH}/{made['id']}"
    assert keyed_server.get(path, mine).json == made
    asked = ASK | {"previous_response_id": made["id"]}
    for answer in (
        keyed_server.get(path, yours),
        keyed_server.get(f"{path}/input_items", yours),
        keyed_server.get(path, yours, method="DELETE"),
        keyed_server.post(f"{path}/cancel", {}, yours),
        keyed_server.post(PATH, asked, yours),
    ):
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
    assert keyed_server.get(path).status == 401
    assert keyed_server.post(PATH, asked, mine).status == keyed_server.get(path, mine).status == 200


def test_the_store_is_bounded_and_says_when_it_has_no_room(keyed_server):
    mine = {"Authorization": "Bearer mine"}
    ids = [keyed_server.post(PATH, ASK, mine).json["id"] for _ in range(4)]
    kept = [keyed_server.get(f"{PATH}/{response_id}", mine).status for response_id in ids]
    assert kept[0] == 404 and kept[-1] == 200
    full = keyed_server.post(PATH, ASK | {"background": True, "input": "x" * 8100}, mine)
    assert (full.status, full.error["code"]) == (429, "rate_limit_exceeded") and full.headers["retry-after"] == "1"
    keyed_server.wait_until_idle()


def test_a_client_that_leaves_ends_its_request_but_not_one_in_the_background(slow_server):
    long = ASK | {"max_output_tokens": 400, "stream": True}
    for asked in (long, long | {"stream": False}):
        with slow_server.connect() as connection:
            connection.sendall(post_bytes(PATH, asked))
            wait_for_work(slow_server)
        assert slow_server.wait_until_idle() < 2.0
    made = slow_server.post(PATH, long | {"stream": False, "background": True}).json
    wait_for_work(slow_server)
    assert slow_server.get(f"{PATH}/{made['id']}").json["status"] in ("queued", "in_progress")
    assert slow_server.get(f"{PATH}/{made['id']}", method="DELETE").json["deleted"] is True
    assert slow_server.wait_until_idle() < 2.0


def wait_for_work(server: RunningServer) -> None:
    deadline = time.monotonic() + 60.0
    while not server.stats()["sequences"]:
        assert time.monotonic() < deadline


def test_only_what_is_made_in_the_background_is_cancelled_or_streamed_again(server):
    made = server.post(PATH, ASK).json
    for answer in (server.post(f"{PATH}/{made['id']}/cancel", {}), server.get(f"{PATH}/{made['id']}?stream=true")):
        assert (answer.status, answer.error["code"]) == (400, "invalid_value")


def test_a_finished_stream_can_be_had_again_from_anywhere(server):
    events = events_of(server.post(PATH, ASK | {"stream": True, "background": True}))
    check_events(events)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    path = f"{PATH}/{events[0]['response']['id']}?stream=true"
    assert events_of(server.get(path)) == events
    assert events_of(server.get(f"{path}&starting_after=5")) == events[6:]
    assert server.get(path.partition("?")[0]).json == events[-1]["response"]


def test_what_fails_in_the_background_says_why(server):
    made = server.post(PATH, ASK | {"background": True, "max_output_tokens": 600}).json
    failed = wait_until_over(server, made["id"])
    check_response(failed)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_prompt")
    assert "max_output_tokens = 600" in failed["error"]["message"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=maybe", "stream"),
        ("?starting_after=-1", "starting_after"),
        ("?starting_after=x", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=none", "after"),
    ],
)
def test_a_wrong_query_names_its_field(server, query, param):
    made = server.post(PATH, ASK).json
    answer = server.get(f"{PATH}/{made['id']}{query}")
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"n": 2}, "n"),
        ({"n_discard": 2}, None),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
    ],
)
def test_a_wrong_field_is_named_in_this_apis_words(server, fields, param):
    answer = server.post(PATH, ASK | fields)
    if param is None:
        assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "n_discard")
    else:
        assert answer.status in (400, 404) and answer.error["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"verbosity": "low"}},
        {"reasoning": {"summary": "detailed"}},
        {"tools": [{"type": "function", "name": f"f{i}"} for i in range(300)], "tool_choice": "none"},
    ],
)
def test_a_wish_that_changes_nothing_here_is_accepted(server, fields):
    assert server.post(PATH, ASK | fields).status == 200
