"""Real engine processes that cannot be replaced for a while, find other weights, or are killed by a request."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model.checkpoint.hub import bundled_model_path
from millrace.model.errors import CheckpointError
from millrace.runtime.processes import child
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import RequestError
from millrace.stages.loading import model_files
from millrace.stages.loading.model_files import check_same_files, file_digests
from millrace.stages.split import process_keeper
from millrace.stages.split.remote_core import RemoteCore
from millrace.stages.split.split_engine import SplitEngine
from tests.stages.split.lost_process import ERROR, HANG, LOSE
from tests.stages.split.poisoned_process import POISON
from tests.stages.split.test_split_engine import GREEDY, answer, run, strike, until


@pytest.mark.slow
def test_streams_go_on_after_a_shortage_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_keeper, "FIRST_PAUSE_S", 0.01)
    make, left = child.socket.socketpair, [3]

    def socketpair() -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(24, "Too many open files")
        return make()

    async def test(engine: SplitEngine) -> None:
        due = await answer(engine)
        monkeypatch.setattr(child.socket, "socketpair", socketpair)
        assert await answer(engine, after=lambda: strike(engine, signal.SIGKILL)) == due
        assert engine.health.is_ready and left[0] == -1

    run(test)


@pytest.mark.slow
def test_a_successor_with_other_weights_is_refused_and_streams_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_keeper, "MAX_STARTS", 2)
    monkeypatch.setattr(process_keeper, "FIRST_PAUSE_S", 0.01)
    root = tmp_path / "model"
    shutil.copytree(bundled_model_path(), root)
    weights = root / "model.safetensors"

    def replace_and_kill(engine: SplitEngine) -> None:
        data = weights.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")  # of the tensors, behind the header
        other = np.frombuffer(data[begin:], np.uint16)[::-1]
        (tmp_path / "other").write_bytes(data[:begin] + other.tobytes())
        os.replace(tmp_path / "other", weights)
        strike(engine, signal.SIGKILL)

    async def test(engine: SplitEngine) -> None:
        with pytest.raises(RequestError, match=r"model\.safetensors was replaced or written to") as ended:
            await answer(engine, after=lambda: replace_and_kill(engine))
        assert ended.value.code == "dead" and str(tmp_path) not in str(ended.value)
        assert engine.health.state == "dead" and "model.safetensors" in str(engine.health.reason)

    run(test, model=str(root))


@pytest.mark.slow
def test_a_successor_of_a_later_version_goes_on_with_the_fields_that_both_know() -> None:
    async def test(engine: SplitEngine) -> None:
        due = await answer(engine)
        engine.core.module = "tests.stages.split.newer_process"
        assert await answer(engine, after=lambda: strike(engine, signal.SIGKILL)) == due
        assert await answer(engine) == due and engine.num_deaths == 1
        await engine.refresh()
        with pytest.raises(RequestError, match="does not know its field cache_salt") as ended:
            async for _ in engine.generate("a", GREEDY, cache_salt="mine"):
                pass
        assert ended.value.code == "engine_version" and engine.health.is_ready

    run(test)


def engine_of(module: str) -> Engine:
    """Its engine process runs another module: is killed by the token `POISON`, or loses its device for a file."""
    core = partial(RemoteCore, module=f"tests.stages.split.{module}")
    return Engine(core=core, max_num_seqs=8, threads=1, inject=("stage=execute,delay=1ms",))


@pytest.mark.slow
def test_a_request_that_kills_its_process_ends_and_the_others_finish() -> None:
    prompts = [f"{word} and" for word in ("Zoe", "Tom", "A cat", "The sea", "One", "Two")]

    async def main() -> None:
        async with engine_of("poisoned_process") as engine:
            due = [await answer(engine, prompt) for prompt in prompts]
            under_way = [asyncio.ensure_future(answer(engine, prompt)) for prompt in prompts]
            await asyncio.sleep(0.03)
            with pytest.raises(RequestError, match="the engine process ended each time it ran this request") as ended:
                async for _ in engine.generate(np.array([5, POISON, 9], np.int32), GREEDY):
                    pass
            assert ended.value.code == "engine_died"
            assert await asyncio.gather(*under_way) == due
            await until(lambda: engine.health.is_ready)
            assert engine.num_deaths == 3

    asyncio.run(asyncio.wait_for(main(), 180.0))


@pytest.mark.slow
def test_a_process_with_a_lost_device_is_replaced_and_its_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOSE, str(tmp_path / "lose"))
    prompts = [f"{word} and" for word in ("Zoe", "Tom", "A cat")]

    async def lose(engine: Engine, how: str) -> tuple[str, float]:
        """(what health says, seconds until it does)"""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        (tmp_path / "new").write_text(how)
        os.replace(tmp_path / "new", tmp_path / "lose")
        await until(lambda: not engine.health.is_ready)
        return engine.health.reason or "", loop.time() - began_s

    async def main() -> None:
        async with engine_of("lost_process") as engine:
            due = [await answer(engine, prompt) for prompt in prompts]
            for how, cause in ((ERROR, "uncorrectable ECC error encountered"), (HANG, "has not answered for 1.5 s")):
                under_way = [asyncio.ensure_future(answer(engine, prompt)) for prompt in prompts]
                await asyncio.sleep(0.03)
                reason, took_s = await lose(engine, how)
                assert "the device is lost since step" in reason and cause in reason
                assert took_s < 25.0, "by the probe's 1.5 s, not by the 30 s of a process that hangs"
                assert await asyncio.gather(*under_way) == due
                await until(lambda: engine.health.is_ready)
            assert engine.num_deaths == 2

    asyncio.run(asyncio.wait_for(main(), 180.0))


# -- digests


def test_a_changed_file_has_another_digest_and_a_copy_of_it_the_same(tmp_path: Path) -> None:
    for name, data in (("a.safetensors", b"0123"), ("config.json", b"{}"), ("README.md", b"x")):
        (tmp_path / name).write_bytes(data)
    first = file_digests(tmp_path)
    assert sorted(first) == ["a.safetensors", "config.json"]
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "b")
    os.replace(tmp_path / "b", tmp_path / "a.safetensors")
    os.utime(tmp_path / "config.json", (1, 1))
    check_same_files(file_digests(tmp_path), first)
    (tmp_path / "a.safetensors").write_bytes(b"0124")
    with pytest.raises(CheckpointError, match=r"a\.safetensors was replaced or written to .* restart the server"):
        check_same_files(file_digests(tmp_path), first)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors is gone"):
        check_same_files(file_digests(tmp_path), first)
    (tmp_path / "a.safetensors").write_bytes(b"0123")
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is new"):
        check_same_files(file_digests(tmp_path), first)


def test_a_large_file_counts_by_samples_and_by_the_time_of_its_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "WHOLE_BYTES", 1 << 16)
    path, data = tmp_path / "a.safetensors", bytearray(3 << 20)
    path.write_bytes(data)
    os.utime(path, ns=(5, 5))
    first = file_digests(tmp_path)
    for place in (0, 1 << 20, (3 << 20) - 1):
        data[place] = 1
        path.write_bytes(data)
        os.utime(path, ns=(5, 5))
        assert file_digests(tmp_path) != first
        data[place] = 0
    data[5_000] = 1  # between two samples
    path.write_bytes(data)
    assert file_digests(tmp_path) != first
