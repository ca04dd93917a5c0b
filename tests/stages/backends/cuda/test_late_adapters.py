"""LoRA on an asynchronous device, in device slots inside graphs: answers are those of a device that waits.

The streams run late and out of order, so a slot that a step reads too early, or a load that overwrites one in use,
shows in the answers.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millrace.model.decoder.lora_slots import LoraSlots
from millrace.runtime.device_streams.interface import DeviceStreams
from millrace.runtime.device_streams.simulated import SimStreams
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.env.log import captured_logs
from millrace.stages import Engine, SamplingParams
from millrace.stages.errors import Failed
from tests.model.lora import peft_formats
from tests.model.lora.peft_formats import write_adapter, write_base
from tests.model.tiny_tokenizers import make_tokenizer
from tests.runtime.device_streams.host_streams import HostStreams
from tests.stages.late_engines import greedy, prompts

VOCAB_SIZE = 320
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "block_size": 4, "num_gpu_blocks": 24, "max_model_len": 64, "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "attention_backend": "torch", "tokenizer_workers": 1, "num_cpu_blocks": 16,
    "threads": 1, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8,
}  # fmt: skip
KINDS = ("plain", "patterns", "q_v")  # ranks that differ, and linears without an update
MIX: list[tuple[str | None, int]] = [(name, number) for number in range(2) for name in (None, *KINDS, "plain")]

SEEDS = range(6 if os.environ.get("MILLRACE_FULL") == "1" else 1)

Answers = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("late-lora")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peft_formats.SHAPE, "vocab_size", VOCAB_SIZE)
        base = write_base("llama", root / "base")
        make_tokenizer("chatml", base, VOCAB_SIZE)
        for kind in KINDS:
            made = write_adapter(kind, base, root / "adapters" / kind)
            tensors = load_file(made / "adapter_model.safetensors")
            tensors = {name: 2 * np.roll(tensor, len(kind), axis=0) for name, tensor in tensors.items()}
            save_file(tensors, made / "adapter_model.safetensors")
    yield root


def run(folder: Path, streams: DeviceStreams | None, use: Any, **settings: Any) -> Any:
    """What `use(engine)` returns, of an engine on these streams; None: of one that waits for each step."""

    async def live() -> Any:
        env = LiveEnv(0)
        env.streams = streams
        try:
            options = {**SETTINGS, "lora_dir": str(folder / "adapters"), **settings}
            async with Engine(model=str(folder / "base"), env=env, **options) as engine:
                return await use(engine)
        finally:
            await env.aclose()

    with captured_logs():
        return asyncio.run(live())


async def tokens(engine: Engine, prompt: list[int], adapter: str | None, params: SamplingParams) -> list[int]:
    (output,) = [each async for each in engine.generate(prompt, params, adapter=adapter, output_kind="final")]
    return list(output.outputs[0].token_ids)


async def mixed(engine: Engine) -> tuple[Answers, int]:
    """The answers of all adapters and the base at once, and how often a slot was loaded."""
    asked = prompts(len(MIX), 20)
    answers = await asyncio.gather(
        *(tokens(engine, asked[number], name, greedy(6 + 3 * number)) for name, number in MIX)
    )
    assert engine.core.stages.schedule.scheduler.adapters is not None
    engine.core.stages.schedule.scheduler.check()
    return answers, engine.core.stages.schedule.scheduler.adapters.slots.num_loads


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Answers:
    answers, num_loads = run(folder, None, mixed)
    assert num_loads >= len(KINDS)
    assert len({tuple(answer[:6]) for (_, number), answer in zip(MIX, answers, strict=True) if not number}) == 4
    return list(answers)


@pytest.mark.parametrize("seed", SEEDS)
def test_late_mixed_steps_answer_as_an_engine_that_waits(folder: Path, wanted: Answers, seed: int) -> None:
    """Steps with adapters run in one set of graphs, steps without in another, and slots are in the memory table."""

    async def use(engine: Engine) -> tuple[Answers, int]:
        runner: Any = engine.pipeline.stages["execute"].runner  # type: ignore[attr-defined]
        graphs, slots = runner.line.graphs, runner.runner.decoder.adapters
        row = engine.info.memory.row("adapters")  # type: ignore[union-attr]
        assert row.num_bytes == slots.num_bytes == slots._numbers.nbytes + slots._ranks.nbytes
        assert row.what == "2 device slots of LoRA adapters of rank 8"
        eager, found = graphs.num_eager, await mixed(engine)
        store = engine.core.stages.adapters.store
        assert store.num_bytes == len(store) * slots.num_bytes // 2, (
            "each takes a slot's memory on the host, and no more"
        )
        for name, used in ((None, 0), ("plain", 1)):
            before = replays(graphs)
            await tokens(engine, [5, 6, 7], name, greedy(4))
            counts = [now - then for now, then in zip(replays(graphs), before, strict=True)]
            assert counts[used] >= 4 and not counts[1 - used], (name, counts)
        assert graphs.num_eager == eager
        return found

    streams = SlowLoads(Random(seed), laziness=0.3)
    answers, num_loads = run(folder, streams, use, steps_in_flight=2 + seed % 3)
    assert answers == wanted and num_loads >= len(KINDS)


class SlowLoads(SimStreams):
    """Copies of adapters run only while a thread waits for the device."""

    def progress(self) -> None:
        with self.lock:
            held = [(stream, stream.waiting) for stream in self._streams if stream.name == "adapters"]
            for stream, _ in held:
                stream.waiting = deque()
            try:
                super().progress()
            finally:
                for stream, waiting in held:
                    stream.waiting = waiting

    def _choose(self, ready: list[int]) -> int:
        others = [i for i in ready if self._streams[i].name != "adapters"]
        return super()._choose(others or ready)


def replays(graphs: Any) -> list[int]:
    """Of forward passes without adapters, and with them."""
    return [sum(getattr(one, name).num_replays for one in graphs.captured) for name in ("forward", "adapted")]


def test_an_adapter_that_fails_to_load_ends_its_requests_alone(
    folder: Path, wanted: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = LoraSlots.load

    def failing(slots: LoraSlots, slot: int, adapter: Any) -> None:
        if adapter.name == "q_v":
            raise RuntimeError("planted")
        load(slots, slot, adapter)

    monkeypatch.setattr(LoraSlots, "load", failing)

    async def use(engine: Engine) -> list[Any]:
        asked = prompts(len(MIX), 20)
        return await asyncio.gather(
            *(tokens(engine, asked[number], name, greedy(6 + 3 * number)) for name, number in MIX[:5]),
            return_exceptions=True,
        )

    found = run(folder, HostStreams(), use, enforce_eager=True)
    for (name, _), got, want in zip(MIX, found, wanted, strict=False):
        assert isinstance(got, Failed) if name == "q_v" else got == want, (name, got)
