"""Stages of one's own behind the server: whose request it is, what a client attached to it, and their metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from millrace.deploy.api.schema.processors import asked_processors
from millrace.deploy.config import ServerConfig
from millrace.deploy.errors import ApiError
from millrace.deploy.server.server import Server
from millrace.stages.engine.engine import Engine
from millrace.stages.testing.scripted.engine import SMALL
from tests.deploy.metrics.test_metrics import samples_of
from tests.deploy.sockets import serving

KEYS = ("first-key", "second-key")
OWNERS = [hashlib.sha256(key.encode()).hexdigest()[:16] for key in KEYS]
OWN = "tests.stages.engine.own_code"
TELL = replace(SMALL, stage=(f"{OWN}:Tell@after=intake",))
PAIRS = {"team": "blue"}
MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_stage_knows_the_owner_and_the_metadata_of_each_api_and_its_metrics_are_exported() -> None:
    async def main() -> None:
        async with serving(engine=TELL, api_key=KEYS) as running:

            async def ask(path: str, body: dict[str, Any], key: str = KEYS[0]) -> Any:
                headers = {"Authorization": f"Bearer {key}"}
                async with running.http.post(running.server.url + path, json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

            told = f"{OWNERS[0]} {json.dumps(PAIRS)}"
            chat = await ask("/v1/chat/completions", {"messages": MESSAGES, "metadata": PAIRS})
            assert chat["choices"][0]["message"]["content"] == told
            text = await ask("/v1/completions", {"prompt": ["a", "b"], "metadata": PAIRS}, KEYS[1])
            assert [choice["text"] for choice in text["choices"]] == [told.replace(OWNERS[0], OWNERS[1])] * 2
            response = await ask("/v1/responses", {"input": "hi", "metadata": PAIRS})
            assert response["output"][0]["content"][0]["text"] == told
            message = await ask("/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "metadata": {"user_id": "u"}})
            assert message["content"][0]["text"] == f'{OWNERS[0]} {{"user_id": "u"}}'
            odd = await ask("/v1/completions", {"prompt": "a", "metadata": {"n": 1, "k" * 65: "v", "a": "b" * 513}})
            assert odd["choices"][0]["text"] == f"{OWNERS[0]} {{}}"  # what the API does not define is ignored
            headers = {"Authorization": f"Bearer {KEYS[1]}"}
            async with running.client(headers=headers) as client:
                await client.create("one", "hi", metadata=PAIRS)
                end = await client.receive_until("done", "one")
                assert end["reason"] == "finish"
            async with running.http.get(f"{running.server.url}/metrics", headers=headers) as response:
                found = samples_of(await response.text())
            await running.check_quiet()
        own = {name.removeprefix("millrace:stage:tell:"): value for name, value in found.items() if ":tell:" in name}
        assert own[f'requests_total{{owner="{OWNERS[0]}"}}'] == 4 and own[f'requests_total{{owner="{OWNERS[1]}"}}'] == 2
        assert own['ends_total{cause="finish"}'] == 6
        assert own['prompts_bucket{le="1.0"}'] == 5 and own['prompts_bucket{le="+Inf"}'] == 6
        assert own["prompts_sum{}"] == 7 and not any(key in text for key in KEYS for text in found)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.slow
def test_a_request_asks_for_logits_processors_by_name_in_every_api_that_generates() -> None:
    pytest.importorskip("torch")

    async def main() -> None:
        async with Server(ServerConfig(port=0)) as server:
            async with Engine(max_num_seqs=4, threads=1, logits_processor=f"{OWN}:Only") as engine:
                server.attach(engine)
                five, nine = engine.decode([5] * 3), engine.decode([9] * 3)
                async with aiohttp.ClientSession() as http:

                    async def ask(path: str, asked: Any, **body: Any) -> tuple[int, Any]:
                        body |= {"max_tokens": 3, "temperature": 0, "logits_processors": asked}
                        async with http.post(server.url + path, json=body) as response:
                            return response.status, await response.json()

                    status, text = await ask("/v1/completions", ["only"], prompt="Once", ignore_eos=True)
                    assert (status, text["choices"][0]["text"]) == (200, five)
                    nines = [{"name": "only", "arguments": {"token_ids": [9]}}]
                    status, chat = await ask("/v1/chat/completions", nines, messages=MESSAGES, ignore_eos=True)
                    assert (status, chat["choices"][0]["message"]["content"]) == (200, nine)
                    status, message = await ask("/v1/messages", nines, messages=MESSAGES)
                    assert (status, message["content"][0]["text"]) == (200, nine)
                    status, text = await ask("/v1/completions", [], prompt="Once")
                    assert status == 200 and text["choices"][0]["text"] not in (five, nine)
                    for asked, complaint in WRONG:
                        status, error = await ask("/v1/completions", asked, prompt="Once")
                        assert status == 400 and complaint in error["error"]["message"], error
                    status, error = await ask(
                        "/v1/completions", ["only"], prompt="Once", use_beam_search=True, best_of=2
                    )
                    assert status == 400 and "not supported with use_beam_search" in error["error"]["message"]
                await server.stop()

    asyncio.run(asyncio.wait_for(main(), 120))


WRONG: list[tuple[Any, str]] = [
    (["onli"], "logits_processors[0] = 'onli': must be one of only (did you mean only?)"),
    (["only", "only"], "logits_processors[1]: only is named twice"),
    ([{"name": "only", "arguments": {"ids": []}}], "logits_processors[0].arguments: must have token_ids"),
    ([{"name": "only", "args": []}], "logits_processors[0]: must be a name, or an object with name and arguments"),
    ([3], "logits_processors[0]: must be a name"),
    ("only", "logits_processors: must be a list of at most 16"),
    ([{"name": "only", "arguments": [1]}], "logits_processors[0].arguments: must be an object"),
]


def test_a_server_without_logits_processors_says_how_to_have_one() -> None:
    with pytest.raises(ApiError, match="this server has none; leave it out, or start the server with --logits-proc"):
        asked_processors(["only"], [])
