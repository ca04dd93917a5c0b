"""The API as it is on the wire: shapes, streams that equal whole answers, and errors."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.inspect.server_info import is_batch_invariant
from millrace.stages.config import EngineConfig
from tests.deploy.running import ROOT, RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Tell me a story"}]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


_numbers = itertools.count()


def body_for(path: str, **fields: object) -> dict[str, object]:
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "Once upon a time"}
    return (
        asked | GREEDY | {"cache_salt": f"test-{next(_numbers)}"} | fields
    )  # what others asked before changes nothing


def piece_of(path: str, choice: dict) -> str:
    return choice["delta"].get("content", "") if path == CHAT else choice["text"]


def text_of(path: str, choice: dict) -> str:
    return choice["message"]["content"] if path == CHAT else choice["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 7},
        {"stop": ["e"]},
        {"stop": "o", "include_stop_str_in_output": True},
        {"ignore_eos": False, "max_tokens": 200},
        {"logprobs": True, "top_logprobs": 2},
        {"max_tokens": 1},
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_pieces_of_a_stream_are_the_whole_answer(server: RunningServer, path, fields):
    if path == TEXT and "logprobs" in fields:
        fields = {"logprobs": 2}
    whole = server.post(path, body_for(path, **fields))
    stream = server.post(path, body_for(path, stream=True, stream_options={"include_usage": True}, **fields))
    assert whole.status == stream.status == 200
    *chunks, last, done = stream.events()
    assert done == "[DONE]"
    assert last["choices"] == [] and last["usage"] == whole.json["usage"]
    for choice in whole.json["choices"]:
        own = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece_of(path, piece) for piece in own) == text_of(path, choice)
        ends = [(piece["finish_reason"], piece["stop_reason"]) for piece in own if piece["finish_reason"]]
        assert ends == [(choice["finish_reason"], choice["stop_reason"])]
        assert own[-1]["finish_reason"], "the last chunk of a choice says why it ended"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


def test_a_chat_answer_has_openais_shape(server: RunningServer):
    answer = server.post(CHAT, body_for(CHAT, max_tokens=3), {"X-Request-Id": "mine-1"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "mine-1"
    body = answer.json
    text = body["choices"][0]["message"].pop("content")
    assert len(text) <= 3 and isinstance(body.pop("created"), int)
    prompt = len("Tell me a story") + 3
    assert body == {
        "id": "chatcmpl-mine-1",
        "object": "chat.completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant"},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt + 3,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "system_fingerprint": None,
    }


def test_usage_says_how_much_of_the_prompt_was_found_in_the_cache(server: RunningServer):
    body = {"prompt": "a story that is told more than once" + "." * 40, "max_tokens": 2, "cache_salt": "twice"}
    found = [server.post(TEXT, body).json["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert found == [0, 74]
    metrics = server.get("/metrics").body.decode()
    hits = next(line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total"))
    assert float(hits.split()[-1]) >= 64
    assert 'millrace:kv_blocks{engine="0",model_name="scripted",state="cached"}' in metrics


def test_a_chat_stream_begins_with_the_role_of_each_choice(server: RunningServer):
    answer = server.post(CHAT, body_for(CHAT, stream=True, n=2, max_tokens=2))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    first, second, *rest, _done = answer.events()
    for index, chunk in enumerate((first, second)):
        assert chunk["object"] == "chat.completion.chunk"
        assert "usage" not in chunk
        assert chunk["choices"] == [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
            }
        ]
    assert all("role" not in choice["delta"] for chunk in rest for choice in chunk["choices"])


def test_running_usage_is_in_every_chunk_when_asked_for(server: RunningServer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = server.post(TEXT, body_for(TEXT, stream=True, stream_options=options, max_tokens=9))
    counts = [chunk["usage"]["completion_tokens"] for chunk in answer.events()[:-1]]
    assert counts == sorted(counts) and counts[-1] == 9


def test_a_stop_string_is_named_and_left_out(server: RunningServer):
    plain = server.post(TEXT, body_for(TEXT)).json["choices"][0]["text"]
    stop = next(letter for letter in plain[3:] if letter.isascii() and letter.isalpha())
    choice = server.post(TEXT, body_for(TEXT, stop=["~~~", stop])).json["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == plain[: plain.index(stop)]


def test_choices_are_numbered_prompt_by_prompt(server: RunningServer):
    answer = server.post(TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "seed": 1, "ignore_eos": True}).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "total_tokens": 2 + 16,
        "completion_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    alone = server.post(TEXT, {"prompt": "b", "n": 2, "max_tokens": 4, "seed": 1, "ignore_eos": True}).json
    assert [choice["text"] for choice in alone["choices"]] == [choice["text"] for choice in answer["choices"][2:]]


def test_token_ids_as_prompt_give_the_answer_of_their_text(server: RunningServer):
    texts = [
        server.post(TEXT, GREEDY | {"prompt": prompt}).json["choices"][0]["text"]
        for prompt in ("abc", ["abc"], list(b"abc"), [list(b"abc")])
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chat_spell_the_answer(server: RunningServer, stream):
    answer = server.post(CHAT, body_for(CHAT, logprobs=True, top_logprobs=2, stream=stream))
    if stream:
        pieces = [chunk["choices"][0] for chunk in answer.events()[:-1]]
        text = "".join(piece["delta"].get("content", "") for piece in pieces)
        entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    else:
        choice = answer.json["choices"][0]
        text, entries = choice["message"]["content"], choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == text
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["bytes"] and all(0 <= byte <= 255 for byte in entry["bytes"])
        assert len(entry["top_logprobs"]) == 2
        assert all(set(top) == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])


def test_logprobs_of_completions_are_parallel_lists(server: RunningServer):
    choice = server.post(TEXT, body_for(TEXT, logprobs=3)).json["choices"][0]
    shape = choice["logprobs"]
    assert "".join(shape["tokens"]) == choice["text"]
    assert len({len(values) for values in shape.values()}) == 1
    assert shape["text_offset"] == [len("".join(shape["tokens"][:i])) for i in range(len(shape["tokens"]))]
    assert all(token in top for token, top in zip(shape["tokens"], shape["top_logprobs"], strict=True))


def test_models_are_listed_with_their_context(server: RunningServer):
    (model,) = server.get("/v1/models").json["data"]
    assert model["id"] == "scripted" and model["max_model_len"] == 512
    assert server.get("/v1/models/scripted").json == model
    missing = server.get("/v1/models/other")
    assert missing.status == 404
    assert {**missing.error, "message": ""} == {
        "message": "",
        "type": "NotFoundError",
        "param": "model",
        "code": "model_not_found",
    }


def test_an_unknown_model_is_404_on_every_route(server: RunningServer):
    for path, asked in (
        (CHAT, {"messages": MESSAGES}),
        (TEXT, {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ):
        answer = server.post(path, asked | {"model": "other"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert server.post(path, asked | {"model": "scripted"}).status == 200


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/model", "/v1/models"),
        ("/Health", "/health"),
        ("/nothing/like/it", None),
        ("/" + "v1" * 2000, None),
    ],
)
def test_a_mistyped_route_names_the_one_that_is_most_like_it(server: RunningServer, path: str, meant: str | None):
    near = "" if meant is None else f"; did you mean {meant}?"
    answer = server.get(path)
    assert (answer.status, answer.error["message"]) == (404, f"there is no such route{near}")


def test_a_mistyped_model_names_the_one_that_is_most_like_it(server: RunningServer):
    for name, near in (("scriptd", "; did you mean scripted?"), ("other", ""), ("scripted" * 40, "")):
        message = server.post(TEXT, {"prompt": "a", "model": name}).error["message"]
        assert message.endswith(f": not served here{near}; GET /v1/models lists the served names")


def test_unknown_fields_are_dropped_and_listed(server: RunningServer):
    answer = server.post(TEXT, body_for(TEXT, kv_transfer_params={}, user="u", metadata={"a": 1}, **{"a\r\nb": 1}))
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"] == "kv_transfer_params, a??b"
    for path, asked in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
        assert server.post(path, asked | {"kv_transfer_params": {}}).headers["x-ignored-fields"] == "kv_transfer_params"


def test_text_survives_the_round_trip_through_tokens(server: RunningServer):
    for text in ("plain ASCII, 1 + 1 = 2\n\t", "é 漢字 🙂 \x00 \u2028", "<|end|>"):
        tokens = server.post("/tokenize", {"prompt": text}).json
        assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 512
        assert tokens["token_strs"] is None
        assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": text}


def test_a_chat_is_tokenized_by_its_template(server: RunningServer):
    plain = server.post("/tokenize", {"prompt": "hi", "return_token_strs": True}).json
    assert plain["token_strs"] == ["h", "i"]
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    assert chat["count"] > plain["count"]
    assert server.post("/tokenize", {"prompt": "a", "messages": MESSAGES}).status == 400
    assert server.post("/tokenize", {}).status == 400


def test_ids_outside_the_vocabulary_are_no_text(server: RunningServer):
    for tokens in ([-1], [10**6], [1.0], ["1"], [True], "x"):
        answer = server.post("/detokenize", {"tokens": tokens})
        assert answer.status == 400 and answer.error["param"].startswith("tokens")


def test_a_prompt_and_answer_over_the_context_is_refused_with_the_numbers(server: RunningServer):
    answer = server.post(TEXT, {"prompt": "a" * 500, "max_tokens": 13})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert all(number in answer.error["message"] for number in ("500", "13", "512"))
    chat = server.post(CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})
    assert (chat.error["code"], chat.error["param"]) == ("context_length_exceeded", "messages")
    assert server.post(TEXT, {"prompt": "a" * 500, "max_tokens": 12}).status == 200


def test_errors_before_the_first_token_of_a_stream_keep_their_status(server: RunningServer):
    answer = server.post(TEXT, {"prompt": "a" * 600, "stream": True})
    assert answer.status == 400 and answer.headers["content-type"] == "application/json"


def test_routes_that_are_not_there_say_so(server: RunningServer):
    assert server.get("/nope").error["code"] == "not_found"
    wrong = server.get(TEXT)
    assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")
    for path, allowed in (("/v1/requests/a/b", "DELETE"), ("/v1/requests/a/b/explain", "GET,HEAD")):
        assert server.get(path, method="OPTIONS").headers["allow"] == allowed
    assert server.get("/v1/requests/explain", method="DELETE").error["code"] == "request_not_found"


def test_a_request_can_be_aborted_by_its_id(slow_server: RunningServer):
    from tests.deploy.running import post_bytes, read_answer, send

    body = {"prompt": "a", "max_tokens": 400, "stream": True}
    with slow_server.connect() as connection:
        send(connection, post_bytes(TEXT, body, {"X-Request-Id": "to-abort"}))
        connection.recv(1, 2)  # MSG_PEEK: wait until it has begun
        answer = slow_server.get("/v1/requests/to-abort", method="DELETE")
        assert (answer.status, answer.json) == (200, {"id": "to-abort", "aborted": True})
        events = read_answer(connection).events()
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "abort"
    assert slow_server.get("/v1/requests/to-abort", method="DELETE").status == 404


def test_health_and_version_answer(server: RunningServer):
    assert server.get("/health").json == server.get("/health/ready").json == {"status": "ready"}
    assert server.get("/health/live").json == {"status": "alive"}
    assert server.get("/version").json["version"]


def test_server_info_tells_the_model_the_settings_and_the_blocks(server: RunningServer):
    info = server.get("/server_info").json
    parts = {"version", "model", "config", "memory", "graphs", "startup_s", "process", "blocks", "caches"}
    assert set(info) == parts
    assert info["graphs"] is None
    assert info["process"] == {"mode": "inline", "engine_pid": None, "engines": []}
    assert info["version"] == server.get("/version").json["version"]
    assert (info["model"]["id"], info["model"]["max_model_len"]) == ("scripted", 512)
    assert info["model"]["served_names"] == ["scripted"] and info["model"]["is_batch_invariant"] is False
    engine, deploy = info["config"]["engine"], info["config"]["server"]
    assert set(engine) == {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(deploy) == {field.name for field in dataclasses.fields(ServerConfig)}
    assert (engine["max_num_seqs"], engine["num_gpu_blocks"], engine["dtype"]) == (16, 256, "float32")
    assert deploy["port"] == 0 and deploy["api_key"] == []
    assert info["memory"] is None, "there is no model"
    blocks = info["blocks"]
    assert (blocks["num_blocks"], blocks["block_size"]) == (256, 16)
    assert sum(blocks[state] for state in ("free", "used", "cached", "quarantined")) == 256
    assert set(info["startup_s"]) == {"pipeline", "warm_up"}


def test_server_info_names_the_caches_that_fill_and_their_bounds(server: RunningServer):
    before = {cache["name"]: cache for cache in server.get("/server_info").json["caches"]}
    page = (ROOT / "deploy/docs/memory.md").read_text()
    assert set(before) == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)), "the page has all of them"
    server.post("/v1/responses", {"input": "remember me", "max_output_tokens": 16})
    after = {cache["name"]: cache for cache in server.get("/server_info").json["caches"]}
    for name in ("trace_records", "ended_requests", "responses"):
        assert before[name]["entries"] < after[name]["entries"] <= after[name]["max_entries"], name
    assert 0 < after["responses"]["bytes"] <= after["responses"]["max_bytes"] == 64 << 20
    assert all(cache["max_entries"] for cache in after.values())


@pytest.mark.parametrize(
    ("backend", "deterministic", "is_invariant"),
    [("native", False, False), ("torch", False, False), ("triton", False, False), ("triton", True, True)],
)
def test_server_info_says_whether_answers_depend_on_other_requests(
    backend: str, deterministic: bool, is_invariant: bool
):
    assert is_batch_invariant(backend, deterministic) == is_invariant


def test_server_info_counts_the_blocks_that_are_cached() -> None:
    with RunningServer() as server:  # with an empty cache, in which new blocks replace no old ones
        before = server.get("/server_info").json["blocks"]
        server.post(TEXT, {"prompt": "counted" + "." * 64, "max_tokens": 1, "cache_salt": "counted"})
        after = server.get("/server_info").json["blocks"]
    grown = after["cached"] - before["cached"]
    assert grown == before["free"] - after["free"]
    assert grown == 5  # four full ones, and the rest of the prompt


def test_a_connection_is_used_again(server: RunningServer):
    from tests.deploy.running import head_bytes, read_answer

    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(head_bytes("GET", "/health", {}))
            assert read_answer(connection).status == 200


def test_a_client_that_asks_first_is_told_to_go_on(server: RunningServer):
    from tests.deploy.running import head_bytes, read_answer

    data = b'{"prompt": "a", "max_tokens": 1}'
    headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), "Expect": "100-continue"}
    with server.connect() as connection:
        connection.sendall(head_bytes("POST", TEXT, headers))
        assert connection.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(data)
        assert read_answer(connection).status == 200


@pytest.mark.slow
def test_a_text_is_tokenized_up_to_a_million_characters_and_refused_beyond(server):
    answer = server.post("/tokenize", {"prompt": "a" * 2**20})
    assert (answer.status, answer.json["count"]) == (200, 2**20)
    chat = [{"role": "user", "content": "a" * (2**20 + 1)}]
    for body in ({"prompt": "a" * (2**20 + 1)}, {"messages": chat}):
        error = server.post("/tokenize", body).error
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
        assert "at most 1048576" in error["message"]
    counted = server.post("/v1/messages/count_tokens", {"model": "scripted", "messages": chat})
    assert counted.status == 400 and "at most 1048576" in counted.json["error"]["message"]
    tokens = server.post("/detokenize", {"tokens": [97] * (2**18 + 1)}).error
    assert tokens["param"] == "tokens" and "at most 262144" in tokens["message"]
    assert len(server.post("/detokenize", {"tokens": [97] * 2**18}).json["prompt"]) == 2**18
