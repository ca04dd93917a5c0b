"""The first part of loading a model, which may begin before there is an engine: what it opens, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import Array
from millrace.model import hub
from millrace.model.demo import WEIGHTS
from millrace.model.errors import CheckpointError
from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.errors import ConfigError
from millrace.stages.opening import Opening
from millrace.stages.phases import Phases

SMALL = EngineConfig(device="cpu", max_model_len=128, num_gpu_blocks=64)
needs_native = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)


def opening(config: EngineConfig) -> Opening:
    return Opening(config, Phases(time.monotonic))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "millrace-opening"]


@needs_native
def test_an_engine_goes_on_with_what_was_opened_before_it_was_made() -> None:
    async def answer(engine: Engine) -> list[int]:
        async with engine:
            params = SamplingParams(temperature=0.0, max_tokens=8)
            return [token async for output in engine.generate("Once", params) for token in output.outputs[0].token_ids]

    begun = opening(SMALL)
    model = begun.result().native_model
    assert model is not None and model.result().weights_bytes > 0  # before there is an engine
    engine = Engine(SMALL, opening=begun)
    tokens = asyncio.run(answer(engine))
    assert len(tokens) == 8 and tokens == asyncio.run(answer(Engine(SMALL)))
    assert {"resolve", "library", "weights", "tokenizer"} <= set(engine.info.startup_s)
    assert not threads()


@needs_native
def test_weights_are_packed_before_torch_or_an_engine_is_imported() -> None:
    """That is what a start gains by it: all else is imported meanwhile."""
    script = (
        "import sys, time; from millrace.stages.opening import Opening; from millrace.stages.phases import Phases;"
        "from millrace.stages.config import EngineConfig;"
        "opening = Opening(EngineConfig(device='cpu'), Phases(time.monotonic)); opening.result().native_model.result();"
        "late = [name for name in ('torch', 'aiohttp', 'tokenizers', 'jinja2', 'millrace.stages.engine',"
        " 'millrace.stages.scheduler') if name in sys.modules]; sys.exit(' '.join(late) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_native
def test_whoever_waits_goes_on_while_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def pack(model: NativeModel, mapped: Mapping[str, Array]) -> None:
        assert go_on.wait(10)

    monkeypatch.setattr(NativeModel, "set_mapped_tensors", pack)
    begun = opening(SMALL)
    began = time.monotonic()
    begun.wait_until_packing(10)
    assert time.monotonic() - began < 5
    go_on.set()
    begun.close()


def test_whoever_waits_for_a_model_that_is_fetched_does_so_no_longer_than_he_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_there = threading.Event()

    def fetch(*_: object, **__: object) -> Path:
        assert is_there.wait(10)
        return WEIGHTS

    monkeypatch.setattr(hub, "resolve", fetch)
    begun = opening(SMALL)
    began = time.monotonic()
    begun.wait_until_packing(0.05)
    assert 0.05 <= time.monotonic() - began < 5
    is_there.set()
    assert begun.result().root == WEIGHTS
    begun.close()


def test_a_setting_that_does_not_fit_the_model_is_refused_where_the_result_is_asked_for() -> None:
    begun = opening(EngineConfig(device="cpu", max_model_len=10_000_000))
    began = time.monotonic()
    begun.wait_until_packing(10)  # which will not be
    assert time.monotonic() - began < 5
    with pytest.raises(ConfigError, match="max_model_len = 10000000"):
        begun.result()
    begun.close()
    assert not threads()


@needs_native
def test_a_weight_that_is_not_finite_ends_the_engines_start_and_leaves_no_thread(tmp_path: Path) -> None:
    shutil.copytree(WEIGHTS, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    name = "model.layers.0.mlp.up_proj.weight"
    begin = 8 + size + json.loads(content[8 : 8 + size])[name]["data_offsets"][0]
    content[begin : begin + 2] = np.uint16(0x7F80).tobytes()  # of bf16; of float32 a number of any size
    content[begin + 2 : begin + 4] = np.uint16(0x7F80).tobytes()
    file.write_bytes(content)
    config = EngineConfig(model=str(tmp_path), device="cpu")

    async def main() -> None:
        async with Engine(config, opening=opening(config)):
            pass

    with pytest.raises(CheckpointError, match=name):
        asyncio.run(main())
    assert not threads()
