"""The settings of the Serve application, without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.deploy.ray.app import POLICY, deployment_options, parse_args
from millrace.stages.errors import ConfigError


def test_arguments_are_the_servers_settings_as_text_or_values() -> None:
    texts = {"model": "a/b", "max-num-seqs": "7", "api_key": "k1,k2", "dtype": "bfloat16", "max_replicas": "3"}
    options, engine, server = parse_args(texts)
    assert (engine.model, engine.max_num_seqs, engine.dtype, server.api_key) == ("a/b", 7, "bfloat16", ("k1", "k2"))
    assert (options.min_replicas, options.max_replicas) == (1, 3)
    options, engine, server = parse_args({"max_num_seqs": 7, "api_key": ["k1"], "target_work_s": 2})
    assert (engine.max_num_seqs, server.api_key, options.target_work_s) == (7, ("k1",), 2.0)


def test_without_a_key_only_names_of_this_machine_are_answered() -> None:
    assert parse_args({})[2].allowed_host == ("localhost",)
    assert parse_args({"api_key": "k"})[2].allowed_host == parse_args({"allow_no_key": "true"})[2].allowed_host == ()
    assert parse_args({"allowed_host": "example.com"})[2].allowed_host == ("example.com",)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"modle": "x"}, "did you mean model"),
        ({"port": "1"}, "Ray Serve's"),
        ({"ray_placement": "pack"}, "executor = ray"),
        ({"executor": "ray"}, "leave executor out"),
        ({"max_num_seqs": "x"}, "max_num_seqs = x"),
        ({"max_replicas": "many"}, "must be a number"),
        ({"min_replicas": "2"}, "the first at most the second"),
        ({"target_work_s": "0"}, "above 0"),
        ({"device": "cuda:1"}, "Ray chooses"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_args(args)


@pytest.mark.parametrize(
    ("args", "actor"),
    [
        ({}, {"num_cpus": 1.0, "resources": {}}),
        ({"threads": "4", "data_parallel_size": "2"}, {"num_cpus": 8.0, "resources": {}}),
        (
            {"device": "cuda", "data_parallel_size": "2", "tensor_parallel_size": "2"},
            {"num_cpus": 2.0, "num_gpus": 4, "resources": {}},
        ),
        (
            {"ray_resources": "CPU=3,memory=1e9,accelerator_type:L4=0.001"},
            {"num_cpus": 3.0, "memory": 1e9, "resources": {"accelerator_type:L4": 0.001}},
        ),
    ],
)
def test_a_replica_takes_of_its_node_what_all_its_engines_need(args: Any, actor: Any) -> None:
    assert deployment_options(*parse_args(args))["ray_actor_options"] == actor


def test_replicas_are_scaled_only_between_different_bounds() -> None:
    fixed = deployment_options(*parse_args({"min_replicas": "2", "max_replicas": "2", "shutdown_timeout_s": "5"}))
    assert fixed["num_replicas"] == 2 and "autoscaling_config" not in fixed
    assert fixed["graceful_shutdown_timeout_s"] == 15.0 and fixed["max_ongoing_requests"] == 1024
    scaled = deployment_options(*parse_args({"max_replicas": "4", "target_work_s": "3"}))["autoscaling_config"]
    assert scaled["policy"] == {"policy_function": POLICY, "policy_kwargs": {"target_s": 3.0}}
    assert (scaled["min_replicas"], scaled["max_replicas"], scaled["upscale_delay_s"]) == (1, 4, 0.0)
