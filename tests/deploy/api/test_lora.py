"""LoRA adapters from the request to the tokens, against checkpoints with the update merged in: tiny, with torch."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from millrace.deploy.config import ServerConfig
from millrace.deploy.dashboard import snapshots
from millrace.deploy.dashboard.messages import RequestWindow
from millrace.deploy.dashboard.request_list import LiveRequests
from millrace.deploy.errors import CODES
from millrace.deploy.server.server import Server
from millrace.model.decoder import weights as model_weights
from millrace.model.decoder.linear import EvenLinear, Linear, PackedLinear, WidenedLinear, linear_form
from millrace.model.decoder.lora_linear import LoraTable
from millrace.model.lora.adapter import Adapter
from millrace.stages import Engine, SamplingParams
from millrace.stages.errors import ConfigError, Failed, Refused
from millrace.stages.insight.explain import explain, view_of
from millrace.stages.messages import TokenRequest
from millrace.stages.recordings.reader import Recording, ScheduleCall
from millrace.stages.recordings.replay import Replay
from millrace.stages.recordings.time_machine import TimeMachine
from millrace.stages.recordings.workloads import read_trace
from millrace.stages.schedule.scheduler import LOAD_FAILED
from millrace.stages.split.split_engine import SplitEngine
from tests.counts import FULL, count
from tests.model.lora import peft_formats
from tests.model.lora.peft_formats import ALPHA, RANK, write_adapter, write_base
from tests.model.tiny_tokenizers import make_tokenizer
from tests.stages.pressure import begin_together

PROMPTS = ([5, 6, 7, 8], [40, 3, 99, 100, 12, 13])
VOCAB_SIZE = 320
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SIZES: dict[str, Any] = {
    "dtype": "float32", "block_size": 4, "num_gpu_blocks": 24, "max_model_len": 64, "max_num_seqs": 8,
    "max_num_batched_tokens": 32, "attention_backend": "torch", "tokenizer_workers": 1, "num_cpu_blocks": 16,
}  # fmt: skip
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base, three adapters in `adapters`, and for each adapter the base with its update merged in."""
    root = tmp_path_factory.mktemp("lora")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peft_formats.SHAPE, "vocab_size", VOCAB_SIZE)
        base = write_base("llama", root / "base")
        make_tokenizer("chatml", base, VOCAB_SIZE)
        weights = load_file(base / "model.safetensors")
        for number, name in enumerate(NAMES):
            made = write_adapter("plain", base, root / "adapters" / name)
            tensors = load_file(made / "adapter_model.safetensors")
            tensors = {key: np.roll(tensor, number, axis=0) for key, tensor in tensors.items()}
            save_file(tensors, made / "adapter_model.safetensors")
            merged = dict(weights)
            for key, a in tensors.items():
                if match := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", key):
                    b = tensors[key.replace("lora_A", "lora_B")]
                    merged[f"{match[1]}.weight"] = weights[f"{match[1]}.weight"] + ALPHA / RANK * (b @ a)
            shutil.copytree(base, root / f"merged-{name}")
            save_file(merged, root / f"merged-{name}" / "model.safetensors")
    yield root


async def tokens(engine: Engine, prompt: list[int], adapter: str | None = None, **options: Any) -> list[int]:
    (output,) = [
        each async for each in engine.generate(prompt, GREEDY, adapter=adapter, output_kind="final", **options)
    ]
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[tuple[str | None, int], list[int]]:
    """The greedy answers of transformers, from the merged checkpoints and the base."""
    found: dict[tuple[str | None, int], list[int]] = {}
    for name in (None, *NAMES):
        checkpoint = folder / ("base" if name is None else f"merged-{name}")
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        for number, prompt in enumerate(PROMPTS):
            options: dict[str, Any] = {
                "max_new_tokens": 16,
                "do_sample": False,
                "eos_token_id": None,
                "pad_token_id": 0,
            }
            ids = torch.tensor([prompt])
            answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            found[name, number] = answer[0, len(prompt) :].tolist()
    assert len({tuple(answer) for answer in found.values()}) == len(found), "the answers must tell the adapters apart"
    return found


