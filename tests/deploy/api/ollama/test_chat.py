"""`/api/chat` over bare sockets: its lines, its options, and errors in Ollama's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deploy.running import Answer, RunningServer

PATH = "/api/chat"
HELLO = [{"role": "user", "content": "Tell me a story"}]
ASK: dict[str, Any] = {"messages": HELLO, "options": {"temperature": 0, "num_predict": 12}}
ENDS = ("total_duration", "prompt_eval_duration", "eval_duration")


def lines_of(answer: Answer) -> list[dict[str, Any]]:
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in answer.body.splitlines()]


def test_the_lines_of_a_stream_add_up_to_the_whole(server: RunningServer):
    whole = server.post(PATH, ASK | {"stream": False}).json
    *pieces, last = lines_of(server.post(PATH, ASK))
    assert all(not line["done"] and line["message"]["role"] == "assistant" for line in pieces)
    assert "".join(line["message"]["content"] for line in pieces) == whole["message"]["content"] != ""
    assert last["done"] and last["message"] == {"role": "assistant", "content": ""}
    for end in (whole, last):
        assert (end["done_reason"], end["prompt_eval_count"], end["load_duration"]) == (whole["done_reason"], 18, 0)
        assert 0 < end["eval_count"] <= 12 and all(end[name] > 0 for name in ENDS)
        assert end["total_duration"] >= end["eval_duration"] + end["prompt_eval_duration"]


def test_it_says_what_chat_says(server: RunningServer):
    sampling = {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 7, "presence_penalty": 0.5}
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    body = {"messages": messages, "max_tokens": 9, "stop": ["q"], "repetition_penalty": 1.2, **sampling}
    chat = server.post("/v1/chat/completions", body).json
    options = {**sampling, "num_predict": 9, "stop": "q", "repeat_penalty": 1.2, "repeat_last_n": -1}
    told = server.post(PATH, {"messages": messages, "stream": False, "options": options}).json
    assert told["message"]["content"] == chat["choices"][0]["message"]["content"]
    assert told["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    assert told["eval_count"] == chat["usage"]["completion_tokens"]


def test_a_name_may_have_the_tag_that_clients_add_and_comes_back_as_sent(server: RunningServer):
    for name in ("scripted", "scripted:latest"):
        assert server.post(PATH, ASK | {"model": name, "stream": False}).json["model"] == name
    for name in ("scripted:7b", "other:latest", "latest"):
        answer = server.post(PATH, ASK | {"model": name})
        assert answer.status == 404 and name in answer.json["error"]


def test_more_tokens_than_the_context_has_left_are_cut_not_refused(server: RunningServer):
    answer = server.post(PATH, {"messages": HELLO, "stream": False, "options": {"num_predict": 100_000}}).json
    assert answer["done_reason"] in ("stop", "length")
    assert answer["prompt_eval_count"] + answer["eval_count"] <= 512


def test_log_probabilities_come_with_their_text(server: RunningServer):
    *pieces, _ = lines_of(server.post(PATH, ASK | {"logprobs": True, "top_logprobs": 2}))
    tokens = [token for line in pieces for token in line["logprobs"]]
    assert "".join(token["token"] for token in tokens) == "".join(line["message"]["content"] for line in pieces)
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


@pytest.mark.slow
def test_calls_come_whole_with_arguments_as_an_object_and_keys_are_asked_for():
    call = (
        '<tool_call>\n{"name": "paint", "arguments": {"colour": "blue", "layers": 12345678901234567890}}\n</tool_call>'
    )
    tools = [{"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}]
    engine = {"max_model_len": 2048, "num_gpu_blocks": 512}
    flags = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_key": ["k"]}
    key = {"Authorization": "Bearer k"}
    with RunningServer(parrot=True, server=flags, engine=engine) as parrot:
        ask = {"messages": [{"role": "user", "content": f"<think>\nhm\n</think>\n\nOn it. {call}"}], "tools": tools}
        ask |= {"think": True}
        *pieces, last = lines_of(parrot.post(PATH, ask, key))
        whole = parrot.post(PATH, ask | {"stream": False}, key).json["message"]
        assert b"12345678901234567890" in parrot.post(PATH, ask, key).body  # which a double would round
        (made,) = (line["message"]["tool_calls"] for line in pieces if "tool_calls" in line["message"])
        assert made[0]["function"]["arguments"]["colour"] == "blue" and made[0]["function"]["index"] == 0
        assert [one["function"] for one in whole["tool_calls"]] == [made[0]["function"]]
        assert (
            "".join(line["message"].get("thinking", "") for line in pieces).strip() == whole["thinking"].strip() == "hm"
        )
        assert whole["content"].strip() == "On it." and last["done_reason"] == "stop"
        result = {"role": "tool", "tool_name": "paint", "content": "dry"}
        turns = [*ask["messages"], whole, result, {"role": "user", "content": "thanks"}]
        assert parrot.post(PATH, {"messages": turns, "stream": False}, key).json["message"]["content"] == "thanks"
        for answer in (parrot.post(PATH, ask), parrot.get("/api/tags"), parrot.get("/api/version")):
            assert answer.status == 401 and list(answer.json) == ["error"]


def test_an_empty_request_loads_and_an_unload_is_refused_with_the_reason(server: RunningServer):
    assert server.post(PATH, {"model": "scripted"}).json["done_reason"] == "load"
    refused = server.post(PATH, {"model": "scripted", "keep_alive": 0})
    assert refused.status == 403 and "stop the server" in refused.json["error"]
    assert server.post(PATH, ASK | {"keep_alive": 0, "stream": False}).status == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"options": {"temperature": 3}}, "options.temperature = 3"),
        ({"options": {"top_k": "5"}}, "options.top_k = '5'"),
        ({"options": {"stop": ["a"] * 17}}, "options.stop: must have at most 16 items, not 17"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"num_predict": -3}}, "options.num_predict = -3"),
        ({"options": []}, "options: must be an object"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role = 'robot'"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "user", "content": "x" * 9999}]}, "maximum context length is 512"),
        ({"format": "xml"}, "format = 'xml'"),
        ({"format": {"type": "nonsense"}}, "format"),
        ({"think": True}, "think"),
        ({"think": "a lot"}, "think = 'a lot': must be true, false, low"),
        ({"think": 1}, "think = 1: must be true, false, low"),
        ({"keep_alive": []}, "keep_alive"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"prompt": "hi"}, "prompt"),
        ({"top_logprobs": 999, "logprobs": True}, "top_logprobs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_is_named_as_this_api_names_it(server: RunningServer, body: Any, named: str):
    answer = server.post(PATH, ASK | body)
    assert answer.status == 400 and list(answer.json) == ["error"]
    assert answer.json["error"].startswith(named) or named in answer.json["error"]


def test_a_tool_need_not_say_that_it_is_a_function(server: RunningServer):
    tools = [{"function": {"name": "paint", "parameters": {"type": "object"}}}]
    turns = {"messages": HELLO, "stream": False, "options": {"num_predict": 1}}
    refused = server.post(PATH, turns | {"tools": [{"type": "retrieval", **tools[0]}]})
    assert refused.status == 400 and refused.json["error"].startswith("tools[0].type = 'retrieval'")
    answer = server.post(PATH, turns | {"tools": tools})
    assert answer.status == 200 or "--tool-call-parser" in answer.json["error"]


def test_what_is_not_obeyed_is_listed_and_what_changes_nothing_is_not(server: RunningServer):
    loader = {"num_ctx": 4096, "num_gpu": 99, "num_thread": 8, "use_mmap": True, "num_keep": 4, "typical_p": 1.0}
    fine = server.post(
        PATH, {"messages": HELLO, "options": {"num_predict": 1, **loader}, "truncate": True, "shift": True}
    )
    assert fine.status == 200 and "x-ignored-fields" not in fine.headers
    options = {"num_predict": 1, "repeat_penalty": 1.1, "repeat_last_n": 64, "depth": 3}
    listed = server.post(PATH, {"messages": HELLO, "options": options, "colour": 1}).headers["x-ignored-fields"]
    assert listed == "colour, options.depth, options.repeat_last_n"


def test_a_form_of_curl_is_read_unless_a_page_sent_it(server: RunningServer):
    body = json.dumps(ASK | {"stream": False}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}

    def send(headers: dict[str, str]) -> int:
        lines = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return server.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body).status

    assert send(form) == 200
    assert send(form | {"Sec-Fetch-Site": "cross-site"}) == send(form | {"Referer": "http://a.example/"}) == 415
    assert send(form | {"Origin": "http://a.example"}) == 403


def test_a_client_that_leaves_frees_its_request(slow_server: RunningServer):
    with slow_server.connect() as connection:
        body = json.dumps({"messages": HELLO}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(1)
    slow_server.wait_until_idle()
