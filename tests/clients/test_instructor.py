"""instructor, unmodified but for where it looks: objects out of tool calls and schemas, whole, listed and in parts."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import KEY
from tests.deploy.running import RunningServer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("instructor") is None,
        reason="instructor is missing: pip install -e '.[clients]'",
    ),
]

ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What colour is the sky?"}],
    "temperature": 1.0,
    "max_tokens": 256,
    "seed": 4,
    "max_retries": 0,
}


class Coat(BaseModel):
    """What is on a wall."""

    colour: Literal["red", "green", "blue"]
    layers: int = Field(ge=1, le=3)


class Wall(BaseModel):
    """A wall. Its fields do not say that others are forbidden."""

    name: str = Field(max_length=12)
    width: float | None = None
    coats: list[Coat] = Field(max_length=2)


def client(server: RunningServer, mode: str) -> Any:
    import instructor
    import openai

    made = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(made, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_model_that_knows_nothing_makes_an_object_of_the_class(demo: RunningServer, mode: str):
    made, answer = client(demo, mode).chat.completions.create_with_completion(response_model=Wall, **ASKED)
    assert isinstance(made, Wall) and 0 < answer.usage.completion_tokens < 256
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_stream_of_parts_ends_as_the_object(demo: RunningServer, mode: str):
    parts = list(client(demo, mode).chat.completions.create_partial(response_model=Wall, **ASKED))
    assert len(parts) > 3 and Wall.model_validate(parts[-1].model_dump())
