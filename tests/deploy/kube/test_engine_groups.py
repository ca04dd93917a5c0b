"""Groups of engines in a fleet of the chart, read from golden/: versions side by side, and several models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.deploy.cli import main as cli
from millrace.deploy.cli.machines.addresses import engines_by_model
from millrace.stages.traffic.labels import parse_labels
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.deploy.kube.chart import GOLDEN, documents

FLEETS = {
    "canary": ["engine", "engine-canary", "engine-shadow"],
    "models": ["engine", "engine-large", "engine-large-canary"],
}


class Fleet:
    """The objects of a golden file with several groups of engines."""

    def __init__(self, name: str) -> None:
        self.all = documents((GOLDEN / f"{name}.yaml").read_text())
        (self.fronts,) = self.of("Deployment")
        self.groups = {one["metadata"]["name"].removeprefix("release-millrace-"): one for one in self.of("StatefulSet")}
        self.settings: Mapping[str, str] = self.named("ConfigMap", "release-millrace")["data"]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.all if one["kind"] == kind]

    def named(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = (one for one in self.of(kind) if one["metadata"]["name"] == name)
        return found

    def labels(self, group: str) -> Mapping[str, str]:
        found: dict[str, str] = self.groups[group]["spec"]["template"]["metadata"]["labels"]
        return found

    def selected(self, selector: Mapping[str, Any]) -> list[str]:
        """The groups whose pods a selector selects; `route` for the fronts."""
        pods = {"route": self.fronts["spec"]["template"]["metadata"]["labels"]}
        pods |= {group: dict(self.labels(group)) for group in self.groups}
        return sorted(name for name, labels in pods.items() if _selects(selector, labels))


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    for one in selector.get("matchExpressions", ()):
        assert one["operator"] == "In"
        if labels.get(one["key"]) not in one["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def container(workload: Mapping[str, Any]) -> Mapping[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def options(workload: Mapping[str, Any], flag: str) -> list[str]:
    """All values of an option of a container."""
    words = container(workload)["args"]
    return [value for option, value in zip(words, words[1:], strict=False) if option == flag]


@pytest.fixture(params=FLEETS)
def fleet(request: pytest.FixtureRequest) -> Fleet:
    return Fleet(request.param)


@pytest.fixture
def canary() -> Fleet:
    return Fleet("canary")


@pytest.fixture
def models() -> Fleet:
    return Fleet("models")


def test_fronts_find_each_group_by_a_name_that_leads_to_its_pods_alone(fleet: Fleet) -> None:
    assert list(fleet.groups) in FLEETS.values()
    names = [one.rpartition("dns:")[2] for one in options(fleet.fronts, "--engine")]
    assert names == [f"release-millrace-{group}:7000" for group in fleet.groups]
    for group, workload in fleet.groups.items():
        service = fleet.named("Service", f"release-millrace-{group}")
        assert service["spec"]["clusterIP"] == "None" and workload["spec"]["serviceName"] == f"release-millrace-{group}"
        assert fleet.selected({"matchLabels": service["spec"]["selector"]}) == [group]


def test_a_group_has_selectors_of_its_own_and_all_have_the_same_rules_of_the_network(fleet: Fleet) -> None:
    groups = sorted(fleet.groups)
    for group, workload in fleet.groups.items():
        assert fleet.selected(workload["spec"]["selector"]) == [group]
        budget = fleet.named("PodDisruptionBudget", f"release-millrace-{group}")["spec"]
        assert fleet.selected(budget["selector"]) == [group], "the API refuses to evict a pod with two budgets"
        (spread,) = workload["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert fleet.selected(spread["labelSelector"]) == [group]
    policy = fleet.named("NetworkPolicy", "release-millrace-engine")["spec"]
    assert fleet.selected(policy["podSelector"]) == groups
    (peer,) = policy["ingress"][0]["from"]
    assert fleet.selected(peer["podSelector"]) == ["route"]
    (out,) = fleet.named("NetworkPolicy", "release-millrace")["spec"]["egress"][-1]["to"]
    assert fleet.selected(out["podSelector"]) == groups
    assert len(fleet.of("NetworkPolicy")) == 2
    for monitor in fleet.of("ServiceMonitor"):
        services = [
            one for one in fleet.of("Service") if _selects(monitor["spec"]["selector"], one["metadata"]["labels"])
        ]
        port = monitor["spec"]["endpoints"][0]["port"]
        with_port = [one for one in services if port in {each["name"] for each in one["spec"]["ports"]}]
        assert len(with_port) == (len(groups) if monitor["metadata"]["name"].endswith("-engine") else 1)


def test_shares_and_labels_part_the_engines_into_clients_canary_and_shadow(canary: Fleet) -> None:
    (split,), (shadow,) = options(canary.fronts, "--split"), options(canary.fronts, "--shadow")
    rules = TrafficRules.parse(split, shadow)
    assert rules.split is not None and rules.split.percent == 5
    assert rules.shadow is not None and rules.shadow.percent == 0.5
    labels = {group: parse_labels("--label", options(one, "--label")) for group, one in canary.groups.items()}
    assert {group: rules.group_of(labels[group]) for group in labels} == {
        "engine": "rest",
        "engine-canary": "labelled",
        "engine-shadow": "shadow",
    }
    assert labels["engine-shadow"] == {"version": "v3", "zone": "a"}


def test_a_group_differs_from_the_first_in_what_its_values_say_and_in_nothing_else(canary: Fleet) -> None:
    first, new, shadow = (container(one) for one in canary.groups.values())
    assert "@sha256:" in first["image"] and new["image"] == first["image"].partition("@")[0] + ":cpu-v2"
    own = ("image", "args")
    assert {key: new[key] for key in new if key not in own} == {key: first[key] for key in first if key not in own}
    assert shadow["image"] == first["image"] and shadow["resources"]["limits"] == {"memory": "2Gi"}
    specs = [one["spec"]["template"]["spec"] for one in canary.groups.values()]
    parted = [
        {key: spec[key] for key in spec if key not in ("containers", "topologySpreadConstraints")} for spec in specs
    ]
    assert parted[0] == parted[1] == parted[2]
    settings = [yaml.safe_load(canary.settings[f"{group}.yaml"]) for group in canary.groups]
    assert settings[0] == settings[1] and settings[0]["max_num_seqs"] == 64 and "threads" not in settings[0]
    assert settings[2] == settings[0] | {"model": "/models/tuned", "threads": 2}
    assert [one["spec"].get("replicas") for one in canary.groups.values()] == [None, 1, 1], "the first is scaled"
    (scaled,) = canary.of("ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] == "release-millrace-engine"


def test_a_change_of_a_canary_restarts_its_own_pods_alone(canary: Fleet) -> None:
    sums = [one["spec"]["template"]["metadata"]["annotations"]["checksum/settings"] for one in canary.groups.values()]
    assert sums[0] == sums[1] != sums[2]  # by what each reads, and the canary reads the same as the first


def test_fronts_of_several_models_have_a_name_for_each_and_no_model_of_their_own(models: Fleet) -> None:
    by_model = engines_by_model(options(models.fronts, "--engine"))
    assert {name: len(found) for name, found in by_model.items()} == {"small": 1, "large": 2}
    assert not {"model", "served_model_name", "tokenizer"} & set(yaml.safe_load(models.settings["millrace.yaml"]))
    for group, workload in models.groups.items():
        named = next(name for name, found in by_model.items() if f"dns:release-millrace-{group}:7000" in found)
        assert yaml.safe_load(models.settings[f"{group}.yaml"])["served_model_name"] == [named]
        gpus = container(workload)["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus == (2 if named == "small" else 4)
    assert yaml.safe_load(models.settings["engine-large-canary.yaml"])["revision"] == "v2"
    tolerations = [one["spec"]["template"]["spec"].get("tolerations") for one in models.groups.values()]
    assert tolerations[0] == tolerations[2] is not None and tolerations[1] is None, (
        "left out is as the first, [] is none"
    )


def test_fronts_and_all_groups_start_commands_that_take_their_options(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in fleet.settings.items():
        (tmp_path / name).write_text(re.sub(r"(?<=: )/etc/millrace/(admin-)?keys", str(tmp_path), text))
    for name in ("api-keys", "admin-keys", "fleet-key"):
        (tmp_path / name).write_text(f"{name} of 32 characters or more than that")
        (tmp_path / name).chmod(0o600)
    for workload in (fleet.fronts, *fleet.groups.values()):
        arguments = [
            each.replace("/etc/millrace/settings", str(tmp_path)).replace("/etc/millrace/fleet/", f"{tmp_path}/")
            for each in container(workload)["args"]
        ]
        assert cli.main([*arguments, "--print-config"]) == 0, capsys.readouterr()


def test_keys_of_operators_are_a_secret_that_fronts_alone_mount(canary: Fleet) -> None:
    assert yaml.safe_load(canary.settings["millrace.yaml"])["admin_key_file"] == "/etc/millrace/admin-keys/admin-keys"
    spec = canary.fronts["spec"]["template"]["spec"]
    (secret,) = (one["secret"] for one in spec["volumes"] if one["name"] == "admin-keys")
    assert secret["secretName"] == "millrace-admin" and secret["items"] == [{"key": "admin-keys", "path": "admin-keys"}]
    for workload in canary.groups.values():
        assert "admin-keys" not in {one["name"] for one in workload["spec"]["template"]["spec"]["volumes"]}


def test_fronts_read_models_in_folders_from_the_claim_and_write_nothing_to_it(canary: Fleet) -> None:
    assert yaml.safe_load(canary.settings["millrace.yaml"])["model"].startswith("/models/")
    (volume,) = (one for one in canary.fronts["spec"]["template"]["spec"]["volumes"] if one["name"] == "models")
    assert volume["persistentVolumeClaim"]["claimName"] == "models"
    (mount,) = (one for one in container(canary.fronts)["volumeMounts"] if one["name"] == "models")
    assert mount["readOnly"] is True
