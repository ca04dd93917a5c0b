"""Time limits, metrics, progress and `best_of` over HTTP, and the token-id routes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.deploy.running import RunningServer, post_bytes, read_answer, send

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "hi"}}


@pytest.fixture(scope="module")
def patient_server() -> Iterator[RunningServer]:
    """Two slots, steps of 20 ms and 16 tokens, chunked prefill, pings after 100 ms, URL prefix."""
    engine = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 4}
    server = {"sse_ping_interval_s": 0.1, "root_path": "/llm", "enable_request_metrics": True}
    with RunningServer(step_s=0.02, script={"eos_probability": 0.0}, engine=engine, server=server) as running:
        yield running


def until_there(server: RunningServer, num: int) -> None:
    """Waits until the engine has so many sequences."""
    deadline = time.monotonic() + 60.0
    while server.stats()["sequences"] < num:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- time limits


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_request_that_takes_too_long_is_told_where_it_was(slow_server, path):
    for body, headers in (({"timeout_s": 0.2}, {}), ({}, {"X-Request-Timeout": "0.2"})):
        answer = slow_server.post(path, ASKED[path] | {"max_tokens": 400} | body, headers)
        assert answer.status == 504 and answer.error["code"] == "deadline_exceeded"
        assert answer.error["details"] == {"stage": "execute"} and answer.seconds < 60
    slow_server.wait_until_idle()


def test_in_a_stream_the_error_is_the_last_event(slow_server):
    body = ASKED[TEXT] | {"max_tokens": 400, "stream": True, "timeout_s": 0.2}
    *chunks, error, done = slow_server.post(TEXT, body).events()
    assert chunks and done == "[DONE]"
    assert (error["error"]["code"], error["error"]["details"]) == ("deadline_exceeded", {"stage": "execute"})


def test_one_that_was_never_served_gets_408(patient_server):
    with patient_server.connect() as first, patient_server.connect() as second:
        for connection in (first, second):
            send(connection, post_bytes(TEXT, ASKED[TEXT] | {"max_tokens": 100}))
        until_there(patient_server, 2)
        answer = patient_server.post(TEXT, ASKED[TEXT] | {"timeout_s": 0.2})
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert answer.error["details"] == {"stage": "schedule"}
    patient_server.wait_until_idle()


def test_the_server_may_limit_the_time_in_line_for_all():
    engine = {"max_num_seqs": 1, "max_queue_s": 0.2}
    with RunningServer(step_s=0.01, script={"eos_probability": 0.0}, engine=engine) as server:
        with server.connect() as first:
            send(first, post_bytes(TEXT, ASKED[TEXT] | {"max_tokens": 100}))
            until_there(server, 1)
            answer = server.post(TEXT, ASKED[TEXT])
            assert (answer.status, answer.error["details"]) == (408, {"stage": "schedule"})
            assert read_answer(first).status == 200, "it was served, so it may take its time"


@pytest.mark.parametrize("header", ["0", "-1", "x", "1e3", "inf", "9" * 9, ""])
def test_a_time_limit_that_is_none_is_refused(server, header):
    answer = server.post(TEXT, ASKED[TEXT], {"X-Request-Timeout": header})
    assert (answer.status, answer.error["param"]) == (400, "timeout_s")
    assert server.post(TEXT, ASKED[TEXT] | {"timeout_s": 0}).error["param"] == "timeout_s"


# -- metrics


def test_times_are_told_where_they_are_asked_for(slow_server):
    body = {"max_tokens": 11, "return_metrics": True}
    told = [slow_server.post(path, asked | body).json["metrics"] for path, asked in ASKED.items()]
    events = slow_server.post(CHAT, ASKED[CHAT] | body | {"stream": True}).events()
    assert events[-2]["choices"] == [] and [e for e in events[:-1] if "metrics" in e] == [events[-2]]
    for metrics in (*told, events[-2]["metrics"]):
        assert metrics["preemptions"] == 0 and metrics["queue_time_ms"] >= 0
        assert metrics["time_to_first_token_ms"] >= 10 and metrics["generation_time_ms"] >= 100
        assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 10, abs=0.001)
        assert 1 < metrics["tokens_per_second"] <= 11 / 0.11
        stages = metrics["stages"]
        assert list(stages) == ["intake", "tokenize", "schedule", "prefill", "decode"]
        assert stages["decode"] == metrics["generation_time_ms"]
        assert sum(stages.values()) <= metrics["time_to_first_token_ms"] + metrics["generation_time_ms"] + 1
    assert "metrics" not in slow_server.post(TEXT, ASKED[TEXT] | {"max_tokens": 1}).json


def test_with_usage_they_are_in_the_same_last_chunk(patient_server):
    body = ASKED[TEXT] | {"max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    last = patient_server.post(TEXT, body).events()[-2]
    assert last["usage"]["completion_tokens"] == 2 and last["metrics"]["time_to_first_token_ms"] > 0


# -- during the prefill


def test_progress_of_a_long_prompt_is_told_piece_by_piece(patient_server):
    body = {"prompt": "x" * 60, "max_tokens": 2, "stream": True, "return_progress": True, "n": 2}
    events = patient_server.post(TEXT, body).events()[:-1]
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert told and all(event["choices"] == [] for event in events if "prompt_progress" in event)
    assert [one["total"] for one in told] == [60] * len(told) and told[-1]["processed"] == 60
    assert [one["processed"] for one in told] == sorted({one["processed"] for one in told})
    assert all(one["cached"] == one["cache"] == 0 and one["time_ms"] >= 0 for one in told)
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"] and e["choices"][0]["index"] == 0) != ""
    again = patient_server.post(TEXT, body).events()[0]["prompt_progress"]
    assert again["cached"] == 59 and again["processed"] == 60
    assert patient_server.post(TEXT, body | {"stream": False}).error["param"] == "return_progress"


def test_a_stream_that_is_silent_gets_comments_which_are_no_events(patient_server):
    body = {"prompt": "y" * 200, "max_tokens": 2, "stream": True}
    with patient_server.connect() as connection:
        send(connection, post_bytes(TEXT, body))
        answer = read_answer(connection)
    pieces = answer.body.decode().split("\n\n")
    pings = [piece for piece in pieces if piece == ": ping"]
    assert len(pings) >= 1 and pieces.index(": ping") == 0, "the prompt takes a quarter of a second"
    events = [json.loads(piece[6:]) for piece in pieces if piece.startswith("data: {")]
    assert sum(len(event["choices"][0]["text"]) for event in events if event["choices"]) == 2
    assert len(pings) + len(events) + 2 == len(pieces), "and [DONE], and what follows the last blank line"


# -- a URL prefix


def test_all_routes_answer_under_the_prefix_too(patient_server):
    for prefix in ("", "/llm"):
        assert patient_server.get(f"{prefix}/health/ready").status == 200
        assert patient_server.get(f"{prefix}/v1/models").json["data"]
        assert patient_server.post(f"{prefix}{TEXT}", ASKED[TEXT] | {"max_tokens": 1}).status == 200
    assert patient_server.get("/llm/nowhere").status == 404


# -- best_of


def test_best_of_returns_the_likeliest_and_counts_all(server):
    body = {"prompt": ["a", "b"], "n": 2, "best_of": 5, "max_tokens": 4, "ignore_eos": True}
    answer = server.post(TEXT, body).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 2 * 5 * 4
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert server.post(TEXT, body | {"logprobs": 1}).json["choices"][0]["logprobs"]["tokens"]
    for wrong in ({"stream": True}, {"best_of": 1}):
        assert server.post(TEXT, body | wrong).error["param"] == "best_of"
    assert server.post(CHAT, ASKED[CHAT] | {"best_of": 2}).error["param"] == "best_of"


def test_choices_are_ranked_by_their_mean_log_probability():
    from millrace.deploy.api.chat.answers import ChatAnswerBuilder
    from millrace.deploy.api.openai.choice_state import ChoiceState, best
    from millrace.stages.messages import TokenLogprobs
    from millrace.stages.outputs import ChoiceDelta

    answer = ChatAnswerBuilder("a", 0, "m", False, False, has_logprobs=False)

    def choice(index: int, *logprobs: float) -> ChoiceState:
        made, tokens = ChoiceState(index), [TokenLogprobs(0, "", b"", logprob, 1, ()) for logprob in logprobs]
        for token in tokens:
            answer.keep(made, ChoiceDelta(index, "", [0], (token,)))
        return made

    given = [choice(0, -1, -3), choice(1, -1), choice(2), choice(3, -1.5, -0.1), choice(4, -9), choice(5, -9)]
    first, second, third, fourth = best(given, 3, 2)
    assert [given.index(one) for one in (first, second, third, fourth)] == [1, 0, 3, 4]
    assert [one.index for one in (first, second, third, fourth)] == [0, 1, 2, 3]


# -- tokens in, tokens out


def test_token_ids_go_in_and_come_out(server):
    sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    body = {"token_ids": list(b"hi"), "sampling_params": sampling}
    answer = server.post(GENERATE, body).json
    (choice,) = answer["choices"]
    text = server.post(TEXT, ASKED[TEXT] | sampling).json["choices"][0]["text"]
    assert bytes(choice["token_ids"]).decode() == text and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert "text" not in choice and answer["usage"]["completion_tokens"] == 4
    other = {"input_ids": [[104, 105]], "sampling_params": sampling}
    assert server.post("/inference/v1/generate", other).json["choices"] == [choice]


def test_token_ids_are_streamed_as_they_come(server):
    body = {"token_ids": list(b"hi"), "sampling_params": {"max_tokens": 6, "seed": 3, "ignore_eos": True}}
    *chunks, done = server.post(GENERATE, body | {"stream": True}).events()
    ids = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert done == "[DONE]" and ids == server.post(GENERATE, body).json["choices"][0]["token_ids"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, {}, "x", 1])
def test_a_field_on_the_wrong_side_of_sampling_params_is_unknown(server, stream):
    """It has no effect, whatever its value, and the answer says where it stood."""
    sampling = {"max_tokens": 2, "stream": stream, "stream_options": 3}
    answer = server.post(GENERATE, {"token_ids": [97], "n": -4e40, "suffix": "x", "sampling_params": sampling})
    assert answer.status == 200 and len(answer.json["choices"]) == 1
    assert set(answer.headers["x-ignored-fields"].split(", ")) == {
        "in_sampling_params.stream",
        "in_sampling_params.stream_options",
        "outside_sampling_params.n",
        "outside_sampling_params.suffix",
    }
    both = {"token_ids": [97], "suffix": None, "sampling_params": {"suffix": "x"}}
    assert server.post(GENERATE, both).error["param"] == "suffix", "what stands beside hides nothing"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": "hi"}, "token_ids"),
        ({"token_ids": ["hi"]}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [260]}, "token_ids"),
        ({"token_ids": [1], "sampling_params": [1]}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"top_p": 2}}, "top_p"),
        (
            {"token_ids": [1], "sampling_params": {"guided_json": {"type": "object"}, "guided_regex": "a"}},
            "guided_regex",
        ),
    ],
)
def test_what_is_wrong_with_such_a_request_is_named(server, body, param):
    answer = server.post(GENERATE, body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_rendered_request_generates_what_its_own_route_would(server):
    sampling = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "stop": ["zzz"], "logit_bias": {"101": 1}}
    rendered = server.post(f"{CHAT}/render", ASKED[CHAT] | sampling).json
    assert rendered["prompt"] == "<|user|>hi<|end|><|assistant|>" and rendered["token_ids"] == [258, 104, 105, 256, 259]
    text = server.post(CHAT, ASKED[CHAT] | sampling).json["choices"][0]["message"]["content"]
    assert bytes(server.post(GENERATE, rendered).json["choices"][0]["token_ids"]).decode() == text
    first, second = server.post(f"{TEXT}/render", {"prompt": ["hi", "you"], "truncate_prompt_tokens": 2}).json
    assert (first["token_ids"], second["token_ids"], second["prompt"]) == (list(b"hi"), list(b"ou"), "ou")
    refused = server.post(f"{CHAT}/render", ASKED[CHAT] | {"max_tokens": 10**6})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")


# -- limits on tokens, over HTTP


def test_allowed_tokens_bad_words_and_truncation_are_taken(server):
    for path, asked in ASKED.items():
        body = asked | {"allowed_token_ids": [97, 98], "bad_words": ["x"], "truncate_prompt_tokens": 2, "max_tokens": 2}
        answer = server.post(path, body)
        assert answer.status == 200 and answer.json["usage"]["prompt_tokens"] == 2
        for wrong in (
            {"allowed_token_ids": []},
            {"allowed_token_ids": [260]},
            {"bad_words": [" "]},
            {"bad_words": "x"},
        ):
            (name,) = wrong
            assert server.post(path, body | wrong).error["param"] == name
    refused = server.post(TEXT, ASKED[TEXT] | {"suffix": "x"})
    assert refused.error["code"] == "unsupported_parameter" and "markers" in refused.error["message"]


def test_tokenize_truncates_and_spells_tokens(server):
    body = {"prompt": "Größe", "truncate_prompt_tokens": 3, "return_token_strs": True, "add_special_tokens": False}
    assert server.post("/tokenize", body).json["token_strs"] == ["\ufffd", "\ufffd", "e"]
    assert server.post("/tokenize", body | {"truncation_side": "right"}).json["tokens"] == list("Größe".encode()[:3])


@pytest.mark.parametrize("value", [False, 0, "", [], "x"])
def test_sampling_params_that_are_no_object_are_refused(server, value):
    answer = server.post(GENERATE, {"token_ids": [97], "sampling_params": value})
    assert (answer.status, answer.error["param"]) == (400, "sampling_params")
    assert server.post(GENERATE, {"token_ids": [97], "sampling_params": None}).status == 200
