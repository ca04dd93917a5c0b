"""The memory table of a real model, compared with torch's measurements and the checkpoint's file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from millrace.model.spec import LayerSpec, NormSpec
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.env.log import captured_logs
from millrace.runtime.startup.phases import Phases
from millrace.stages.backends import cache_size
from millrace.stages.backends.memory_needs import (
    CPU_LOGIT_BYTES,
    GRAPH_LOGIT_BYTES,
    KERNEL_BYTES,
    SORTED_BYTES,
    STEP_KERNELS,
    async_bytes,
    graphs_bytes,
    layer_kernels,
)
from millrace.stages.backends.rates import largest_grant
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.loading.model import LoadedModel, load_model
from millrace.stages.messages import StepGrant
from millrace.stages.params import SamplingParams
from millrace.stages.sample.sampler import Sampler
from tests.model.checkpoints import make_checkpoint
from tests.runtime.device_streams.host_streams import HostStreams
from tests.runtime.test_cpus import written

SMALL = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024}
SHARED = {"llama": False, "qwen3": True}  # family -> whether the embedding is the head, too


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in SHARED}
    for family, path in paths.items():
        make_checkpoint(family, path)
    return paths


def load(path: Path, **settings) -> LoadedModel:
    config = EngineConfig(model=str(path), attention_backend="torch", **SMALL | settings)
    return load_model(config, Phases(time.monotonic), LiveEnv(0))


@pytest.mark.parametrize("family", SHARED)
def test_the_weights_row_is_the_tensors_of_the_file(checkpoints, family):
    with safe_open(checkpoints[family] / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        loaded = load(checkpoints[family], dtype=dtype)
        matrices = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2}
        embedding = matrices["model.embed_tokens.weight"].numel()
        in_file = sum(tensor.numel() for tensor in tensors.values())
        products = sum(tensor.numel() for tensor in matrices.values()) - (0 if SHARED[family] else embedding)
        expected = {  # the forms of `model/decoder/linear.py`
            "Linear": size * in_file,
            "PackedLinear": size * (in_file + (embedding if SHARED[family] else 0)),
            "WidenedLinear": size * in_file + 4 * products,
        }[type(loaded.runner.decoder.weights.head).__name__]
        assert loaded.info.memory.row("weights").num_bytes == expected


def test_the_cache_row_is_the_caches_storage(checkpoints):
    for settings in ({"num_gpu_blocks": 77}, {"kv_cache_bytes": 5_000_000}, {}):
        loaded = load(checkpoints["qwen3"], **settings)
        table, cache = loaded.info.memory, loaded.runner.cache
        assert table.row("kv_cache").num_bytes == cache.data.untyped_storage().nbytes()
        assert (
            (table.num_blocks, table.block_size)
            == (cache.num_blocks, cache.block_size)
            == (
                loaded.info.num_blocks,
                16,
            )
        )
        assert table.num_longest == table.num_blocks // 64


def test_the_state_row_is_the_tables_of_runner_sampler_and_positions(checkpoints):
    for settings in ({}, {"max_model_len": "auto", "num_gpu_blocks": 10}):
        loaded = load(checkpoints["qwen3"], **settings)
        runner, columns = loaded.runner, vars(loaded.sampler.table).values()
        owners = (array if array.base is None else array.base for array in columns if isinstance(array, np.ndarray))
        held = sum({id(owner): owner.nbytes for owner in owners}.values())  # some columns are views of one array
        held += runner.tables.nbytes + runner.last_tokens.nbytes + runner.pooler.sums.nbytes
        held += sum(table.nbytes for tables in runner.decoder._tables for table in tables)
        assert held <= loaded.info.memory.row("state").num_bytes < 1.02 * held


def test_what_a_late_device_keeps_is_what_the_sizing_counts(checkpoints):
    env = LiveEnv(0)
    env.streams = HostStreams()
    config = EngineConfig(model=str(checkpoints["qwen3"]), attention_backend="torch", **SMALL)
    model = load_model(config, Phases(time.monotonic), env).runner
    memory, work = model._work._memory, model._work
    parts = [getattr(part, name) for part in (work.slots, work._buffers) for name in part.__slots__]
    tables = [part for part in parts if isinstance(part, torch.Tensor)]
    held = sum(tensor.nbytes for tensor in (*tables, memory.diff, memory.result))
    assert held == async_bytes(replace(config, max_num_batched_tokens=512), 1024)


class Filling(HostStreams):
    """A device whose free memory falls when it is asked for it again: by what its driver keeps for graphs."""

    free = 90_000_000

    def free_bytes(self) -> int:
        free, self.free = self.free, self.free - 5_000_000
        return free


def test_the_graphs_row_is_all_memory_that_capturing_took_from_the_device(checkpoints):
    env = LiveEnv(0)
    env.streams = Filling()
    config = EngineConfig(model=str(checkpoints["qwen3"]), attention_backend="torch", **SMALL)
    with captured_logs() as logs:
        info = load_model(config, Phases(time.monotonic), env).info
    assert info.memory.row("graphs").num_bytes == info.captured.num_bytes == 5_000_000
    (line,) = [line for line in logs if line["event"] == "graphs.captured"]
    assert (line["bytes"], line["estimated_bytes"]) == (5_000_000, 0), "on a CPU no graph is expected"


def test_the_estimate_for_graphs_counts_the_kernels_of_each_size():
    plain = LayerSpec(mixer=None, feed=None)
    gemma = replace(plain, post_mixer=NormSpec(), post_feed=NormSpec())
    shape: Any = SimpleNamespace(layers=[plain, plain, gemma], vocab_size=100)
    in_layers = 14 + 14 + 18
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64)
    logits, kernels = 2 * 100 * GRAPH_LOGIT_BYTES, 3 * (in_layers + STEP_KERNELS)
    assert graphs_bytes(config, shape, 0) == logits + kernels * KERNEL_BYTES, "1 and 2 rows, and 64 tokens"
    assert graphs_bytes(config, shape, 1000) == graphs_bytes(config, shape, 0) + 1000
    drafting = replace(config, speculation="ngram", num_speculative_tokens=7)
    more = 8 * 100 * GRAPH_LOGIT_BYTES + 4 * (in_layers + STEP_KERNELS) * KERNEL_BYTES
    assert graphs_bytes(drafting, shape, 0) == more, "and 8 tokens with drafts"
    assert graphs_bytes(replace(config, enforce_eager=True), shape, 1000) == 0
    scaled, parallel = replace(gemma, residual_scale=0.5), replace(plain, pre_feed=None, is_parallel=True)
    assert [layer_kernels(layer) for layer in (scaled, parallel)] == [20, 13]


def test_little_memory_gives_a_shorter_context_or_an_error_with_the_length(checkpoints, monkeypatch, tmp_path):
    def free(num_bytes: int) -> None:
        written(tmp_path, {"proc/meminfo": f"MemTotal: 8000000 kB\nMemAvailable: {num_bytes // 1024} kB\n"})

    monkeypatch.setattr(cache_size, "ROOT", tmp_path)
    per_token = 24_576 // 16  # bytes of the cache
    free(100 * 2**20)
    assert load(checkpoints["qwen3"], max_num_seqs=1).info.memory.num_tokens == 1024
    free(64 * 2**20)
    settings = {"max_model_len": "auto", "max_num_seqs": 1, "block_size": 1, "max_num_batched_tokens": 64}
    settings["swap_space"] = 0
    info = load(checkpoints["qwen3"], **settings).info
    assert info.max_model_len == 2048, "the model's"
    free(44 * 2**20)  # 40 of which are for sorting rows
    info = load(checkpoints["qwen3"], **settings).info
    assert 1_000 < info.max_model_len < 2048
    left = info.memory.machine.budget_bytes - info.memory.total_bytes
    assert 0 <= left < 2 * (per_token + info.memory.row("state").num_bytes // info.max_model_len)
    with pytest.raises(ConfigError, match=f"set max_model_len to at most {info.max_model_len}, or to auto"):
        load(checkpoints["qwen3"], **settings | {"max_model_len": 2048})
    free(2**20 // 2)
    with pytest.raises(ConfigError, match=r"the weights take .* as float32, .*and cpu has 512 KiB free"):
        load(checkpoints["qwen3"])


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch had allocated at a time within `run`, by its profiler. On one thread: on several, SDPA packs
    keys for AMX where a CPU has that, which is scratch of its own."""
    from torch.profiler import ProfilerActivity, profile

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run()
    finally:
        torch.set_num_threads(before)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def one_step(config: EngineConfig, num_tokens: int, length: int) -> StepGrant:
    """The last `num_tokens` of one sequence of `length` tokens."""
    whole = largest_grant(replace(config, max_num_batched_tokens=length, max_num_seqs=1), length + 1)
    starts, num = np.array([length - num_tokens], np.int32), np.array([num_tokens], np.int32)
    return replace(whole, starts=starts, num_tokens=num)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SHARED)
