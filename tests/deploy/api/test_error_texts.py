"""What each API says of a wrong request, word for word: `error_texts.tsv` has a line for each.

A line is the API, the fields that are put over its valid body below, the status, the field at fault and the text. The
fields of errors are named as the API that answers calls them; an API without a member for it has `-`.
"""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.completions.body import CompletionBody
from millrace.deploy.api.openai.prepared_request import PreparedRequest, stream_error
from millrace.deploy.config import ServerConfig
from millrace.deploy.errors import ApiError, wrong_field
from millrace.deploy.server.server import Server
from millrace.stages.errors import ErrorText, Refused, field_text
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import scripted_engine

ROOT = Path(__file__).parents[3]
LINES = Path(__file__).with_name("error_texts.tsv").read_text().splitlines()
SERVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strict": {"strict_fields": True},
    "parsers": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}
VALID: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat render": ("/v1/chat/completions/render", CHAT),
    "completions": ("/v1/completions", TEXT),
    "completions render": ("/v1/completions/render", TEXT),
    "token ids": ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
    "vllm": ("/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
    "tgi": ("/generate", {"inputs": "hi"}),
    "tgi stream": ("/generate_stream", {"inputs": "hi"}),
    "sglang": ("/generate", {"text": "hi"}),
    "sglang ids": ("/generate", {}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    "messages": ("/v1/messages", CHAT),
    "count tokens": ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    "ollama chat": ("/api/chat", {"messages": CHAT["messages"], "stream": False}),
    "ollama generate": ("/api/generate", {"prompt": "hi", "stream": False}),
    "ollama embed": ("/api/embed", {"input": "x"}),
    "ollama embeddings": ("/api/embeddings", {"prompt": "x"}),
    "embeddings": ("/v1/embeddings", {"input": "x"}),
    "score": ("/score", {"queries": "a", "documents": ["b", "c"]}),
    "rerank": ("/rerank", {"query": "a", "documents": ["b"]}),
    "tokenize": ("/tokenize", {"prompt": "x"}),
    "tokenize chat": ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
    "detokenize": ("/detokenize", {"tokens": [1]}),
}


async def answers(lines: list[list[str]], settings: dict[str, Any]) -> list[str]:
    """The lines as one server answers them."""
    said = []
    async with Server(ServerConfig(port=0, **settings)) as server, scripted_engine(answer="ok") as engine:
        server.attach(engine)
        async with aiohttp.ClientSession() as session:
            for kind, api, fields, *_ in lines:
                path, body = VALID[api]
                async with session.post(server.url + path, json=body | json.loads(fields)) as response:
                    param, text = read(await response.json())
                    said.append("\t".join((kind, api, fields, str(response.status), param, text)))
    return said


def read(answer: dict[str, Any]) -> tuple[str, str]:
    """The field at fault, and the text."""
    error = answer.get("error")
    if isinstance(error, dict):
        return str(error.get("param", "-")), error["message"]
    return "-", str(error)


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_each_api_says_what_is_wrong_with_its_own_names_of_fields(server: str) -> None:
    mine = [line for line in LINES if line.startswith(f"{server}\t")]
    assert asyncio.run(answers([line.split("\t") for line in mine], SERVERS[server])) == mine


def test_the_table_has_each_api_and_each_line_once() -> None:
    assert {line.split("\t")[1] for line in LINES} == {*VALID}
    assert len({*LINES}) == len(LINES) > 500


SHARED = ("stages", "deploy/api/schema", "deploy/api/openai", "deploy/api/chat", "deploy/api/completions")


@pytest.mark.parametrize("folder", SHARED)
def test_code_below_several_apis_writes_no_field_into_plain_text(folder: str) -> None:
    """A text that begins with its `param` has a place for that name instead: `field_text` or `wrong_field`."""
    wrong = []
    for path in (ROOT / folder).rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(call, "func", None), "id", "")
            if isinstance(call, ast.Call) and name in ("ApiError", "Refused", "UnknownAdapter") and call.args:
                params = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "param"]
                text = ast.unparse(call.args[name == "ApiError"]).lstrip("f")[1:]
                if any(text.startswith((param.strip("'\""), f"{{{param}}}")) for param in params):
                    wrong.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert wrong == []


@pytest.mark.parametrize("body", [ChatBody(messages=[]), CompletionBody(prompt="x")], ids=["chat", "completions"])
def test_only_places_for_names_are_renamed_not_words_that_look_alike(body: ChatBody | CompletionBody) -> None:
    text = ErrorText(("prompt holds the word prompt; ", "prompt", " is too long"))
    name = body.client_name("prompt")
    assert str(text.named(body.client_name)) == f"prompt holds the word prompt; {name} is too long"


@pytest.mark.parametrize(
    ("name_of", "named"), [(None, "messages"), ({"messages": "input"}.get, "input")], ids=["chat", "another API"]
)
def test_an_error_in_a_stream_has_the_names_of_the_api_too(name_of: Any, named: str) -> None:
    body = ChatBody.model_validate(CHAT)
    order = PreparedRequest(body, [], (), SamplingParams(), None, body.echo_options(), name_of=name_of)
    error = stream_error(order, Refused(field_text("prompt", "is too long")), "id")
    assert (error.param, error.message) == (named, f"{named}: is too long")


def test_an_error_names_the_field_that_its_text_begins_with() -> None:
    assert Refused(field_text("n", "must be 1", "2")).param == "n"
    assert Refused(ErrorText(("at most ", "n", ""))).param is None
    error = ApiError("invalid_value", "n = 2: a plain text names no field", param="n").named(str.upper)
    assert (error.param, error.message) == ("N", "n = 2: a plain text names no field")


def test_an_error_with_other_names_keeps_all_that_is_told_with_it() -> None:
    error = ApiError(
        "rate_limit_exceeded", field_text("n", "x"), details={"stage": "s"}, retry_after_s=2.0, headers={"A": "b"}
    )
    other = error.named(lambda name: f"options.{name}")
    assert other.message == "options.n: x" and other.param == "options.n"
    assert (other.status, other.type, other.details, other.headers) == (
        error.status, error.type, error.details, {"A": "b", "Retry-After": "2"},
    )  # fmt: skip
    assert wrong_field("n", "x", "{brace} %s").message == "n = {brace} %s: x"