def engine_of(folder: Path, kind: type[Engine] = Engine, **options: Any) -> Engine:
    settings = {"enable_lora": True, "max_loras": 2, "lora_dir": str(folder / "adapters")}
    return kind(model=str(folder / "base"), **{**SIZES, **settings, **options})


def test_a_mixed_batch_answers_as_the_merged_checkpoints_do_and_its_recording_replays(
    folder: Path, wanted: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"

    async def live() -> None:
        modules = (f"named={folder / 'adapters' / 'one'}",)
        async with engine_of(folder, lora_modules=modules, record=str(path)) as engine:
            mix = [key for key in wanted for _ in range(2)]
            begin_together(engine, len(mix))
            answers = await asyncio.gather(*(tokens(engine, PROMPTS[number], name) for name, number in mix))
            for key, answer in zip(mix, answers, strict=True):
                assert answer == wanted[key], key
            scheduler, adapters = engine.core.stages.schedule.scheduler, engine.core.stages.adapters
            assert scheduler.adapters is not None and scheduler.adapters.slots.num_loads >= 3
            assert scheduler.num_preemptions, "the pool is too small for all, so that some are preempted"
            await engine.pin_adapter("two")
            same = await asyncio.gather(*(tokens(engine, PROMPTS[0], name) for name in ("named", "one")))
            assert same == [wanted["one", 0]] * 2
            beams = await engine.beam_search(PROMPTS[0], 2, 6, adapter="two")
            assert len(beams.outputs) == 2
            assert adapters is not None and adapters.loader.num_loads == 4
            scheduler.check()
            assert not adapters._held, "no request is in progress"

    asyncio.run(live())
    recorded = path.read_bytes()
    assert b'"adapter_loads":[[1,"' in recorded and b"named" not in recorded, "digests, and no names"
    replay = Replay(Recording(path)).run()
    assert replay.difference is None and replay.recording.engine.max_loras == 2
    requests = read_trace(path).requests
    assert {bool(request.adapter) for request in requests} == {True, False}, "a simulation knows them"


FORMS = [Linear, EvenLinear, WidenedLinear]
if linear_form(torch.device("cpu"), torch.float32, 1) is PackedLinear and torch.ops.mkldnn._is_mkldnn_bf16_supported():
    FORMS.append(PackedLinear)


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_answers_in_bfloat16_on_every_form_of_linear(
    folder: Path, wanted: Any, form: type[Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_weights, "linear_form", lambda *_, **__: form)

    async def live() -> None:
        async with engine_of(folder, dtype="bfloat16") as engine:
            alone = await tokens(engine, PROMPTS[1], "two")
            mixed = await asyncio.gather(*(tokens(engine, PROMPTS[1], name) for name in (None, "two", "one")))
        assert alone[0] == wanted["two", 1][0] and mixed[1][0] == alone[0]
        assert [len(answer) for answer in mixed] == [16] * 3 and mixed[2] != mixed[0] != mixed[1]

    asyncio.run(live())


def test_a_load_that_raises_ends_its_requests_alone_and_the_recording_replays(
    folder: Path, wanted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, load, errors = tmp_path / "run.jsonl", LoraTable.load, [RuntimeError("no memory")]

    def broken(table: LoraTable, slot: int, adapter: Adapter) -> None:
        if adapter.name == "two" or (adapter.name == "one" and errors):
            raise errors.pop() if errors else RuntimeError("never")
        load(table, slot, adapter)

    monkeypatch.setattr(LoraTable, "load", broken)

    async def live() -> None:
        async with engine_of(folder, record=str(path)) as engine:

            async def fails(name: str) -> None:
                with pytest.raises(Failed, match="adapter of this request could not be loaded to the device") as failed:
                    await asyncio.wait_for(tokens(engine, PROMPTS[1], name), 60)
                assert failed.value.code == LOAD_FAILED and CODES[LOAD_FAILED][0] == failed.value.status

            async def answers(name: str | None) -> None:
                assert await asyncio.wait_for(tokens(engine, PROMPTS[1], name), 60) == wanted[name, 1]

            await asyncio.gather(answers(None), fails("one"), answers(None), answers("three"))
            await asyncio.gather(answers("one"), fails("two"), answers("three"), answers(None))
            await asyncio.gather(fails("two"), fails("two"))
            await answers(None)
            scheduler = engine.core.stages.schedule.scheduler
            assert scheduler.num_preemptions == 0 and not scheduler.sequences
            scheduler.check()

    asyncio.run(live())
    assert Replay(Recording(path)).run().difference is None


def test_observers_see_adapters_in_slots_who_waits_for_one_and_who_got_it(
    folder: Path, wanted: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"

    async def live() -> None:
        slow = {"inject": ("stage=execute,delay=50ms",), "max_loras": 1, "record": str(path)}
        async with engine_of(folder, **slow) as engine:
            first = asyncio.ensure_future(tokens(engine, PROMPTS[0], "one", request_id="first", priority=5))
            while not engine.status().core.scheduler.num_running:  # noqa: ASYNC110 - of other tasks
                await asyncio.sleep(0.001)
            second = asyncio.ensure_future(tokens(engine, PROMPTS[1], "two", request_id="second", priority=5))
            scheduler = engine.core.stages.schedule.scheduler
            while not (scheduler.adapters and len(scheduler.adapters)):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            status = engine.status(with_sequences=True)
            rows = {row["id"]: row for row in LiveRequests().page(engine, status, RequestWindow())["rows"]}
            assert {name: (row["adapter"], row["waits_for_adapter"]) for name, row in rows.items()} == {
                "first": ("one", False),
                "second": ("two", True),
            }
            (found,) = LiveRequests().page(engine, status, RequestWindow(search="tw"))["rows"]
            assert found["id"] == "second"
            assert LiveRequests().page(engine, status, RequestWindow(search="irst"))["num_live"] == 1
            adapters = snapshots.overview(engine, status, engine.health)["adapters"]
            assert adapters["slots"] == [{"slot": 1, "state": "resident", "adapter": "one", "num_running": 1}]
            assert adapters["waiting"] == [{"adapter": "two", "num_waiting": 1}]
            urgent = asyncio.ensure_future(tokens(engine, PROMPTS[0], "three", request_id="urgent"))
            answers = await asyncio.gather(first, second, urgent)
            assert answers == [wanted["one", 0], wanted["two", 1], wanted["three", 0]]
            told = {cause["name"]: cause for cause in explain(view_of(engine.pipeline.tracer), "second")["causes"]}  # type: ignore[index]
            assert told["adapter"]["share"] > 0.2 and "adapter load" in told

    asyncio.run(asyncio.wait_for(live(), 60))
    preemptions = TimeMachine(Recording(path)).at(1e9).preemptions
    (lost,) = [each for each in preemptions if each.cause == "adapter"]
    by_id = {each.request_id: each.first_sequence_id for each in read_requests(path)}
    assert lost.beneficiaries == (by_id["urgent"],)
    assert "needed the place of its adapter; its adapter's place went to" in str(lost)


def read_requests(path: Path) -> list[TokenRequest]:
    calls = [call for call in Recording(path) if isinstance(call, ScheduleCall)]
    return [message for call in calls for message in call.taken if isinstance(message, TokenRequest)]


def test_swaps_of_a_name_under_load_give_no_stale_answer(folder: Path, wanted: Any) -> None:
    async def live() -> None:
        async with engine_of(folder, num_gpu_blocks=64) as engine:
            num_swaps = published = begun = num_streamed = 0

            def answers(number: int, first: int, last: int) -> list[list[int]]:
                return [wanted[NAMES[swap % 3], number] for swap in range(first, last + 1)]

            async def stream(number: int) -> None:
                nonlocal num_streamed
                while published < num_swaps:
                    oldest = published
                    answer = await tokens(engine, PROMPTS[number % 2], "swapped")
                    assert answer in answers(number % 2, oldest, begun), (oldest, begun)
                    num_streamed += 1

            await engine.load_adapter("swapped", folder / "adapters" / NAMES[0])
            num_swaps = count(6, 1000)
            load = [asyncio.ensure_future(stream(number)) for number in range(4)]
            while published < num_swaps:
                begun += 1
                await engine.load_adapter("swapped", folder / "adapters" / NAMES[begun % 3])
                published = begun
                assert await tokens(engine, PROMPTS[0], "swapped") == wanted[NAMES[begun % 3], 0]
            await asyncio.gather(*load)
            assert num_streamed >= 4 and engine.status().core.cache.prefixes.num_hits
            print(f"{num_swaps} swaps, {num_streamed} answers beside them")
            last = asyncio.ensure_future(tokens(engine, PROMPTS[1], "swapped"))
            await asyncio.sleep(0.01)
            assert engine.unload_adapter("swapped")
            assert await last == wanted[NAMES[begun % 3], 1], "it had begun"
            with pytest.raises(Refused, match="no adapter of that name"):
                await tokens(engine, PROMPTS[0], "swapped")
            engine.core.stages.schedule.scheduler.check()

    asyncio.run(live())


@pytest.mark.parametrize("kind", [Engine, pytest.param(SplitEngine, marks=pytest.mark.slow)])
def test_clients_name_adapters_as_models_and_operators_load_them(folder: Path, wanted: Any, kind: type[Engine]) -> None:
    async def live() -> None:
        config = ServerConfig(port=0, admin_key=("s" * 32,), served_model_name=("tiny",))
        admin = {"Authorization": f"Bearer {'s' * 32}"}
        async with (
            Server(config) as server,
            engine_of(folder, kind) as engine,
            aiohttp.ClientSession(server.url) as client,
        ):
            server.attach(engine)

            async def post(path: str, body: Any, **headers: Any) -> tuple[int, Any]:
                async with client.post(path, json=body, headers=headers) as answer:
                    is_json = answer.content_type == "application/json"
                    return answer.status, await (answer.json() if is_json else answer.text())

            def asked(model: str) -> dict[str, Any]:
                return {"model": model, "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 16, "ignore_eos": True,
                        "return_token_ids": True}  # fmt: skip

            for model in ("one", "tiny:one"):
                status, answer = await post("/v1/completions", asked(model))
                assert (status, answer["model"]) == (200, "one")
                assert answer["choices"][0]["token_ids"] == wanted["one", 0]
            chat = {"model": "two", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert (await post("/v1/chat/completions", chat))[1]["model"] == "two"
            assert (await post("/v1/responses", {"model": "two", "input": "hi", "max_output_tokens": 2}))[0] == 200
            status, answer = await post("/v1/completions", asked("thre"))
            assert status == 404 and "did you mean three" in answer["error"]["message"]
            status, refused = await post("/v1/embeddings", {"model": "one", "input": "x"})
            assert status == 404, "an embedding never comes from the base instead"
            assert "adapters do not serve embeddings" in refused["error"]["message"]
            for wrong in ("a,b", "a\nb", "x" * 257):
                body = {"lora_name": wrong, "lora_path": "three"}
                status, answer = await post("/v1/load_lora_adapter", body, **admin)
                assert status == 400 and "lora_name" in answer["error"]["message"], wrong
            for path in ("a\0b", "x" * 300):
                status, answer = await post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path}, **admin)
                assert status == 400 and "lora_path" in answer["error"]["message"]
            status, answer = await post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "three"}, **admin)
            assert status == 400 and "in use; set load_inplace" in answer["error"]["message"]
            colon = {"lora_name": "tiny:sql", "lora_path": "one"}
            assert (await post("/v1/load_lora_adapter", colon, **admin))[0] == 200
            assert (await post("/v1/completions", asked("tiny:sql")))[1]["model"] == "tiny:sql"
            assert (await post("/v1/unload_lora_adapter", {"lora_name": "tiny:sql"}, **admin))[0] == 200
            async with client.get("/v1/models") as listed:
                parents = {card["id"]: card["parent"] for card in (await listed.json())["data"]}
            assert parents == {"tiny": None, "one": "tiny", "two": "tiny", "three": "tiny"}
            new = {"lora_name": "new", "lora_path": "three"}
            assert (await post("/v1/load_lora_adapter", new))[0] == 401
            status, text = await post("/v1/load_lora_adapter", new, **admin)
            assert (status, text) == (200, "Success: LoRA adapter 'new' added successfully.")
            assert (await post("/v1/load_lora_adapter", new, **admin))[0] == 400
            assert (await post("/v1/load_lora_adapter", {**new, "load_inplace": True}, **admin))[0] == 200
            assert (
                await post("/v1/load_lora_adapter", {**new, "lora_path": "../base", "load_inplace": True}, **admin)
            )[0] == 400
            assert (await post("/v1/load_lora_adapter", {**new, "lora_path": "none", "load_inplace": True}, **admin))[
                0
            ] == 404
            assert (await post("/v1/completions", asked("new")))[1]["choices"][0]["token_ids"] == wanted["three", 0]
            async with client.get("/admin/adapters", headers=admin) as answer:
                states = {each["name"]: each for each in (await answer.json())["adapters"]}
            assert states["new"]["digest"] == states["three"]["digest"] or states["three"]["digest"] is None
            assert states["new"]["state"] == "resident" and states["new"]["rank"] == RANK
            status, pinned = await post("/admin/adapters/three/pin", None, **admin)
            assert (status, pinned["pinned"]) == (200, "device")
            status, refused = await post("/admin/adapters/one/pin", None, **admin)
            assert (status, refused["error"]["code"]) == (409, "adapters_pinned")
            assert (await post("/admin/adapters/one/pin?where=host", None, **admin))[1]["pinned"] == "host"
            assert (await post("/admin/adapters/one/pin?where=there", None, **admin))[0] == 400
            assert (await post("/admin/adapters/no/pin", None, **admin))[0] == 404
            assert (await post("/admin/adapters/one/unpin", None))[0] == 401
            for model in ("one", "two", "three", "one"):
                assert (await post("/v1/completions", asked(model)))[1]["choices"][0]["token_ids"] == wanted[model, 0]
            await engine.refresh()
            slots = engine.status().core.scheduler.adapters.slots  # type: ignore[union-attr]
            found = [state for state, digest, _ in slots if digest == pinned["digest"]]
            assert found == ["resident"], "two others have shared the other slot"
            for name in ("one", "three"):
                assert (await post(f"/admin/adapters/{name}/unpin", None, **admin))[1]["pinned"] is None
            assert (await post("/v1/unload_lora_adapter", {"lora_name": "new"}, **admin))[0] == 200
            assert (await post("/v1/unload_lora_adapter", {"lora_name": "new"}, **admin))[0] == 404
            assert (await post("/v1/completions", asked("new")))[0] == 404
            async with client.get("/metrics") as answer:
                metrics = await answer.text()
            assert "millrace:lora_host_waiting 0.0" in metrics or "millrace:lora_host_waiting{" in metrics
            assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}' in metrics

    asyncio.run(live())


