"""The first part of model loading, which may start before there is an engine."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import pytest

import millrace.stages.loading.early as early
import millrace.stages.loading.native_model as native_model
from millrace.kernels.native import build, loading, machine
from millrace.kernels.native.errors import NativeUnavailableError
from millrace.kernels.native.shape import Array
from millrace.kernels.native.weights import NativeWeights
from millrace.model.checkpoint import hub
from millrace.model.demo import WEIGHTS
from millrace.model.errors import CheckpointError, TemplateError
from millrace.runtime.env.log import captured_logs
from millrace.runtime.startup.phases import Phases
from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.errors import ConfigError
from millrace.stages.loading.early import EarlyLoading
from millrace.stages.split.split_engine import SplitEngine
from tests.bench.shapes import make_checkpoint
from tests.counts import FULL

SMALL = EngineConfig(device="cpu", max_model_len=128, num_gpu_blocks=64)
needs_native = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)


def opening(config: EngineConfig) -> EarlyLoading:
    return EarlyLoading(config, Phases(time.monotonic))


@needs_native
def test_weights_are_read_in_calls_that_tell_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_model, "CALL_BYTES", 1 << 20)
    begun = opening(replace(SMALL, dtype="float32"))
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(begun.phases.progress, "add", lambda *bytes_of: told.append(bytes_of))
    expected: list[dict[str, int]] = []
    monkeypatch.setattr(begun.phases.progress, "expect", expected.append)
    native = begun.result().native_model
    assert native is not None and native.result().weights.num_bytes > 0
    begun.close()
    size = (WEIGHTS / "model.safetensors").stat().st_size
    assert {name for name, _ in told} == set(expected[0]) == {"model.safetensors"}
    assert sum(count for _, count in told) == expected[0]["model.safetensors"]
    assert size - 20_000 < expected[0]["model.safetensors"] < size  # less the header
    assert begun.phases.progress.state().phase == "pack"


@needs_native
def test_a_start_that_compiles_the_library_says_so_and_not_that_it_downloads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    instruction_set = loading.choose_instruction_set()
    ready = build.library_path(instruction_set)
    phases: list[str] = []

    def compile_library(name: str, target: Path) -> None:
        phases.append(begun.phases.progress.state().phase)
        shutil.copy(ready, target)

    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compile_library", compile_library)
    for cached in (loading.load, loading._load_once):
        monkeypatch.setattr(loading, cached.__name__, cache(cached.__wrapped__))  # this process has loaded it
    with captured_logs() as logs:
        begun = opening(SMALL)
        native = begun.result().native_model
        assert native is not None and native.result().instruction_set == instruction_set
        begun.close()
    events = [line["event"] for line in logs]
    is_compiled = build.PREBUILT not in ready.parents
    assert phases == ["compile"] * is_compiled and events.count("native_library.compiling") == is_compiled


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
    assert model is not None and model.result().weights.num_bytes > 0  # before there is an engine
    engine = Engine(SMALL, opening=begun)
    tokens = asyncio.run(answer(engine))
    assert len(tokens) == 8 and tokens == asyncio.run(answer(Engine(SMALL)))
    assert {"resolve", "library", "weights", "tokenizer"} <= set(engine.info.startup_s)
    assert not threads()


@needs_native
@pytest.mark.slow
def test_weights_are_packed_before_torch_or_an_engine_is_imported() -> None:
    """The other modules are imported meanwhile, which shortens the start."""
    script = (
        "import sys, time; from millrace.stages.loading.early import EarlyLoading;"
        "from millrace.runtime.startup.phases import Phases; from millrace.stages.config import EngineConfig;"
        "opening = EarlyLoading(EngineConfig(device='cpu'), Phases(time.monotonic));"
        "opening.result().native_model.result();"
        "late = [name for name in ('torch', 'aiohttp', 'tokenizers', 'jinja2', 'millrace.stages.engine.engine',"
        " 'millrace.stages.schedule.scheduler') if name in sys.modules]; sys.exit(' '.join(late) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_native
def test_waiting_for_packing_ends_while_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def pack(weights: NativeWeights, mapped: Mapping[str, Array]) -> None:
        assert go_on.wait(300)

    monkeypatch.setattr(NativeWeights, "set_mapped_tensors", pack)
    begun = opening(SMALL)
    began = time.monotonic()
    begun.wait_until_packing(300)
    assert time.monotonic() - began < 60
    go_on.set()
    begun.close()


def test_waiting_for_packing_during_a_download_ends_at_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_there = threading.Event()

    def fetch(*_: object, **__: object) -> Path:
        assert is_there.wait(300)
        return WEIGHTS

    monkeypatch.setattr(hub, "resolve", fetch)
    begun = opening(SMALL)
    began = time.monotonic()
    begun.wait_until_packing(0.05)
    assert 0.05 <= time.monotonic() - began < 60
    is_there.set()
    assert begun.result().root == WEIGHTS
    begun.close()


@pytest.mark.parametrize("what", ["library", "room"])
def test_waiting_for_packing_ends_at_once_if_weights_will_not_be_packed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(*_: object) -> NoReturn:
        raise NativeUnavailableError("no compiler")

    if what == "library":
        monkeypatch.setattr(loading, "load_best", lack)
    monkeypatch.setattr(native_model, "free_host_share", lambda config: 1024)
    begun = opening(SMALL)
    began = time.monotonic()
    begun.wait_until_packing(300)
    assert time.monotonic() - began < 60
    found = begun.result().native_model
    assert found is not None
    if what == "library":
        assert found.result() == "no compiler"
    elif machine.instruction_sets():
        with pytest.raises(ConfigError, match=r"1 KiB free|1\.0+ KiB free"):
            found.result()
    begun.close()


@needs_native
def test_an_engine_that_is_stopped_before_it_starts_leaves_nothing_of_what_had_begun() -> None:
    async def main() -> None:
        engine = Engine(SMALL, opening=opening(SMALL))
        await engine.stop()

    asyncio.run(main())
    assert not threads()


def test_an_engine_refuses_what_was_opened_with_other_settings() -> None:
    begun = opening(SMALL)
    with pytest.raises(ConfigError, match="opening: must have the same settings"):
        Engine(SMALL, opening=begun, quantization="int8")
    with pytest.raises(ConfigError, match="give no opening"):
        SplitEngine(SMALL, opening=begun)
    begun.close()


@needs_native
@pytest.mark.slow
def test_a_process_may_end_while_weights_are_packed(tmp_path: Path) -> None:
    """The exit of the process must not free memory that the packing thread uses."""
    make_checkpoint("smollm2-135m", tmp_path)
    script = (
        "import sys, time; from millrace.stages.loading.early import EarlyLoading;"
        "from millrace.runtime.startup.phases import Phases; from millrace.stages.config import EngineConfig;"
        "opening = EarlyLoading(EngineConfig(model=sys.argv[1], device='cpu', threads=1), Phases(time.monotonic));"
        "opening.wait_until_packing(60); time.sleep(float(sys.argv[2]))"
    )
    for wait_s in ("0", "0.05", "0.1", "0.15") if FULL else ("0", "0.1"):
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path, wait_s], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@needs_native
def test_of_tensors_at_odd_places_no_two_are_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(WEIGHTS, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    file.write_bytes((size + 1).to_bytes(8, "little") + content[8 : 8 + size] + b" " + content[8 + size :])
    num_set = []
    set_tensor = NativeWeights.set_tensor
    monkeypatch.setattr(
        NativeWeights, "set_tensor", lambda its, name, data: (num_set.append(name), set_tensor(its, name, data))
    )
    begun = [opening(replace(SMALL, model=model)) for model in (None, str(tmp_path))]
    plain, odd = (cast("Any", one.result().native_model).result() for one in begun)
    assert len(num_set) > 10  # by itself each
    name = "model.layers.0.mlp.up_proj.weight"
    rows, columns = plain.shape.layers[0].intermediate_size, plain.shape.hidden_size
    assert np.array_equal(plain.weights.matrix(name, rows, columns), odd.weights.matrix(name, rows, columns))
    for one in begun:
        one.close()


def test_a_setting_that_does_not_fit_the_model_is_refused_by_result() -> None:
    begun = opening(EngineConfig(device="cpu", max_model_len=10_000_000))
    began = time.monotonic()
    begun.wait_until_packing(300)  # which will not happen
    assert time.monotonic() - began < 60
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


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("t.jinja", "t.jinja .setting chat_template., line 1: not valid"),
        ("{% for x %}", "text of the setting chat_template, line 1: not valid"),
        ("{{ tools }}", "never reads `messages`"),
        ("./none.jinja", "no such file"),
    ],
)
def test_a_bad_chat_template_is_told_before_weights_are_read(
    wanted: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any) -> NoReturn:
        raise AssertionError("weights were read, or a model was looked for")

    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{{ unclosed")
    monkeypatch.setattr(EarlyLoading, "_load_native_model", never)
    if wanted == "t.jinja":
        monkeypatch.setattr(early, "resolve", never)
    begun = opening(replace(SMALL, chat_template=wanted))
    with pytest.raises(TemplateError, match=message):
        begun.result()
    begun.close()
