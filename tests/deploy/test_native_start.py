"""What starting without torch imports, takes and tells: commands in processes of their own, with the bundled model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.cache import NativeCache
from millrace.runtime.env import cpus
from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.backends.native import loading as native_loading
from millrace.stages.backends.native.loading import TOKENS_AHEAD
from millrace.stages.backends.rates import TARGET_TOKENS
from millrace.stages.errors import ConfigError
from millrace.stages.loading.native_choice import has_cuda_driver
from millrace.stages.outputs import ModelInfo
from tests.deploy.running import RunningServer
from tests.kernels.native.test_native_taken import HAS_CALL

HEAVY = ("torch", "transformers", "triton")
# the command line, and at the end of the process which of some modules it has imported, as the last line of stderr
TELLING = """
import atexit, sys
names = sys.argv.pop(1).split(",")
atexit.register(lambda: print([name for name in names if name in sys.modules], file=sys.stderr))
from millrace.deploy.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

needs_native = pytest.mark.skipif(
    has_cuda_driver() or not machine.instruction_sets() or build.find_compiler() is None,
    reason="the native step is not available here, or not the default",
)


def telling(names: tuple[str, ...], *arguments: str) -> list[str]:
    return [sys.executable, "-c", TELLING, ",".join(names), *arguments]


def imported(stderr: str) -> list[str]:
    return json.loads(stderr.strip().splitlines()[-1].replace("'", '"'))


def test_help_and_settings_import_nothing_but_settings() -> None:
    heavy = (*HEAVY, "numpy", "aiohttp", "pydantic", "tokenizers", "yaml", "millrace.stages.engine.engine")
    for arguments in (["--help"], ["serve", "--help"], ["--version"], ["serve", "--print-config"]):
        done = subprocess.run(telling(heavy, *arguments), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout and imported(done.stderr) == []


@pytest.mark.slow
@needs_native
def test_serve_answers_without_torch_in_little_memory_and_rests_when_idle() -> None:
    with RunningServer(command=telling(HEAVY, "serve", "--port", "0", "--log-format", "json")) as server:
        asked = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, "logprobs": 2}
        answer = server.post("/v1/completions", asked).json
        assert answer["usage"]["completion_tokens"] == 12
        drawn = server.post("/v1/completions", asked | {"temperature": 1.0, "top_p": 0.9, "seed": 1, "n": 3})
        assert len(drawn.json["choices"]) == 3
        schema = {"temperature": 0, "max_tokens": 40, "prompt": "A number:", "structured_outputs": {"regex": "[0-9]+"}}
        assert re.fullmatch("[0-9]+", server.post("/v1/completions", schema).json["choices"][0]["text"])
        assert server.post("/v1/embeddings", {"input": "A dog."}).status == 200
        info = server.get("/server_info").json
        assert info["model"]["attention_backend"] == info["config"]["engine"]["attention_backend"] == "native"
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        peak_kib = int(re.search(r"VmHWM:\s+(\d+)", status)[1])
        weights = next(row["bytes"] for row in info["memory"]["rows"] if row["name"] == "weights")
        assert peak_kib * 1024 - weights < 250 * 2**20, "125 MiB where this was written"
        used = [used_s(server.process.pid, 0.5) for _ in range(3)]  # in the first memory is taken ahead: 0.05 s
        assert min(used) < 0.025, f"nothing is under way, and it computed {used} s"
        assert lowered(server.process.pid), "the event loop gives way to what computes"
        server.signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        lines = server.errors().strip().splitlines()
    assert imported(lines[-1]) == []
    events = [json.loads(line) for line in lines[:-1]]
    (threads,) = (event for event in events if event["event"] == "threads.chosen")
    assert threads["count"] >= 1 and threads["reason"]
    (instructions,) = (event for event in events if event["event"] == "instructions.chosen")
    assert instructions["name"] in instructions["machine_has"]
    coded = [event["weights_mib"] for event in events if event["event"] == "weights.coded"]
    assert coded == ([round(weights / 2**20, 1)] if instructions["name"] in ("amx", "avx512_bf16") else [])


