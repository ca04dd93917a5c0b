"""Stages of one's own behind the server: whose request it is, what a client attached to it, and their metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import Any

from millrace.stages.testing.scripted.engine import SMALL
from tests.deploy.metrics.test_metrics import samples_of
from tests.deploy.sockets import serving

KEYS = ("first-key", "second-key")
OWNERS = [hashlib.sha256(key.encode()).hexdigest()[:16] for key in KEYS]
TELL = replace(SMALL, stage=("tests.stages.engine.own_code:Tell@after=intake",))
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
