"""A server with an encoder model: its answers and errors, read by the official client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from transformers import AutoTokenizer

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.stages import Engine, EngineConfig
from tests.model.encoder_checkpoints import make_encoder


async def ask(server: Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        async with session.request(method, server.url + path, json=body) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())


@pytest.mark.slow
def test_an_encoder_answers_embeddings_and_ranks_and_refuses_to_chat(tmp_path: Path):
    model, texts = make_encoder("bert", tmp_path), ["the quick dog", "a cat", "by the sea"]
    tokens = AutoTokenizer.from_pretrained(tmp_path)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state
    mask = tokens.attention_mask[:, :, None]
    right = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()

    async def main() -> None:
        config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")
        served = ServerConfig(port=0, served_model_name=("bert",))
        async with Server(served) as server, Engine(config) as engine:
            server.attach(engine)
            async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
                made = await client.embeddings.create(model="bert", input=texts)
                assert np.abs(np.array([item.embedding for item in made.data]) - right).max() < 1e-4
                assert made.usage.prompt_tokens == int(mask.sum())
                many = await client.embeddings.create(
                    model="bert", input=["a cat"] * 520
                )  # too many to write on the event loop
                assert len({item.index for item in many.data}) == 520
                assert np.abs(np.array([item.embedding for item in many.data]) - right[1]).max() < 1e-4
                with pytest.raises(openai.BadRequestError, match="does not generate text; it embeds") as refused:
                    await client.chat.completions.create(model="bert", messages=[{"role": "user", "content": "hi"}])
                assert refused.value.code == "unsupported_task"
                with pytest.raises(openai.BadRequestError, match="does not generate text"):
                    await client.completions.create(model="bert", prompt="hi", extra_body={"use_beam_search": True})
            status, ranked = await ask(server, "POST", "/v2/rerank", {"query": texts[0], "documents": texts})
            assert status == 200 and ranked["results"][0]["index"] == 0
            status, info = await ask(server, "GET", "/server_info")
            assert (status, info["model"]["tasks"], info["blocks"]) == (200, ["embed"], None)
            status, metrics = await ask(server, "GET", "/metrics")
            assert status == 200 and 'millrace:stage_seconds_total{stage="encode",state="busy"}' in metrics
            assert not engine.pipeline.exit.live

    asyncio.run(main())