def test_a_chat_is_rendered_by_the_template_of_its_adapter_if_the_settings_say_so(folder: Path, tmp_path: Path) -> None:
    for name in ("own", "plain", "broken"):
        shutil.copytree(folder / "adapters" / "one", tmp_path / name)
    own = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}>"
    (tmp_path / "own" / "chat_template.jinja").write_text(own)
    (tmp_path / "broken" / "tokenizer_config.json").write_text('{"chat_template": "{% for m in messages %}"}')
    chat: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

    async def live() -> None:
        config = ServerConfig(port=0, served_model_name=("tiny",))
        async with (
            Server(config) as server,
            engine_of(folder, lora_dir=str(tmp_path), lora_chat_templates=True) as engine,
            aiohttp.ClientSession(server.url) as client,
        ):
            server.attach(engine)

            async def prompt(name: str | None) -> list[int]:
                asked = engine.chat(chat, params, adapter=name, output_kind="final")
                return [list(one.prompt_token_ids) async for one in asked][0]

            base, rendered = await prompt(None), engine.tokenizer.encode("[hi]>", add_special_tokens=False)
            assert await prompt("own") == rendered != base == await prompt("plain")
            for name, wanted in (("own", rendered), ("tiny", base)):
                async with client.post("/tokenize", json={"model": name, "messages": chat}) as answer:
                    assert (await answer.json())["tokens"] == wanted
                body = {"model": name, "messages": chat, "max_tokens": 2}
                async with client.post("/v1/chat/completions", json=body) as answer:
                    assert (await answer.json())["usage"]["prompt_tokens"] == len(wanted)
            with pytest.raises(Refused, match="adapter 'broken': chat template, tokenizer_config.json .* not valid"):
                await prompt("broken")
            (tmp_path / "own" / "chat_template.jinja").write_text(own.replace("[{{", "<{{"))
            assert await prompt("own") == rendered, "until it is loaded again"
            await engine.load_adapter("own", tmp_path / "own")
            assert await prompt("own") == engine.tokenizer.encode("<hi]>", add_special_tokens=False)
        async with engine_of(folder, lora_dir=str(tmp_path)) as engine:
            assert await prompt("own") == base, "without the setting"

    asyncio.run(live())


