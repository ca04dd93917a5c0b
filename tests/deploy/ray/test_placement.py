"""What is asked of a Ray cluster, decided without Ray; and the errors where there is none."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from millrace.deploy.cli.serve import choose_mode
from millrace.deploy.ray.placement import engines_beside, environment_for, make_request, no_room, num_fitting
from millrace.deploy.ray.ray_engine import RayEngine
from millrace.deploy.ray.ray_library import ray_library
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.engine.llm import LLM, _engine_class
from millrace.stages.errors import ConfigError

CPUS = [{"CPU": 4.0, "memory": 2.0**33}, {"CPU": 3.0}, {"CPU": 1.0}]
GPUS = [{"CPU": 8.0, "GPU": 4.0, "accelerator_type:L4": 1.0}, {"CPU": 8.0, "GPU": 2.0}]


def request(nodes: list[dict[str, float]], **settings: Any) -> Any:
    return make_request(EngineConfig(executor="ray", **settings), nodes)


@pytest.mark.parametrize(
    ("bundle", "strategy", "number"),
    [
        ({"CPU": 1.0}, "PACK", 8),
        ({"CPU": 2.0}, "SPREAD", 3),
        ({"CPU": 2.0}, "STRICT_PACK", 2),
        ({"CPU": 1.0}, "STRICT_SPREAD", 3),
        ({"CPU": 4.0}, "STRICT_SPREAD", 1),
        ({"CPU": 5.0}, "PACK", 0),
        ({"CPU": 1.0, "memory": 2.0**32}, "PACK", 2),
        ({"CPU": 1.0, "license": 0.001}, "PACK", 0),
    ],
)
def test_bundles_fit_as_often_as_their_strategy_allows(bundle: Any, strategy: str, number: int) -> None:
    assert num_fitting(bundle, CPUS, strategy) == number
    assert num_fitting(bundle, [], strategy) == 0


@pytest.mark.parametrize(
    ("placement", "count", "threads"),
    [
        ("pack", 1, 4),
        ("pack", 2, 3),
        ("spread", 3, 2),
        ("pack", 8, 1),
        ("pack", 9, 1),  # too many for it now: they wait for another node
        ("strict_pack", 2, 2),
        ("strict_spread", 2, 3),
        ("strict_spread", 3, 1),
    ],
)
def test_each_engine_gets_as_many_threads_as_let_all_of_them_run(placement: Any, count: int, threads: int) -> None:
    asked = request(CPUS, data_parallel_size=count, ray_placement=placement)
    assert (asked.bundle, asked.num_engines, asked.strategy) == ({"CPU": threads}, count, placement.upper())
    assert (asked.config.threads, asked.config.device, asked.config.executor) == (threads, "cpu", "auto")


def test_threads_of_the_settings_are_what_is_asked_for() -> None:
    asked = request(CPUS, data_parallel_size=2, threads=2, ray_resources=("license=0.5", "memory=1e9"))
    assert asked.bundle == {"CPU": 2.0, "license": 0.5, "memory": 1e9} and asked.config.threads == 2


@pytest.mark.parametrize(
    ("settings", "bundle", "device"),
    [
        ({}, {"CPU": 1.0, "GPU": 1.0}, "cuda"),
        ({"data_parallel_size": 3, "tensor_parallel_size": 2}, {"CPU": 1.0, "GPU": 2.0}, "cuda"),
        ({"data_parallel_size": 4, "tensor_parallel_size": 2, "threads": 4}, {"CPU": 4.0}, "cpu"),
        ({"data_parallel_size": 4, "tensor_parallel_size": 2, "device": "cuda"}, {"CPU": 1.0, "GPU": 2.0}, "cuda"),
        ({"device": "cpu", "threads": 1}, {"CPU": 1.0}, "cpu"),
        ({"ray_resources": ("accelerator_type:L4=0.001",)}, {"CPU": 1, "GPU": 1, "accelerator_type:L4": 0.001}, "cuda"),
    ],
)
def test_all_ranks_of_an_engine_are_in_one_bundle(settings: Any, bundle: Any, device: str) -> None:
    asked = request(GPUS, **settings)
    assert (asked.bundle, asked.config.device) == (bundle, device)


def test_an_error_of_no_room_says_what_was_asked_and_what_there_is() -> None:
    asked = request(CPUS, data_parallel_size=2, threads=4, ray_placement="strict_spread")
    text = no_room(asked, CPUS, "has had no room for this in 3 s")
    assert "2 x {CPU: 4}, STRICT_SPREAD" in text and "{CPU: 4, memory: 8.0 GiB}; {CPU: 3}; {CPU: 1}" in text
    assert "in all no node" in no_room(asked, [], "has no room")


def test_engines_share_free_memory_with_those_that_start_on_their_node() -> None:
    assert [engines_beside(["a", "b", "a"], index, range(3)) for index in range(3)] == [2, 1, 2]
    assert engines_beside(["a", "a", "a"], 0, [0, 1]) == 2  # the third holds its memory already
    assert engines_beside(["a", "a"], 1, []) == 1


def test_actors_get_the_variables_that_are_named_and_those_of_known_libraries() -> None:
    here = {"HF_HOME": "/h", "MILLRACE_API_KEY": "secret", "HOME": "/root", "TOKEN": "t"}
    assert environment_for(("TOKEN", "A=b=c"), here) == {"HF_HOME": "/h", "TOKEN": "t", "A": "b=c"}
    with pytest.raises(ConfigError, match="ray_env = GONE"):
        environment_for(("GONE",), here)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "cuda:1"}, "Ray chooses the GPUs"),
        ({"record": "/tmp/a"}, "another machine"),
        ({"ray_address": "ray://head:10001"}, "start the server on a node"),
        ({"ray_resources": ("CPU",)}, "NAME=AMOUNT"),
        ({"ray_resources": ("x=0",)}, "NAME=AMOUNT"),
        ({"ray_env": ("=1",)}, "ray_env"),
    ],
)
def test_settings_that_do_not_go_with_ray_are_refused_before_it_is_joined(settings: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RayEngine(EngineConfig(executor="ray", **settings))
    with pytest.raises(ConfigError, match="ray_timeout_s"):
        EngineConfig(ray_timeout_s=0.0)


def test_the_executor_chooses_the_engine_and_its_mode() -> None:
    config = EngineConfig(executor="ray")
    assert _engine_class(config, {}) is RayEngine and _engine_class(EngineConfig(), {"executor": "ray"}) is RayEngine
    assert choose_mode("auto", 1, is_elsewhere=True) == "split"
    with pytest.raises(ConfigError, match="executor = ray"):
        choose_mode("inline", 1, is_elsewhere=True)
    with pytest.raises(ConfigError, match="RayEngine"):
        Engine(config)


def test_without_ray_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'millrace-engine\[ray\]'"):
        ray_library()
    with pytest.raises(ConfigError, match="Ray cannot be imported"):
        LLM(executor="ray")


def test_engines_on_other_nodes_take_none_of_the_drivers_memory() -> None:
    engine = RayEngine(EngineConfig(executor="ray", data_parallel_size=3))
    assert engine.core.processes.config_of_text().data_parallel_size == 1 and engine.config.data_parallel_size == 3
