"""The memory of the host: of a machine and control groups that are written down in files."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.model.checkpoint.tensor_shapes import expected_shapes
from millrace.model.decoder.linear import linear_form
from millrace.model.families.registry import read_spec
from millrace.runtime.env import limits as process_limits
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.startup.phases import Phases
from millrace.stages.backends import cache_size
from millrace.stages.backends.cache_size import (
    free_host_bytes,
    free_host_share,
    host_limit,
    num_host_blocks,
    total_host_bytes,
)
from millrace.stages.backends.memory_needs import positions_that_fit
from millrace.stages.backends.torch.loading import _load_weights
from millrace.stages.backends.weights_fit import check_weights
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.loading import early
from millrace.stages.loading.model import LoadedModel, load_model
from tests.model.checkpoints import make_checkpoint
from tests.runtime.test_cpus import written

MIB = 2**20
MACHINE = {"proc/meminfo": f"MemTotal: {1000 * 2**10} kB\nMemFree: 1 kB\nMemAvailable: {800 * 2**10} kB\n"}
V1_NONE = str(2**63 - 4096)  # how version 1 writes "no limit"


def v2(limit: str, used: int, path: str = "a") -> dict[str, str]:
    group = f"sys/fs/cgroup/{path}"
    return {"proc/self/cgroup": "0::/a/b\n", f"{group}/memory.max": limit, f"{group}/memory.current": str(used)}


def v1(limit: str, used: int) -> dict[str, str]:
    group = "sys/fs/cgroup/memory/x/memory"
    return {
        "proc/self/cgroup": "4:memory:/x\n0::/\n",
        f"{group}.limit_in_bytes": limit,
        f"{group}.usage_in_bytes": str(used),
    }


CASES: dict[str, tuple[dict[str, str], int, int, bool]] = {  # free and in all, in MiB, and whether by a group
    "no groups": ({}, 800, 1000, False),
    "v2, no limit": (v2("max", 10 * MIB), 800, 1000, False),
    "v2": (v2(str(200 * MIB), 10 * MIB), 190, 200, True),
    "v2, nested, the outer one is nearly full": (
        v2(str(200 * MIB), 10 * MIB, "a/b") | v2(str(300 * MIB), 295 * MIB, "a"),
        5,
        200,
        True,
    ),
    "v2, above what the machine has": (v2(str(5000 * MIB), 10 * MIB), 800, 1000, False),
    "v2, above what others leave of the machine": (v2(str(900 * MIB), 10 * MIB), 800, 900, False),
    "v2, lowered below what is used": (v2(str(200 * MIB), 250 * MIB), 0, 200, True),
    "v1, no limit": (v1(V1_NONE, 10 * MIB), 800, 1000, False),
    "v1": (v1(str(200 * MIB), 10 * MIB), 190, 200, True),
}


@pytest.mark.parametrize(("files", "free", "total", "is_limited"), CASES.values(), ids=CASES.keys())
def test_memory_is_the_machines_or_what_a_group_gives_where_that_is_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], free: int, total: int, is_limited: bool
) -> None:
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE | files))
    assert (free_host_bytes(), total_host_bytes()) == (free * MIB, total * MIB)
    assert bool(host_limit()) == is_limited


def process(limits: str, pages: str) -> dict[str, str]:
    return {"proc/self/limits": f"Limit Soft Limit Hard Limit Units\n{limits}\n", "proc/self/statm": pages}


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        (f"Max address space {700 * MIB} unlimited bytes", 78),  # 700 - 110 of now - 512 of later
        (f"Max data size {650 * MIB} {650 * MIB} bytes", 88),  # 650 - 50 - 512
        (f"Max data size {5 * MIB} {5 * MIB} bytes", 0),
    ],
)
def test_memory_is_what_a_limit_of_this_process_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: str, free: int
) -> None:
    pages = f"{110 * MIB // 4096} 9 9 9 0 {50 * MIB // 4096} 0"
    files = process("Max address space unlimited unlimited bytes", pages)
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE | files))
    monkeypatch.setattr(process_limits, "PAGE_BYTES", 4096)
    assert free_host_bytes() == 800 * MIB and not host_limit()
    written(tmp_path, process(limits, pages))
    assert free_host_bytes() == free * MIB
    with pytest.raises(
        ConfigError, match=f"cpu has {free} .*free: .* or raise this process's limit .ulimit -v or -d.$"
    ):
        check_weights(100 * MIB, free_host_bytes(), "cpu", "float16")


def test_without_proc_half_of_the_machine_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache_size, "ROOT", tmp_path)
    assert free_host_bytes() == total_host_bytes() // 2 > 0


def test_a_pool_of_swapped_sequences_is_an_eighth_of_what_the_container_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE | v2(str(90 * MIB), 10 * MIB)))
    assert num_host_blocks(EngineConfig(), MIB, max_model_len=2048, device="cpu") == 10
    with pytest.raises(ConfigError, match="80 MiB are free: lower it, or raise the container's memory limit$"):
        num_host_blocks(EngineConfig(num_cpu_blocks=81), MIB, max_model_len=2048, device="cpu")
    written(tmp_path, v2("max", 10 * MIB))
    with pytest.raises(ConfigError, match="800 MiB are free: lower it, or free memory$"):
        num_host_blocks(EngineConfig(num_cpu_blocks=801), MIB, max_model_len=2048, device="cpu")


def test_weights_over_a_containers_limit_are_refused_but_not_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE | v2(str(90 * MIB), 10 * MIB)))
    with pytest.raises(ConfigError, match="cpu has 80 MiB free: .* or raise the container's memory limit$"):
        check_weights(81 * MIB, free_host_bytes(), "cpu", "float32")
    with pytest.raises(ConfigError, match="cuda:0 has 80 MiB free: .* or free memory$"):
        check_weights(81 * MIB, 80 * MIB, "cuda:0", "float32")


def test_a_weight_has_a_second_form_if_it_takes_at_most_a_quarter_of_free_memory() -> None:
    choose = lambda free: linear_form(torch.device("cpu"), torch.float16, 100, free).__name__  # noqa: E731
    if choose(None) == "Linear":
        pytest.skip("this build of torch packs no weights")
    assert (choose(1600), choose(1599), choose(0)) == ("WidenedLinear", "Linear", "Linear")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3", path)
    return path


def load(checkpoint: Path, **settings: object) -> LoadedModel:
    sizes = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024}
    config = EngineConfig(model=str(checkpoint), attention_backend="torch", **sizes | settings)  # type: ignore[arg-type]
    return load_model(config, Phases(time.monotonic), LiveEnv(0))


def test_each_engine_of_a_fleet_may_take_its_part_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path
) -> None:
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE))
    one, three = EngineConfig(max_model_len="auto"), EngineConfig(max_model_len="auto", data_parallel_size=3)
    assert (free_host_share(one), free_host_share(three)) == (800 * MIB, 800 * MIB // 3)
    longest = [positions_that_fit(config, read_spec(checkpoint), 1 << 40, "cpu") for config in (one, three)]
    assert longest[1] == pytest.approx(longest[0] / 3, rel=1e-3)
    early._check_on_cpu(replace(one, device="cpu"), "M", "stored", 267 * MIB, {})
    early._check_on_cpu(replace(three, device="cpu"), "M", "stored", 266 * MIB, {})
    match = "M: the weights take 267 MiB as stored, and cpu has 267 MiB free of .*, for each of 3 engines: lower "
    with pytest.raises(ConfigError, match=match + "data_parallel_size = 3; or choose a smaller model"):
        early._check_on_cpu(replace(three, device="cpu"), "M", "stored", 267 * MIB, {})


def test_in_a_container_the_cache_is_as_large_as_on_a_machine_with_so_much_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path
) -> None:
    monkeypatch.setattr(cache_size, "ROOT", tmp_path)
    settings = {"max_num_seqs": 64, "swap_space": 0}
    written(tmp_path, MACHINE)
    roomy = load(checkpoint, **settings).info.memory
    written(tmp_path, {"proc/meminfo": f"MemTotal: {120 * 2**10} kB\nMemAvailable: {100 * 2**10} kB\n"})
    small = load(checkpoint, **settings).info.memory
    written(tmp_path, MACHINE | v2(str(120 * MIB), 20 * MIB))
    limited = load(checkpoint, **settings).info.memory
    assert roomy.num_blocks > small.num_blocks == limited.num_blocks > 0
    assert (small.machine.total_bytes, small.machine.budget_bytes) == (
        limited.machine.total_bytes,
        limited.machine.budget_bytes,
    )
    assert "cpu has 120 MiB, the container's limit" in "\n".join(limited.to_text())
    assert "container" not in "\n".join(small.to_text())


def test_weights_have_no_second_form_in_a_container_that_is_too_small_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path
) -> None:
    config, shape = EngineConfig(model=str(checkpoint), dtype="float16"), read_spec(checkpoint)
    cpu = torch.device("cpu")
    least = 16 * sum(math.prod(sizes) for sizes in expected_shapes(shape).values())
    if linear_form(cpu, torch.float16, 1).__name__ == "Linear":
        pytest.skip("this build of torch packs no weights")
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE))
    for free, form in ((least, "WidenedLinear"), (least - 1, "Linear")):
        written(tmp_path, v2(str(free), 0))
        decoder = _load_weights(config, checkpoint, shape, cpu, kernel_set.load("torch"))(max_positions=8)
        assert type(decoder.weights.head).__name__ == form


def test_an_engine_that_a_container_is_too_small_for_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path
) -> None:
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE | v2(str(60 * MIB), 20 * MIB)))
    with pytest.raises(ConfigError, match="that cpu has for it .*raise the container's memory limit, or"):
        load(checkpoint)
    written(tmp_path, v2(str(60 * MIB), 70 * MIB))
    with pytest.raises(ConfigError, match="the weights take .* cpu has 0 B free: .*raise the container's memory limit"):
        load(checkpoint)
