"""The chart by helm: lint, templates of all topologies, strict validation of what they make, and what is refused."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.kube.chart import CHART, FLEET, GOLDEN, MULTINODE, NAMES, SHOWN, documents, golden, render, values
from tests.deploy.kube.tools import FOLDER, INSTALL, needs, run

pytestmark = needs("helm")

TOPOLOGIES = ("pods", "fleet", "multinode")
VERSIONS = ("1.34.0", "1.35.0", "1.36.0", "1.37.0")  # of Kubernetes
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "LeaderWorkerSet"}
HAS_MODELS = any(FOLDER.glob("venv/lib/python*/site-packages/cloudcoil/models/keda"))
# Parses each object and writes it again: fields that get lost are unknown.
PARSE = """
import json, sys
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor
kinds = {kind.__name__: kind for kind in (ScaledObject, PrometheusRule, ServiceMonitor)}
parsed = [kinds[one["kind"]].model_validate(one) for one in json.load(sys.stdin)]
json.dump([one.model_dump(mode="json", by_alias=True, exclude_unset=True) for one in parsed], sys.stdout)
"""


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The objects of each value file in each topology."""
    return {(name, kind): documents(render(values(name, kind))) for name in NAMES for kind in TOPOLOGIES}


def of_kinds(made: dict[tuple[str, str], list[dict[str, Any]]], kinds: set[str]) -> list[dict[str, Any]]:
    return [one for objects in made.values() for one in objects if one["kind"] in kinds]


@pytest.mark.slow
def test_helm_lints_the_chart_with_each_value_file() -> None:
    assert len(NAMES) >= 6
    for name in NAMES:
        run("helm", "lint", "--strict", CHART, "--values", "-", text=yaml.safe_dump(values(name)))


@pytest.mark.parametrize("topology", SHOWN)
def test_the_golden_file_is_what_helm_renders(topology: str) -> None:
    assert (GOLDEN / f"{topology}.yaml").read_text() == golden(topology), "run python -m tests.deploy.kube --write"


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@needs("kubernetes-validate")
def test_every_object_is_valid_for_kubernetes_without_unknown_fields(version: str, made: Any) -> None:
    kinds = {one["kind"] for objects in made.values() for one in objects} - CUSTOM
    assert kinds >= {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget", "HorizontalPodAutoscaler"}
    groups = [one["spec"]["leaderWorkerTemplate"] for one in of_kinds(made, {"LeaderWorkerSet"})]
    pods = [group[f"{role}Template"] for group in groups for role in ("leader", "worker")]
    pods = [{"apiVersion": "v1", "kind": "Pod"} | pod | {"metadata": {"name": "pod"} | pod["metadata"]} for pod in pods]
    text = yaml.safe_dump_all([*of_kinds(made, kinds), *pods])
    done = run("kubernetes-validate", "--strict", "-k", version, "-", text=text)
    assert "ERROR" not in done.stdout + done.stderr


@pytest.mark.slow
def test_kubernetes_validate_notices_a_misspelt_probe(made: Any) -> None:
    (pods,) = (one for one in made["keys", "pods"] if one["kind"] == "Deployment")
    text = yaml.safe_dump(pods).replace("readinessProbe", "readynessProbe")
    assert run("kubernetes-validate", "--strict", "-", text=text, code=None).returncode != 0


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_MODELS, reason=f"the models of KEDA and the Prometheus operator are not installed: {INSTALL}"
)
def test_objects_of_keda_and_the_prometheus_operator_have_only_fields_that_these_know(made: Any) -> None:
    objects = of_kinds(made, CUSTOM - {"LeaderWorkerSet"})
    assert {one["kind"] for one in objects} == CUSTOM - {"LeaderWorkerSet"}
    python = FOLDER / "venv" / "bin" / "python"
    command = [str(python), "-c", PARSE]
    done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == objects


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"allowNoKey": True}, "allowNoKey: apiKeys.secret is set too"),
        ({"apiKeys": {"secret": ""}}, "apiKeys.secret: name a Secret"),
        ({"models": {"readOnly": True}}, "models.readOnly: needs models.claim"),
        ({"settings": {"port": 9000}}, "settings.port: the chart sets it itself"),
        ({"autoscaling": {"kind": "keda"}}, "autoscaling.prometheusAddress: keda asks Prometheus"),
        ({"autoscaling": {"minReplicas": 5}}, "autoscaling.minReplicas: 5 is above maxReplicas"),
        (MULTINODE | {"autoscaling": {"kind": "hpa"}}, "autoscaling.kind: scales the topologies pods and fleet alone"),
        (FLEET | {"fleet": {}}, "fleet.keySecret: name a Secret with the key that engines and fronts share"),
        (
            FLEET | {"fleet": {"keySecret": "k", "engineSettings": {"model": "m"}}},
            "fleet.engineSettings.model: the chart sets it itself",
        ),
        ({"replcas": 2}, "additional properties 'replcas' not allowed"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(changed: dict[str, Any], reason: str) -> None:
    text = yaml.safe_dump(values("keys") | changed)
    done = run("helm", "template", "release", CHART, "--values", "-", text=text, code=None)
    assert done.returncode != 0 and reason in done.stderr, done.stderr
