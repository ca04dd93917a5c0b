"""The chart by helm: lint, templates of all topologies, strict validation of what they make, and what is refused."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.kube.chart import (
    CHANGED,
    CHART,
    FLEET,
    GOLDEN,
    MODELS,
    MULTINODE,
    NAMES,
    SHOWN,
    documents,
    golden,
    render,
    values,
)
from tests.deploy.kube.tools import FOLDER, INSTALL, needs, run

pytestmark = needs("helm")

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
    """The objects of each value file in each topology, and in fleets with groups of engines."""
    return {(name, kind): documents(render(values(name, kind))) for name in NAMES for kind in CHANGED}


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


def groups(given: dict[str, Any], **fleet: Any) -> dict[str, Any]:
    """A fleet with groups of engines."""
    return FLEET | {"fleet": {"keySecret": "fleet", "groups": given} | fleet}


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
        ({"settings": {"lame_duck_s": 9}}, "settings.lame_duck_s: the chart sets it itself"),
        (groups({"c": {"engines": 1}}), "fleet.groups.c.labels: without one, no share of the requests"),
        (
            groups({"c": {"engines": 1, "labels": {"v": "2"}, "engineSettings": {"served_model_name": ["m"]}}}),
            "fleet.groups.c.engineSettings.served_model_name: the chart sets it itself",
        ),
        (
            groups({"c": {"engines": 1, "labels": {"v": "2"}, "model": "other"}}),
            "fleet.groups.c.model: fronts refuse engines of another model unless a share goes by their label",
        ),
        (groups({"c": {"engines": 63, "labels": {"v": "2"}}}), "fleet.engines: up to 65 engines of the model"),
        (
            groups({"c": {"engines": 1, "modelName": "c"}}),
            "fleet.modelName: others serve another model, so say which these do",
        ),
        (FLEET | {"fleet": {"keySecret": "k", "split": "v=2:5"}}, "fleet.split: no engines have the label v=2"),
        (
            groups({"c": {"engines": 1, "labels": {"v": "2"}}}, labels={"v": "2"}, shadow="v=2:5"),
            "fleet.shadow: all engines of the model have the label v=2",
        ),
        (
            groups({"c": {"engines": 1, "labels": {"v": "2"}}}, split="v=2:5", shadow="v=2:5"),
            "fleet.split: has the label of fleet.shadow",
        ),
        (
            MODELS | {"autoscaling": {"kind": "hpa"}},
            "autoscaling.kind: scales the engines of one model, and the fleet has several",
        ),
        (MODELS | {"settings": {"tokenizer": "t"}}, "settings.tokenizer: is of one model, and the fleet has several"),
        (
            FLEET | {"autoscaling": {"kind": "hpa", "maxReplicas": 65}},
            "fleet.engines: up to 65 engines of the model, with autoscaling and groups",
        ),
        ({"replcas": 2}, "additional properties 'replcas' not allowed"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(changed: dict[str, Any], reason: str) -> None:
    text = yaml.safe_dump(values("keys") | changed)
    done = run("helm", "template", "release", CHART, "--values", "-", text=text, code=None)
    assert done.returncode != 0 and reason in done.stderr, done.stderr


def test_a_group_that_names_a_release_too_long_for_its_pods_is_refused() -> None:
    name = "a" * 36  # with "-millrace" and "-engine" 52 characters, the most that a StatefulSet may have
    command = ("template", name, CHART, "--values", "-")
    run("helm", *command, text=yaml.safe_dump(values("keys", "fleet")))
    done = run("helm", *command, text=yaml.safe_dump(values("keys", "canary")), code=None)
    assert (
        done.returncode != 0 and "-engine-canary has 59 characters, and that of a StatefulSet at most 52" in done.stderr
    )


@pytest.mark.parametrize(
    ("topology", "said", "unsaid"),
    [
        ("pods", ("port-forward service/release-millrace",), ("fleet.", "%")),
        ("fleet", ("port-forward service/release-millrace",), ("fleet.split", "set fleet.engines to 2")),
        (
            "canary",
            (
                "5 % of the requests go to the engines with the label version=v2.",
                "0.5 % of the requests are copied to the engines with the label version=v3,",
                "/admin/traffic",
                "--set fleet.groups.NAME=null",
            ),
            ("Clients name",),
        ),
        ("models", ("Clients name the model: small, large.",), ("copied",)),
    ],
)
def test_the_notes_of_a_release_say_how_its_shares_are_moved(
    topology: str, said: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    command = ("install", "release", CHART, "--namespace", "llm", "--dry-run=client", "--values", "-")
    notes = run("helm", *command, text=yaml.safe_dump(values("keys", topology))).stdout.partition("\nNOTES:\n")[2]
    assert [each for each in said if each not in notes] == [] and [each for each in unsaid if each in notes] == []


def test_the_end_of_a_canary_takes_its_objects_and_its_share_away() -> None:
    command = ("template", "release", CHART, "--values", "-")
    ended = ("--set", "fleet.groups.canary=null", "--set", "fleet.split=")
    left = documents(run("helm", *command, *ended, text=yaml.safe_dump(values("keys", "canary"))).stdout)
    assert not [one for one in left if one["metadata"]["name"].endswith("-canary")]
    (fronts,) = (one for one in left if one["kind"] == "Deployment")
    args = fronts["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--split" not in args and "--shadow" in args and len([one for one in args if one == "--engine"]) == 2


def test_one_engine_without_another_is_told_of_its_upgrades() -> None:
    command = ("install", "release", CHART, "--dry-run=client", "--set", "fleet.engines=1", "--values", "-")
    assert (
        "set fleet.engines to 2 or more" in run("helm", *command, text=yaml.safe_dump(values("keys", "fleet"))).stdout
    )
