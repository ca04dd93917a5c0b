"""A model that returns NaN: an error with a reason in each API's form, streamed or not, and one line in the log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.runtime.env.log import captured_logs
from millrace.stages.testing.scripted.script import Script
from tests.deploy.sockets import Serving, on_loop, serving

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 20, "n": 2},
    "/v1/completions": {"prompt": ["hi", "ho"], "max_tokens": 20},
    "/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 20}},
    "/v1/responses": {"input": "hi", "max_output_tokens": 20},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
}


@dataclass(frozen=True)
class BrokenScript(Script):
    """Vectors of NaN."""

    def vector(self, context: int) -> Any:
        return super().vector(context) * np.float32("nan")


def break_steps_after(running: Serving, num_tokens: int) -> None:
    """From now on the row of the oldest sequence is NaN in each step after `num_tokens` of them."""
    first = running.engine.model.num_steps
    running.engine.model.is_fault = lambda name: (  # type: ignore[method-assign]
        name == "device.nan_row" and running.engine.model.num_steps >= first + num_tokens
    )


async def post(running: Serving, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with running.http.post(running.server.url + path, json=body) as response:
        return response.status, await response.text()


def data_of(stream: str) -> list[Any]:
    """The data of a stream's events, without the [DONE]."""
    lines = [line[6:] for line in stream.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@on_loop
async def test_a_nan_ends_whole_answers_of_every_api_with_500_and_a_reason():
    async with serving(script=Script(eos_probability=0.0)) as running:
        for path, body in BODIES.items():
            break_steps_after(running, 3)
            with captured_logs() as lines:
                status, text = await post(running, path, body)
            error = json.loads(text)["error"]
            assert status == 500 and "no token has a finite score" in error["message"], path
            assert path == "/v1/messages" or error["code"] == "model_error"
            told = [line for line in lines if line["event"] == "model.not_finite"]
            assert [line["level"] for line in told] == ["error"]
            assert [line["error"] for line in lines if line["event"] == "request.ended"] == ["model_error"]
        await running.check_quiet()


@on_loop
async def test_a_nan_ends_streams_of_every_api_with_an_error_event_after_their_text():
    async with serving(script=Script(eos_probability=0.0)) as running:
        for path, body in BODIES.items():
            break_steps_after(running, 8)  # steps run ahead: the last of an answer before may count
            status, text = await post(running, path, body | {"stream": True})
            *events, last = data_of(text)
            assert status == 200 and events, path
            error = last["response"]["error"] if path == "/v1/responses" else last["error"]
            assert "no token has a finite score" in error["message"]
            assert '"finish_reason":"error"' not in text
            if path == "/v1/responses":
                assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            elif path == "/v1/messages":
                assert (last["type"], error["type"]) == ("error", "api_error")
            else:
                assert error["code"] == "model_error" and text.endswith("data: [DONE]\n\n")
        await running.check_quiet()


@on_loop
async def test_a_nan_is_told_on_a_socket_and_to_a_beam_search_and_in_the_background():
    async with serving(script=Script(eos_probability=0.0)) as running:
        break_steps_after(running, 2)
        async with running.client() as client:
            await client.create("a", max_tokens=20)
            error = await client.receive_until("error", "a")
            assert (error["error"]["code"], error["status"]) == ("model_error", 500)
        break_steps_after(running, 2)
        search = {"prompt": "hi", "use_beam_search": True, "n": 2, "max_tokens": 9}
        status, text = await post(running, "/v1/completions", search)
        assert status == 500 and json.loads(text)["error"]["code"] == "model_error"
        break_steps_after(running, 2)
        status, text = await post(running, "/v1/responses", BODIES["/v1/responses"] | {"background": True})
        response_id = json.loads(text)["id"]
        await running.check_quiet()
        async with running.http.get(f"{running.server.url}/v1/responses/{response_id}") as kept:
            response = await kept.json()
        assert response["status"] == "failed" and "finite" in response["error"]["message"]


@on_loop
async def test_a_vector_of_nan_ends_embeddings_scores_and_ranks_with_the_input_named():
    async with serving(script=BrokenScript()) as running:
        for path, body in {
            "/v1/embeddings": {"input": ["a", "b"]},
            "/score": {"text_1": "a", "text_2": "b"},
            "/rerank": {"query": "a", "documents": ["b"]},
        }.items():
            status, text = await post(running, path, body)
            error = json.loads(text)["error"]
            assert (status, error["code"]) == (500, "model_error") and "input 0" in error["message"], path
        await running.check_quiet()
