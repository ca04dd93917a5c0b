"""What a `helm upgrade` of a fleet must have in its manifests so that it fails no request; read from golden/."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from millrace.deploy.cli.fronts.supervise import ENGINES_S
from millrace.deploy.cli.serve import STOP_S
from millrace.stages.machines.engine_sources import DNS_PERIOD_S
from tests.deploy.kube.chart import GOLDEN, TOPOLOGIES, documents
from tests.deploy.kube.tools import ROOT

DNS_CACHE_S = 30.0  # that CoreDNS keeps an answer, by the configuration of kubeadm
REDIAL_S = 5.0  # most between two tries of a front to reach an engine


def objects(name: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in documents((GOLDEN / f"{name}.yaml").read_text()) if one["kind"] == kind]


def settings(name: str, file: str) -> Mapping[str, Any]:
    (found,) = (one for one in objects(name, "ConfigMap") if one["metadata"]["name"] == "release-millrace")
    read: dict[str, Any] = yaml.safe_load(found["data"][file])
    return read


@pytest.mark.parametrize("name", ["fleet", "canary", "models"])
def test_an_engine_ends_only_after_the_one_before_is_known_to_all_fronts(name: str) -> None:
    found = objects(name, "StatefulSet")
    assert found
    for engines in found:
        spec = engines["spec"]
        assert spec["minReadySeconds"] >= DNS_CACHE_S + DNS_PERIOD_S + REDIAL_S
        assert "updateStrategy" not in spec, "one by one, as by default"
        (container,) = spec["template"]["spec"]["containers"]
        asked = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
        assert asked["readiness"]["path"] == "/health/ready?fronts=1" and asked["startup"]["path"] == "/health"
        (service,) = (one for one in objects(name, "Service") if one["metadata"]["name"] == spec["serviceName"])
        assert service["spec"]["publishNotReadyAddresses"], "no front would find an engine that waits for one"
        args = container["args"]
        assert args[args.index("--drain-by") + 1] == "migrate"
    pages = (ROOT / "deploy" / "cli" / "machines" / "engine_pages.py").read_text()
    assert {one["path"].partition("?")[0] for one in asked.values()} <= set(re.findall(r'add_get\("([^"]+)"', pages))


@pytest.mark.parametrize("name", ["pods", "fleet", "canary", "models"])
def test_a_front_ends_only_once_another_is_ready_and_connections_could_go_there(name: str) -> None:
    (fronts,) = objects(name, "Deployment")
    assert fronts["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }
    (container,) = fronts["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5
    assert settings(name, "millrace.yaml")["lame_duck_s"] >= 5


@pytest.mark.parametrize("name", [*TOPOLOGIES, "canary", "models"])
def test_no_pod_is_killed_before_its_own_limits_of_time_are_over(name: str) -> None:
    pods = [one["spec"]["template"] for kind in ("Deployment", "StatefulSet") for one in objects(name, kind)]
    pods += [one["spec"]["leaderWorkerTemplate"]["leaderTemplate"] for one in objects(name, "LeaderWorkerSet")]
    assert pods
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        args = container["args"]
        own = settings(name, args[args.index("--config") + 1].rpartition("/")[2])
        before_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        most_s = before_s + own.get("lame_duck_s", 0) + own["shutdown_timeout_s"] + STOP_S + ENGINES_S
        assert pod["spec"]["terminationGracePeriodSeconds"] > most_s


@pytest.mark.parametrize("name", ["fleet", "canary", "models"])
def test_evictions_take_one_front_and_one_engine_of_a_group_at_a_time(name: str) -> None:
    budgets = objects(name, "PodDisruptionBudget")
    assert len(budgets) == 1 + len(objects(name, "StatefulSet"))
    assert {one["spec"]["maxUnavailable"] for one in budgets} == {1}
