"""Embeddings, scores and reranking over HTTP, by the official client and raw requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from millrace.deploy.api.embeddings.bodies import EmbeddingBody
from millrace.deploy.errors import wrong_field
from millrace.stages import LLM
from millrace.stages.errors import Refused
from millrace.stages.testing.scripted.script import Script
from tests.deploy.running import RunningServer, post_bytes
from tests.deploy.sockets import on_loop, serving

SCRIPT = Script()
SCORES = ("/score", "/v1/score")
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
DOCUMENTS = ["a mill", "a race", "the mill race", "a mill", "water"]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def right(text: str) -> Any:
    return SCRIPT.embedding(list(text.encode()))


def cosine(first: str, second: str) -> float:
    return float(right(first) @ right(second))


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_the_official_client_gets_embeddings_in_their_order(client: openai.OpenAI, options: Any):
    """Without an encoding the client requests base64 and decodes it to floats."""
    texts = ["one", "two" * 40, "three", "one"] + [f"text {i}" for i in range(40)]
    made = client.embeddings.create(model="scripted", input=texts, **options)
    assert (made.object, made.model, [item.index for item in made.data]) == ("list", "scripted", list(range(44)))
    for text, item in zip(texts, made.data, strict=True):
        vector = item.embedding
        if options.get("encoding_format") == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        assert np.allclose(vector, right(text), atol=1e-6)
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, texts))


def test_an_input_may_be_a_text_texts_ids_or_lists_of_ids(client: openai.OpenAI):
    for asked, texts in (("ab", ["ab"]), (["ab"], ["ab"]), ([97, 98], ["ab"]), ([[97, 98], [99]], ["ab", "c"])):
        made = client.embeddings.create(model="scripted", input=asked)
        assert len(made.data) == len(texts)
        for item, text in zip(made.data, texts, strict=True):
            assert np.allclose(item.embedding, right(text), atol=1e-6)


def test_an_embedding_may_be_left_as_long_as_it_is(server: RunningServer):
    embedding = server.post("/v1/embeddings", {"input": "ab", "normalize": False}).json["data"][0]["embedding"]
    assert np.linalg.norm(embedding) > 2
    assert np.allclose(embedding / np.linalg.norm(embedding), right("ab"), atol=1e-6)


def test_what_is_wrong_with_an_input_is_said_by_its_name(server: RunningServer):
    for body, param, words in (
        ({}, "input", "field required"),
        ({"input": ""}, "input", "input: is empty"),
        ({"input": []}, "input", "input: is an empty list"),
        ({"input": ["a", ""]}, "input", "input: is empty"),
        ({"input": ["a", 1]}, "input", "input: mixes forms"),
        ({"input": {"text": "a"}}, "input", "input: must be a text"),
        ({"input": [1.5]}, "input", "input: mixes forms"),
        ({"input": [1, 999]}, "input", "input holds token id 999: ids go from 0 to 259"),
        ({"input": [120] * 513}, "input", "length is 512 tokens, and the prompt has 513"),
        ({"input": ["x"] * 2049}, "input", "input: has 2049 entries; must have at most 2048"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "must be 'float' or 'base64'"),
        ({"input": "x", "dimensions": 4}, "dimensions", "have 8 numbers and were not trained to be cut"),
        ({"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or from 1"),
        ({"input": "x", "prompt_name": "query"}, "prompt_name", "this model has no prompts"),
        ({"input": "x", "model": "other"}, "model", "not served here"),
    ):
        answer = server.post("/v1/embeddings", body)
        assert answer.status == (404 if param == "model" else 400), (body, answer.body)
        assert answer.error["param"] == param and words in answer.error["message"], answer.error
    assert server.post("/v1/embeddings", {"input": "x" * 512, "dimensions": 8}).status == 200


def test_an_error_of_the_engine_names_the_field_of_this_endpoint():
    error = EmbeddingBody(input="a").client_error(wrong_field("prompt", "is empty; a prompt has text"))
    assert (error.param, error.message) == ("input", "input: is empty; a prompt has text")


@pytest.mark.parametrize("path", SCORES)
def test_scores_are_in_order_of_the_documents(server: RunningServer, path: str):
    for one, many in (("text_1", "text_2"), ("queries", "documents")):
        answer = server.post(path, {one: "mill", many: DOCUMENTS}).json
        assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(5)]
        assert [item["score"] for item in answer["data"]] == pytest.approx([cosine("mill", d) for d in DOCUMENTS])
    each = server.post(path, {"text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]}).json["data"]
    right_scores = [cosine(*pair) for pair in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    assert [item["score"] for item in each] == pytest.approx(right_scores)
    (same,) = server.post(path, {"text_1": "a", "text_2": "a"}).json["data"]
    assert same["score"] == pytest.approx(1)


@pytest.mark.parametrize("path", RERANKS)
def test_reranking_puts_the_best_first_and_names_what_it_ranks(server: RunningServer, path: str):
    answer = server.post(path, {"query": "mill", "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}, *DOCUMENTS[3:]]})
    results = answer.json["results"]
    scores = [cosine("mill", document) for document in DOCUMENTS]
    assert [item["index"] for item in results] == sorted(range(5), key=lambda i: -scores[i])
    for item in results:
        assert item["relevance_score"] == pytest.approx(scores[item["index"]])
        assert item["document"] == {"text": DOCUMENTS[item["index"]]}
    assert answer.json["usage"]["total_tokens"] == sum(map(len, ("mill", *DOCUMENTS)))
    body = {"query": "mill", "documents": DOCUMENTS, "top_n": 2, "return_documents": False}
    assert server.post(path, body).json["results"] == [
        {name: item[name] for name in ("index", "relevance_score")} for item in results[:2]
    ]


def test_what_is_wrong_with_pairs_is_said_by_its_name(server: RunningServer):
    for path, body, param in (
        ("/score", {}, "queries"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "documents": "b"}, "queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
        ("/score", {"queries": ["a"], "documents": []}, "documents"),
        ("/score", {"queries": ["a"], "documents": [""]}, "documents[0]"),
        ("/score", {"queries": "a", "documents": "x", "truncation_side": "top"}, "truncation_side"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": ["a"], "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": ["b"] * 1025}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ):
        answer = server.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param), (path, body, answer.body)


def test_a_client_that_leaves_frees_what_its_embeddings_hold(slow_server: RunningServer):
    with slow_server.connect() as connection:
        connection.sendall(
            post_bytes("/v1/embeddings", {"input": ["x" * 500] * 250})
        )  # in 5 s, with half a prompt per step
        while not slow_server.stats()["blocks_in_use"]:
            pass
    assert slow_server.wait_until_idle() < 2.0


def test_embeddings_are_counted_with_their_tokens(server: RunningServer):
    def counts() -> list[float]:
        text = server.get("/metrics").body.decode()
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(names)]

    before = counts()
    server.post("/v1/embeddings", {"input": ["abc", "de"]})
    assert [after - was for after, was in zip(counts(), before, strict=True)] == [5, 0]
    info = server.get("/server_info").json["model"]
    assert info["tasks"] == ["embed", "generate"] and info["embeddings"]["size"] == 8


@on_loop
async def test_a_model_that_only_generates_scores_nothing_and_says_what_does():
    async with serving() as running:
        running.engine._info = replace(running.engine.info, has_trained_pooling=False)
        for path in (*SCORES, *RERANKS):
            body = {"query": "a", "documents": ["b"]} if "rerank" in path else {"text_1": "a", "text_2": "b"}
            async with running.http.post(running.server.url + path, json=body) as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (400, "unsupported_task", "model")
            assert "cross-encoder" in error["message"] and "--pooling last" in error["message"]
            assert "--pooling yes_no if it is a Qwen3-Reranker" in error["message"]
        with pytest.raises(Refused, match="ranks none"):
            await running.engine.score("a", "b")
        async with running.http.post(running.server.url + "/v1/embeddings", json={"input": "a"}) as response:
            assert response.status == 200


@pytest.mark.slow
def test_the_bundled_model_ranks_only_when_its_pooling_is_chosen():
    with LLM() as llm, pytest.raises(Refused, match="ranks none"):
        llm.score("a", "b")
    with LLM(pooling="mean") as llm:
        assert -1.001 <= llm.score("a", "b")[0].score <= 1.001
