"""Metrics, dashboard and inspection of an engine in one process and in two: the same figures from the same code."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.dashboard import snapshots
from millrace.deploy.dashboard.block_map import BlockMap
from millrace.deploy.dashboard.flow import FlowRates
from millrace.deploy.inspect.routes import stages_report
from millrace.deploy.inspect.server_info import load
from millrace.deploy.metrics.metrics import Metrics
from millrace.deploy.metrics.watchdog import Watchdog
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.insight.bottleneck import load_of
from millrace.stages.insight.explain import view_of
from millrace.stages.params import SamplingParams
from millrace.stages.split.split_engine import SplitEngine

CONFIG = EngineConfig(max_num_seqs=4, threads=1, num_gpu_blocks=40, max_model_len=128)
FIGURES = (  # of /metrics; the same work gives the same numbers
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_requests_running", "millrace:kv_blocks"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:cache_config_info"),
)


async def seen(kind: type[Engine]) -> dict[str, Any]:
    """What the observers show after three equal answers, one after the other."""
    async with kind(CONFIG) as engine:
        metrics = Metrics(Watchdog(ServerConfig(), None))
        metrics.watch(engine, "m")
        for _ in range(3):
            params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
            assert [output async for output in engine.generate("Once upon a time there was a cat", params)]
        await engine.refresh(with_blocks=True)
        while load(engine, 0)["running"]:  # the last step may still be on its way
            await asyncio.sleep(0.01)
            await engine.refresh(with_blocks=True)
        lines = metrics.render().decode().splitlines()
        status = engine.status(with_sequences=True, with_blocks=True)
        owners = snapshots.block_owners(engine, status)
        assert owners is not None
        pipeline = snapshots.pipeline(status.pipeline, metrics.stage_load, FlowRates())
        report = stages_report(engine, load_of(view_of(engine.pipeline.tracer), engine.pipeline.env.now_ns()))
        return {
            "names": {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")},
            "figures": [line for line in lines if line.startswith(FIGURES)],
            "overview": snapshots.overview(engine, status, engine.health),
            "cells": BlockMap().next(owners),
            "stages": {name: list(stage) for name, stage in pipeline["stages"].items()},
            "edges": {name: (edge["source"], edge["target"]) for name, edge in pipeline["edges"].items()},
            "inside": [[stage["name"] for stage in report["stages"]], [edge["name"] for edge in report["edges"]]],
            "load": load(engine, 0),
        }


@pytest.mark.slow
def test_observers_show_the_same_of_an_engine_in_one_process_and_in_two() -> None:
    inline, split = (asyncio.run(asyncio.wait_for(seen(kind), 120.0)) for kind in (Engine, SplitEngine))
    for topic, told in inline.items():
        assert split[topic] == told, topic
    assert inline["overview"]["blocks"]["cached"] > 0
