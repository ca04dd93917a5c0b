"""Adapters loaded and removed over HTTP by operators, by clients where they may, and by the openai package."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.model.checkpoint import hub_adapter
from tests.deploy.api.test_lora import PROMPTS, engine_of, folder, wanted

__all__ = ["folder", "wanted"]
ADMIN_KEY, API_KEY = "s" * 32, "k" * 32
ADMIN, USER = ({"Authorization": f"Bearer {key}"} for key in (ADMIN_KEY, API_KEY))
LONG = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 50, "ignore_eos": True}
TEN_GB = 10 * 2**30


async def send(client: aiohttp.ClientSession, method: str, path: str, body: Any = None, **headers: str) -> Any:
    async with client.request(method, path, json=body, headers=headers) as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await (answer.json() if is_json else answer.text())


def test_an_adapter_is_removed_when_its_requests_have_ended_or_with_force(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_of_hub: list[str] = []

    def download(name: str, commit: str, **options: Any) -> Path:
        asked_of_hub.append(name)
        return folder / "adapters" / "two"

    async def live() -> None:
        config = ServerConfig(port=0, admin_key=(ADMIN_KEY,))
        slow = {"inject": ("stage=execute,delay=20ms",), "lora_hub_allow": ("me/two@v1",)}
        async with (
            Server(config) as server,
            engine_of(folder, **slow) as engine,
            aiohttp.ClientSession(server.url) as client,
        ):
            server.attach(engine)
            monkeypatch.setattr(hub_adapter, "resolve_adapter", download)
            short = LONG | {"max_tokens": 1}
            assert (await send(client, "POST", "/v1/completions", short | {"model": "me/three"}))[0] == 404
            assert (await send(client, "POST", "/v1/completions", short | {"model": "me/two"}))[0] == 200
            assert asked_of_hub == ["me/two@v1"], "the revision that is allowed, and nothing else"
            status, added = await send(client, "POST", "/admin/adapters", {"name": "a/b", "path": "one"}, **ADMIN)
            assert status == 200 and (added["name"], added["state"], added["rank"]) == ("a/b", "on_host", 4)
            again = await send(client, "POST", "/admin/adapters", {"name": "a/b", "path": "two"}, **ADMIN)
            assert again[0] == 400 and "set replace to replace it" in again[1]["error"]["message"]
            for query in ("?timeout_s=x", "?timeout_s=-1", "?timeout_s=nan"):
                assert (await send(client, "DELETE", f"/admin/adapters/a%2Fb{query}", **ADMIN))[0] == 400
            asked = [asyncio.ensure_future(send(client, "POST", "/v1/completions", LONG | {"model": "a/b"}))]
            while not engine.status().core.scheduler.num_running:  # noqa: ASYNC110 - of other tasks
                await asyncio.sleep(0.001)
            removed = await send(client, "DELETE", "/admin/adapters/a%2Fb?timeout_s=0.05", **ADMIN)
            assert removed == (200, {"name": "a/b", "in_progress": 1, "ended": 0})
            assert (await send(client, "DELETE", "/admin/adapters/a%2Fb", **ADMIN))[0] == 404
            assert (await asked[0])[0] == 200, "it goes on without the name"
            assert (await send(client, "POST", "/v1/completions", LONG | {"model": "a/b"}))[0] == 404

            both = [asyncio.ensure_future(send(client, "POST", "/v1/completions", LONG | {"model": "one"}))]
            while not engine.status().core.scheduler.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            removed = await send(client, "DELETE", "/admin/adapters/one?force=true", **ADMIN)
            assert removed == (200, {"name": "one", "in_progress": 0, "ended": 1})
            await asyncio.gather(*both)
            assert not engine.status().front.adapters.digests
            status, info = await send(client, "GET", "/server_info", **ADMIN)
            assert status == 200 and info["model"]["merged_adapters"] == []

    asyncio.run(asyncio.wait_for(live(), 120))


@pytest.mark.clients
@pytest.mark.slow
def test_the_openai_package_names_adapters_and_hostile_ones_are_refused(
    folder: Path, wanted: Any, tmp_path: Path
) -> None:
    openai = pytest.importorskip("openai")
    adapters = shutil.copytree(folder / "adapters", tmp_path / "adapters")

    def broken(name: str) -> Path:
        return shutil.copytree(folder / "adapters" / "one", adapters / name)

    pickled = broken("pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with (broken("huge") / "adapter_model.safetensors").open("r+b") as file:
        file.write(TEN_GB.to_bytes(8, "little"))
        file.truncate(TEN_GB + 8)
    os.link(folder / "adapters/two/adapter_model.safetensors", (leak := broken("leaky")) / "weights")
    (leak / "adapter_model.safetensors").unlink()
    (leak / "adapter_model.safetensors").symlink_to(folder / "adapters/two/adapter_model.safetensors")
    other = json.loads((broken("shapes") / "adapter_config.json").read_text())
    (adapters / "shapes" / "adapter_config.json").write_text(json.dumps(other | {"r": 3}))

    async def live() -> None:
        config = ServerConfig(port=0, api_key=(API_KEY,), enable_runtime_lora=True, served_model_name=("tiny",))
        async with (
            Server(config) as server,
            engine_of(folder, lora_dir=str(adapters)) as engine,
            aiohttp.ClientSession(server.url) as session,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client,
        ):
            server.attach(engine)
            models = [model.id async for model in client.models.list()]
            assert {"tiny", "one", "two", "three"} <= set(models)
            more = {"return_token_ids": True, "ignore_eos": True}
            common = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 16, "extra_body": more}
            answer = await client.completions.create(model="two", **common)
            assert answer.model == "two" and answer.choices[0].token_ids == wanted["two", 0]
            stream = await client.completions.create(model="two", stream=True, **common)
            assert "".join([part.choices[0].text async for part in stream if part.choices]) == answer.choices[0].text
            hello = [{"role": "user", "content": "hi"}]
            chat = await client.chat.completions.create(model="one", messages=hello, max_tokens=2)
            assert chat.model == "one"
            with pytest.raises(openai.NotFoundError, match="did you mean three"):
                await client.completions.create(model="thre", **common)
            for name, said in (("pickled", "is a pickle"), ("huge", "header"), ("leaky", "link"), ("shapes", "rank")):
                with pytest.raises(openai.BadRequestError, match=said):
                    await client.completions.create(model=name, **common)
                load = {"lora_name": "evil", "lora_path": name}
                status, told = await send(session, "POST", "/v1/load_lora_adapter", load, **USER)
                assert status == 400 and said in told["error"]["message"], told
            for path in ("../../etc", "/etc", "one/../..", "one/../../base"):
                load = {"lora_name": "evil", "lora_path": path}
                status, told = await send(session, "POST", "/v1/load_lora_adapter", load, **USER)
                assert status == 400 and "must be a folder in the server's --lora-dir" in told["error"]["message"]
            load = {"lora_name": "mine", "lora_path": "three"}
            assert (await send(session, "POST", "/v1/load_lora_adapter", load))[0] == 401
            assert (await send(session, "POST", "/v1/load_lora_adapter", load, **USER))[0] == 200
            assert (await send(session, "GET", "/admin/adapters", **USER))[0] == 404, "there is no admin key"
            answer = await client.completions.create(model="mine", **common)
            assert answer.choices[0].token_ids == wanted["three", 0]
            assert (await send(session, "POST", "/v1/unload_lora_adapter", {"lora_name": "mine"}, **USER))[0] == 200

    asyncio.run(asyncio.wait_for(live(), 120))


@pytest.mark.parametrize(("api_key", "admin_key", "is_open"), [("", "", True), ("a", "b", True), ("", "b", False)])
def test_without_api_keys_an_admin_key_keeps_adapters_from_all_others(
    api_key: str, admin_key: str, is_open: bool
) -> None:
    keys = {"api_key": (api_key * 16,) if api_key else (), "admin_key": (admin_key * 16,) if admin_key else ()}
    assert ServerConfig(port=0, enable_runtime_lora=True, **keys).has_open_runtime_lora is is_open
    assert not ServerConfig(port=0, **keys).has_open_runtime_lora