@pytest.mark.skipif(not FULL, reason="starts three processes: MILLRACE_FULL=1")
def test_a_new_engine_process_goes_on_with_the_adapters_of_the_requests_in_progress(
    folder: Path, wanted: Any, tmp_path: Path
) -> None:
    for name in ("kept", "gone"):
        shutil.copytree(folder / "adapters" / "one", tmp_path / name)
    slow = {"inject": ("stage=execute,delay=5ms",), "lora_dir": None}
    modules = tuple(f"{name}={tmp_path / name}" for name in ("kept", "gone"))
    shutil.copy(folder / "adapters/two/adapter_model.safetensors", tmp_path / "gone")

    async def live() -> None:
        async with engine_of(folder, SplitEngine, lora_modules=modules, **slow) as engine:
            running = [asyncio.ensure_future(tokens(engine, PROMPTS[0], name)) for name in ("kept", None, "gone")]
            while engine.status().core.scheduler.num_running < 3:  # type: ignore[union-attr] # noqa: ASYNC110
                await asyncio.sleep(0.01)
                await engine.refresh()
            shutil.rmtree(tmp_path / "gone")
            assert isinstance(engine, SplitEngine) and engine.engine_pid is not None
            os.kill(engine.engine_pid, signal.SIGKILL)
            assert [await each for each in running[:2]] == [wanted["one", 0], wanted[None, 0]]
            with pytest.raises(Failed, match="adapter 'gone' is not in its folder any more"):
                await running[2]
            assert engine.num_deaths == 1 and len(engine.status().front.adapters.num_users) == 1
            assert await tokens(engine, PROMPTS[1], "kept") == wanted["one", 1]
            assert not engine.status().front.adapters.digests

    asyncio.run(asyncio.wait_for(live(), 120))


def test_an_adapter_that_cannot_be_served_stops_the_start(folder: Path) -> None:
    async def live() -> None:
        async with engine_of(folder, max_lora_rank=2, lora_modules=(f"one={folder / 'adapters' / 'one'}",)):
            pass

    with pytest.raises(ConfigError, match="lora_modules: adapter 'one': has rank 4; this server takes up to 2"):
        asyncio.run(live())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora_dir": "/x"}, "served with enable_lora only"),
        ({"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}, "must be above max_loras"),
        ({"max_loras": 0}, "max_loras = 0"),
    ],
)
def test_settings_that_no_engine_could_serve_are_refused(options: dict[str, Any], text: str) -> None:
    from millrace.stages.config import EngineConfig

    with pytest.raises(ConfigError, match=text):
        EngineConfig(**options)
