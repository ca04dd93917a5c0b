"""`/generate` in three dialects over bare sockets, and huggingface_hub's client as the reader of TGI's."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.deploy.running import Answer, RunningServer

GENERATE = "/generate"
GREEDY = {"prompt": "hi", "temperature": 0, "max_tokens": 7}


def text_of(server: RunningServer, **fields: Any) -> str:
    """What a completion says."""
    text: str = server.post("/v1/completions", GREEDY | fields).json["choices"][0]["text"]
    return text


def events_of(answer: Answer) -> list[Any]:
    """The events of a stream; one of TGI has no [DONE]."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = [part.removeprefix("data: ") for part in answer.body.decode().split("\n\n")[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def test_tgi_gets_a_text_and_its_tokens_whole_and_streamed(server: RunningServer):
    parameters = {"max_new_tokens": 7, "details": True}
    whole = server.post(GENERATE, {"inputs": "hi", "parameters": parameters}).json
    assert whole["generated_text"] == text_of(server)
    assert "".join(token["text"] for token in whole["details"]["tokens"]) == whole["generated_text"]
    assert whole["details"]["finish_reason"] == "length" and whole["details"]["generated_tokens"] == 7
    for path, stream in ((GENERATE, {"stream": True}), ("/generate_stream", {})):
        events = events_of(server.post(path, {"inputs": "hi", "parameters": parameters} | stream))
        assert [event["token"] for event in events] == whole["details"]["tokens"]
        assert [event["index"] for event in events] == list(range(1, 8))
        assert events[-1]["generated_text"] == whole["generated_text"] and events[0]["generated_text"] is None
        assert events[-1]["details"]["input_length"] == 2
    full = server.post(GENERATE, {"inputs": "hi", "parameters": {"max_new_tokens": 7, "return_full_text": True}}).json
    assert full == {"generated_text": "hi" + text_of(server)}


def test_tgi_draws_only_where_something_of_sampling_is_said(server: RunningServer):
    neutral = {"temperature": 1.0, "top_p": 1.0, "seed": 3}
    drawn = text_of(server, **neutral, top_k=3)
    parameters = {"max_new_tokens": 7, "seed": 3}
    asked = server.post(GENERATE, {"inputs": "hi", "parameters": parameters | {"top_k": 3}}).json["generated_text"]
    assert asked == drawn != text_of(server)
    assert server.post(GENERATE, {"inputs": "hi", "parameters": parameters}).json["generated_text"] == text_of(server)


def test_tgi_keeps_a_stop_sequence_in_the_text_and_says_so(server: RunningServer):
    stop = text_of(server)[2:4]
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 7, "stop": [stop], "details": True}}
    answer = server.post(GENERATE, body).json
    assert answer["generated_text"].endswith(stop) and answer["details"]["finish_reason"] == "stop_sequence"


def test_sglang_gets_texts_and_ids_and_all_of_them_in_each_event(server: RunningServer):
    sampling = {"max_new_tokens": 7, "temperature": 0}
    whole = server.post(GENERATE, {"text": "hi", "sampling_params": sampling, "return_logprob": True}).json
    meta = whole["meta_info"]
    assert whole["text"] == text_of(server) and meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["prompt_tokens"], meta["completion_tokens"], len(whole["output_ids"])) == (2, 7, 7)
    assert [token_id for _, token_id, _ in meta["output_token_logprobs"]] == whole["output_ids"]
    ids = list(b"hi")
    assert server.post(GENERATE, {"input_ids": ids, "sampling_params": sampling}).json["text"] == whole["text"]
    several = server.post(GENERATE, {"text": ["hi", "ho"], "sampling_params": sampling}).json
    assert [one["text"] for one in several] == [whole["text"], text_of(server, prompt="ho")]
    *events, done = events_of(server.post(GENERATE, {"text": "hi", "sampling_params": sampling, "stream": True}))
    assert done == "[DONE]" and events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    assert all(later["text"].startswith(event["text"]) for event, later in zip(events, events[1:], strict=False))


def test_a_body_of_no_dialect_is_told_of_all_of_them(server: RunningServer):
    answer = server.post(GENERATE, {"prompt": "hi"})
    assert answer.status == 400 and all(name in answer.error["message"] for name in ("vLLM", "TGI", "SGLang"))
    assert server.post(GENERATE, {"token_ids": [104], "sampling_params": {"max_tokens": 2}}).json["choices"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"inputs": 5}, "inputs = 5"),
        ({"inputs": "a", "parameters": []}, "parameters: must be an object"),
        ({"inputs": "a", "parameters": {"temperature": 9}}, "parameters.temperature = 9"),
        ({"inputs": "a", "parameters": {"watermark": True}}, "parameters.watermark"),
        ({"inputs": "a", "parameters": {"grammar": {"type": "lark", "value": ""}}}, "parameters.grammar"),
        ({"inputs": "a", "parameters": {"adapter_id": "b"}}, "b"),
        ({"inputs": "x" * 9999}, "maximum context length"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "sampling_params": {"temperature": 9}}, "sampling_params.temperature = 9"),
        ({"text": "a", "lora_path": "b"}, "lora_path"),
        ({"input_ids": "a"}, "input_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_error_is_in_the_dialect_and_names_its_field(server: RunningServer, body: Any, named: str):
    answer = server.post(GENERATE, body)
    assert answer.status in (400, 404)
    error = answer.json["error"]
    message = error if "inputs" in body else error["message"]
    assert named in message and ("error_type" in answer.json) == ("inputs" in body)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is missing")
def test_huggingface_hub_reads_what_tgi_would_say(server: RunningServer):
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=server.url + GENERATE)
    assert client.text_generation("hi", max_new_tokens=7) == text_of(server)
    assert "".join(client.text_generation("hi", max_new_tokens=7, stream=True)) == text_of(server)
    detailed: Any = client.text_generation("hi", max_new_tokens=7, details=True, top_n_tokens=2)
    assert detailed.details.generated_tokens == 7 and len(detailed.details.top_tokens[0]) == 2
    *_, last = client.text_generation("hi", max_new_tokens=7, details=True, stream=True)
    assert last.generated_text == text_of(server) and last.details.finish_reason == "length"
    assert server.get("/info").json["max_total_tokens"] == 512