def used_s(pid: int, pause_s: float) -> float:
    """What a process computes in the next `pause_s`."""
    before = cpu_s(pid)
    time.sleep(pause_s)
    return cpu_s(pid) - before


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def lowered(pid: int) -> bool:
    """Whether the main thread runs at a lower priority than some other thread of the process, or at the lowest."""
    threads = (int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
    nice = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    return nice[pid] == min(min(nice.values()) + cpus.LOWER, 19)


@pytest.mark.slow
@needs_native
def test_complete_answers_without_torch_and_torch_says_the_same() -> None:
    command = ("complete", "Once upon a time", "--max-tokens", "16", "--temperature", "0", "--dtype", "float32")
    done = [
        subprocess.run(telling(HEAVY, *command, *more), capture_output=True, text=True, timeout=120)
        for more in ((), ("--attention-backend", "torch"))
    ]
    assert [one.returncode for one in done] == [0, 0]
    assert imported(done[0].stderr) == [] and "torch" in imported(done[1].stderr)
    assert done[0].stdout == done[1].stdout


@pytest.mark.slow
@needs_native
def test_what_the_library_does_not_do_goes_to_torch_or_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.stages import LLM

    small = {"num_gpu_blocks": 128, "max_num_seqs": 4, "threads": 1}
    with LLM(dtype="float16", **small) as llm:
        assert llm.info.attention_backend == "torch"
    with pytest.raises(ConfigError, match="attention_backend = native: dtype = float16"):
        LLM(config=EngineConfig(attention_backend="native", dtype="float16", **small))
    monkeypatch.setenv("MILLRACE_INSTRUCTION_SET", "none of them")
    with pytest.raises(ConfigError, match="attention_backend = native: instruction set none of them"):
        LLM(attention_backend="native", **small)


@needs_native
@pytest.mark.parametrize("swap_space", [None, 0.0])
def test_an_unset_itl_target_follows_from_the_measured_time_of_a_prompt_token(
    swap_space: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.stages.backends.rates.TARGETS_MS", (0.0, float("inf")))

    async def main() -> tuple[ModelInfo, ModelInfo]:
        small = EngineConfig(device="cpu", num_gpu_blocks=128, swap_space=swap_space)
        async with Engine(small) as measured, Engine(replace(small, itl_target_ms=7.0)) as told:
            return measured.info, told.info

    measured, told = asyncio.run(main())
    assert told.itl_target_ms == 7.0
    assert (measured.rates is None) == (swap_space == 0.0)
    assert measured.itl_target_ms > 0.0
    if measured.rates is not None:
        assert measured.itl_target_ms == pytest.approx(1e3 * TARGET_TOKENS * measured.rates.compute_s)


@needs_native
@pytest.mark.skipif(not HAS_CALL, reason="this system takes no pages before they are written to")
def test_an_idle_engine_has_memory_for_its_next_tokens_before_they_come() -> None:
    async def answer(engine: Engine, prompt: list[int]) -> None:
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=1)):
            pass

    async def main() -> None:
        async with Engine(EngineConfig(device="cpu")) as engine:
            cache: NativeCache = engine.core.stages.loaded.runner.cache  # type: ignore[union-attr, attr-defined]
            token_bytes = cache.data[cache.at(0)].nbytes / cache.block_size
            await asyncio.to_thread(cache.ahead.join)
            begun = cache.ahead.num_taken
            assert 0.9 * TOKENS_AHEAD * token_bytes <= begun < cache.data.nbytes / 3
            await asyncio.gather(*(answer(engine, [first] + [5] * 900) for first in range(6, 11)))
            await asyncio.to_thread(cache.ahead.join)
            assert cache.ahead.num_taken - begun >= 2000 * token_bytes  # 4,500 were used; whole pages

    asyncio.run(main())


@needs_native
@pytest.mark.skipif(not HAS_CALL, reason="this system takes no pages before they are written to")
@pytest.mark.parametrize("given", [{"kv_cache_bytes": 256 << 20}, {"num_gpu_blocks": 3000}])
def test_an_idle_engine_has_all_the_memory_of_a_cache_whose_size_was_given(
    given: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_loading, "free_host_bytes", lambda: 64 << 30)

    async def main() -> None:
        async with Engine(EngineConfig(device="cpu", **given)) as engine:  # type: ignore[arg-type]
            cache: NativeCache = engine.core.stages.loaded.runner.cache  # type: ignore[union-attr, attr-defined]
            await asyncio.to_thread(cache.ahead.join)
            assert cache.ahead.num_taken >= cache.data.nbytes

    asyncio.run(main())


@needs_native
def test_an_idle_engine_takes_no_memory_ahead_where_its_container_has_little_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_loading, "free_host_bytes", lambda: 8 << 20)

    async def main() -> int:
        async with Engine(EngineConfig(device="cpu", kv_cache_bytes=256 << 20)) as engine:
            cache: NativeCache = engine.core.stages.loaded.runner.cache  # type: ignore[union-attr, attr-defined]
            await asyncio.to_thread(cache.ahead.join)
            return cache.ahead.num_taken

    assert asyncio.run(main()) == 0
