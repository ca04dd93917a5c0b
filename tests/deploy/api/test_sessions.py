"""The session that a request belongs to, as each API and the header tell the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.stages.messages import TokenRequest
from millrace.stages.testing.scripted.engine import SMALL
from tests.deploy.sockets import serving

MESSAGES = [{"role": "user", "content": "hi"}]
HEADER = {"X-Session-Id": "of the header"}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of the prompts that are made from now on."""
    found: list[str] = []
    made = TokenRequest.__init__

    def note_and_make(self: TokenRequest, *args: Any, **fields: Any) -> None:
        made(self, *args, **fields)
        if not self.is_warm_up:
            found.append(self.session)

    monkeypatch.setattr(TokenRequest, "__init__", note_and_make)
    return found


def test_the_body_names_a_session_else_the_header_does_in_every_api(sessions: list[str]) -> None:
    chat: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
    asked = [
        ("/v1/chat/completions", chat, {}, ""),
        ("/v1/chat/completions", chat, HEADER, HEADER["X-Session-Id"]),
        ("/v1/chat/completions", chat | {"prompt_cache_key": "k"}, HEADER, "k"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2, "prompt_cache_key": "k"}, {}, "k"),
        ("/v1/messages", chat, HEADER, HEADER["X-Session-Id"]),
        ("/api/chat", {"messages": MESSAGES, "stream": False}, HEADER, HEADER["X-Session-Id"]),
        ("/v1/responses", {"input": "hi", "prompt_cache_key": "k"}, HEADER, "k"),
        ("/v1/responses", {"input": "hi"}, HEADER, HEADER["X-Session-Id"]),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}, {"X-Session-Id": "x" * 513}, ""),
    ]

    async def main() -> None:
        async with serving(engine=SMALL) as running:
            for path, body, headers, session in asked:
                sessions.clear()
                async with running.http.post(running.server.url + path, json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                assert sessions == [session], path
            await running.check_quiet()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_conversation_of_responses_is_the_session_of_its_first_one(sessions: list[str]) -> None:
    async def main() -> None:
        async with serving(engine=SMALL) as running:
            previous: str | None = None
            ids = []
            for _ in range(3):
                body = {"input": "hi", "previous_response_id": previous, "max_output_tokens": 2}
                async with running.http.post(running.server.url + "/v1/responses", json=body) as response:
                    assert response.status == 200, await response.text()
                    previous = (await response.json())["id"]
                    ids.append(previous)
            assert sessions == [ids[0]] * 3
            sessions.clear()
            async with running.http.post(running.server.url + "/v1/responses", json=body, headers=HEADER) as response:
                assert response.status == 200, await response.text()
            assert sessions == [HEADER["X-Session-Id"]]  # what the client says goes first

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_key_that_is_too_long_is_refused_by_name() -> None:
    async def main() -> None:
        async with serving(engine=SMALL) as running:
            body = {"prompt": "hi", "prompt_cache_key": "x" * 513}
            async with running.http.post(running.server.url + "/v1/completions", json=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "prompt_cache_key"

    asyncio.run(asyncio.wait_for(main(), 60))