@pytest.mark.parametrize(("num_tokens", "length"), [(64, 1000), (200, 1000), (512, 1000), (512, 512)])
def test_no_step_takes_more_than_the_activations_row_and_the_largest_hardly_less(
    checkpoints, family, dtype, num_tokens, length
):
    settings = {**SMALL, "max_num_batched_tokens": num_tokens, "max_model_len": length + 1, "num_gpu_blocks": 80}
    config = EngineConfig(model=str(checkpoints[family]), attention_backend="torch", dtype=dtype, **settings)
    loaded = load_model(config, Phases(time.monotonic), LiveEnv(0))
    row = loaded.info.memory.row("activations").num_bytes
    grant = one_step(config, num_tokens, length)
    scattered = replace(grant, table_blocks=grant.table_blocks[::-1].copy())
    logits = 2 * 4 * loaded.info.vocab_size  # of the one row, as they come and in float32
    taken = [peak_bytes(lambda grant=grant: loaded.runner.forward(grant)) for grant in (grant, scattered)]
    assert max(taken) <= row + logits
    if length > num_tokens:
        assert row <= 1.2 * max(taken)


@pytest.mark.slow
def test_the_logits_row_is_what_choosing_takes_at_most(checkpoints):
    num_rows, vocab_size = 64, 5_000
    params = SamplingParams(logprobs=5, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=4)
    grant = largest_grant(EngineConfig(max_num_batched_tokens=num_rows, max_num_seqs=num_rows), 2)
    grant = replace(grant, started=tuple(replace(started, params=params) for started in grant.started))
    sampler = Sampler(torch.zeros(num_rows, dtype=torch.int64), vocab_size, max_model_len=8)
    logits = torch.randn(num_rows, vocab_size)
    taken = logits.nbytes + peak_bytes(lambda: sampler.sample(grant, logits))
    assert taken == pytest.approx(num_rows * vocab_size * CPU_LOGIT_BYTES, rel=0.02)
    info = load(checkpoints["qwen3"], num_gpu_blocks=64).info
    assert info.memory.row("logits").num_bytes == 8 * info.vocab_size * CPU_LOGIT_BYTES + SORTED_BYTES


def test_the_plan_is_logged_once_with_every_row(checkpoints):
    with captured_logs() as events:
        loaded = load(checkpoints["llama"], num_gpu_blocks=64)
    (event,) = (event for event in events if event["event"] == "memory.plan")
    table = loaded.info.memory
    assert all(event[f"{row.name}_bytes"] == row.num_bytes for row in table.rows)
    assert event["table"] == table.to_text() and event["total_bytes"] == table.total_bytes
