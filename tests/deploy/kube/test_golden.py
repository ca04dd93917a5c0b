"""What the rendered chart promises, read from golden/; `test_chart.py` holds these files to what helm renders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from millrace.deploy.cli import main as cli
from millrace.deploy.cli.serve import STOP_S
from tests.deploy.kube.chart import CHANGED, CHART, GOLDEN, NAMES, SHOWN, TOPOLOGIES, documents, values
from tests.deploy.kube.tools import ROOT

CRDS = ROOT.parent / "shared" / "crds"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
ROUTES = re.findall(r'web\.get\("([^"]+)"', (ROOT / "deploy/server/routes.py").read_text())
METRICS = "\n".join(path.read_text() for path in (ROOT / "deploy" / "metrics").glob("*.py"))


def objects(topology: str, of_engines: bool = False) -> dict[str, dict[str, Any]]:
    """The objects of a golden file, by kind; in a fleet those of its fronts, or of its engines."""
    found = documents((GOLDEN / f"{topology}.yaml").read_text())
    found = [one for one in found if one["metadata"]["name"].endswith("-engine") == of_engines]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def pods(topology: str) -> Iterator[dict[str, Any]]:
    found = objects(topology)
    if topology != "multinode":
        yield found["Deployment"]["spec"]["template"]
        if topology == "fleet":
            yield objects(topology, of_engines=True)["StatefulSet"]["spec"]["template"]
        return
    group = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    yield from (group["leaderTemplate"], group["workerTemplate"])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_pod_is_root_writes_to_its_image_or_may_ask_the_api_server(topology: str) -> None:
    for pod in pods(topology):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_probes_ask_routes_of_the_server_and_a_stop_leaves_time_to_drain(topology: str) -> None:
    spec = next(pods(topology))["spec"]
    (container,) = spec["containers"]
    asked = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in asked.items()}
    assert paths == {"startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}
    assert set(paths.values()) <= set(ROUTES)
    given = yaml.safe_load((CHART / "values.yaml").read_text()) | values(SHOWN[topology])
    assert asked["startup"]["periodSeconds"] * asked["startup"]["failureThreshold"] >= given["startSeconds"]
    settings = yaml.safe_load(objects(topology)["ConfigMap"]["data"]["millrace.yaml"])
    needed_s = container["lifecycle"]["preStop"]["sleep"]["seconds"] + settings["shutdown_timeout_s"] + STOP_S + 1
    assert spec["terminationGracePeriodSeconds"] > needed_s


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_selectors_find_the_pods_and_no_object_is_of_another_release(topology: str) -> None:
    found = objects(topology)
    labels = next(pods(topology))["metadata"]["labels"].items()
    index = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}.items() if topology == "multinode" else {}.items()
    assert found["Service"]["spec"]["selector"].items() <= labels | index
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert found[kind]["spec"][field]["matchLabels"].items() <= labels
    assert all(one["metadata"]["name"] == "release-millrace" for one in found.values())
    if topology == "pods":
        monitor = found["ServiceMonitor"]["spec"]
        assert monitor["selector"]["matchLabels"].items() <= found["Service"]["metadata"]["labels"].items()
        assert monitor["endpoints"][0]["port"] in [port["name"] for port in found["Service"]["spec"]["ports"]]
        assert monitor["endpoints"][0]["path"] in ROUTES
        assert found["Service"]["metadata"]["labels"][monitor["jobLabel"]] == "millrace"  # which the alerts ask for


def test_only_clients_and_a_groups_own_pods_may_connect() -> None:
    for topology, num_rules in (("pods", 1), ("fleet", 1), ("multinode", 2)):
        policy = objects(topology)["NetworkPolicy"]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"] and len(policy["ingress"]) == num_rules
        assert all(rule["from"] for rule in policy["ingress"])  # an empty list would let all in
        assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "http"}]
        assert (
            len(objects(topology)["NetworkPolicy"]["spec"]["egress"])
            == {"pods": 1, "fleet": 2, "multinode": 3}[topology]
        )


def test_engines_of_a_fleet_take_fronts_alone_and_are_found_by_the_name_of_their_service(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fronts, engines = objects("fleet"), objects("fleet", of_engines=True)
    policy, labels = engines["NetworkPolicy"]["spec"], engines["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "fleet"}]
    front_labels = fronts["Deployment"]["spec"]["template"]["metadata"]["labels"]
    (peer,) = policy["ingress"][0]["from"]
    allowed = peer["podSelector"]["matchLabels"].items()
    assert allowed <= front_labels.items() and not allowed <= labels.items()
    (out,) = fronts["NetworkPolicy"]["spec"]["egress"][-1]["to"]
    assert out["podSelector"]["matchLabels"].items() <= labels.items()
    for found, own, other in ((fronts, front_labels, labels), (engines, labels, front_labels)):
        workload = found.get("Deployment") or found["StatefulSet"]
        for selector in (
            *(found["Service"]["spec"]["selector"], found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]),
            *(
                found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
                workload["spec"]["selector"]["matchLabels"],
            ),
        ):
            assert selector.items() <= own.items() and not selector.items() <= other.items()
    service = engines["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert engines["StatefulSet"]["spec"]["serviceName"] == service["metadata"]["name"]
    (front,), (engine,) = (pod["spec"]["containers"] for pod in pods("fleet"))
    address = f"dns:{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert front["args"][0] == "route" and address in front["args"]
    assert engine["args"][0] == "engine" and "0.0.0.0:7000" in engine["args"]
    assert [port["containerPort"] for port in engine["ports"]] == [7000, 9100]
    key = tmp_path / "key"
    key.write_text("a key of 32 characters or longer")
    key.chmod(0o600)
    for container, name in ((front, "millrace.yaml"), (engine, "engine.yaml")):
        settings = fronts["ConfigMap"]["data"][name].replace("/etc/millrace/keys/api-keys", str(key))
        (tmp_path / name).write_text(settings)
        arguments = [each.replace("/etc/millrace/settings", str(tmp_path)) for each in container["args"]]
        arguments = [re.sub("/etc/millrace/fleet/.*", str(key), each) for each in arguments]
        assert cli.main([*arguments, "--print-config"]) == 0, capsys.readouterr()
    assert "keys" not in {volume["name"] for volume in list(pods("fleet"))[1]["spec"]["volumes"]}


def test_fronts_and_engines_read_certificates_where_a_renewed_secret_shows() -> None:
    for pod in pods("fleet"):
        (container,) = pod["spec"]["containers"]
        (mount,) = (one for one in container["volumeMounts"] if one["name"] == "fleet-tls")
        assert "subPath" not in mount, "such a mount keeps the first content"
        (secret,) = (one["secret"] for one in pod["spec"]["volumes"] if one["name"] == "fleet-tls")
        there = {f"{mount['mountPath']}/{item['path']}" for item in secret["items"]}
        args = container["args"]
        assert there == {args[args.index(f"--fleet-tls-{file}") + 1] for file in ("cert", "key", "ca")}


def test_a_fleet_scales_its_engines_by_what_waits_at_its_fronts() -> None:
    fronts, engines = objects("fleet"), objects("fleet", of_engines=True)
    target = fronts["ScaledObject"]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": engines["StatefulSet"]["metadata"]["name"],
    }
    assert "replicas" not in engines["StatefulSet"]["spec"] and "replicas" in fronts["Deployment"]["spec"]
    waiting, running = (trigger["metadata"]["query"] for trigger in fronts["ScaledObject"]["spec"]["triggers"])
    assert f'service="{fronts["Service"]["metadata"]["name"]}"' in waiting  # of its own requests, so they add up
    assert f'service="{engines["Service"]["metadata"]["name"]}"' in running  # each front tells those of all engines
    assert '"vllm:num_requests_running"' in (ROOT / "deploy" / "cli" / "machines" / "engine_pages.py").read_text()


def test_scaling_asks_for_metrics_of_the_server_and_owns_the_number_of_replicas() -> None:
    found = objects("pods")
    scaling = found["ScaledObject"]["spec"]
    assert "replicas" not in found["Deployment"]["spec"] and "HorizontalPodAutoscaler" not in found
    assert scaling["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    queries = [trigger["metadata"]["query"] for trigger in scaling["triggers"]]
    assert [query.partition("{")[0] for query in queries] == [
        "sum(millrace:work_seconds_waiting",
        "sum(vllm:num_requests_running",
    ]
    assert all(f'"{query[4:].partition("{")[0]}"' in METRICS for query in queries)
    hpa = (CHART / "templates" / "autoscaling.yaml").read_text()
    names = re.findall(r"^ +name: ([a-z_]+)$", hpa, re.MULTILINE)  # as prometheus-adapter writes them
    assert len(names) == 2
    for name in names:
        assert f'"{name.replace("_", ":", 1)}"' in METRICS


def test_the_alert_rules_are_those_of_the_project() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "monitoring" / "alerts.yml").read_text())
    assert objects("pods")["PrometheusRule"]["spec"] == rules
    for name in ("alerts.yml", "grafana-dashboard.json"):
        link = CHART / "files" / name
        assert link.is_symlink() and link.resolve() == ROOT / "deploy" / "monitoring" / name


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_server_accepts_the_settings_that_the_chart_writes(
    topology: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("a-key\n")
    text = objects(topology)["ConfigMap"]["data"]["millrace.yaml"]
    settings = yaml.safe_load(text) | {"api_key_file": str(tmp_path / "keys")}
    (tmp_path / "millrace.yaml").write_text(yaml.safe_dump(settings))
    args = next(pods(topology))["spec"]["containers"][0]["args"]
    command = "route" if topology == "fleet" else "serve"
    assert args[:3] == [command, "--config", "/etc/millrace/settings/millrace.yaml"]
    assert cli.main(["serve", "--config", str(tmp_path / "millrace.yaml"), "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "0.0.0.0" in shown and "/models" in shown


@pytest.mark.skipif(not CRDS.exists(), reason="../shared/crds is not there: the definition of LeaderWorkerSet")
def test_a_group_is_valid_by_the_published_definition_of_leaderworkerset() -> None:
    (definition,) = documents((CRDS / "leaderworkerset.yaml").read_text())
    (schema,) = (one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"] if one["name"] == "v1")
    strict = jsonschema.Draft7Validator(closed(schema))
    group = objects("multinode")["LeaderWorkerSet"]
    strict.validate(group)
    group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["hostNetwrk"] = True
    with pytest.raises(jsonschema.ValidationError, match="hostNetwrk"):
        strict.validate(group)


def closed(schema: Any) -> Any:
    """A schema that refuses fields it does not name, as the API server does with strict validation."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return found


# -- the schema of the values


def refused(given: dict[str, Any]) -> str:
    """The first complaint of the schema about the default values with these on top; "" if there is none."""
    merged = merge(yaml.safe_load((CHART / "values.yaml").read_text()), given)
    errors = jsonschema.Draft7Validator(SCHEMA).iter_errors(merged)
    return next((f"{error.json_path}: {error.message}" for error in errors), "")


def merge(base: Any, over: Any) -> Any:
    """As helm merges values: mappings by key, everything else whole."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merge(base.get(key), value) for key, value in over.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_schema_accepts_each_value_file_in_each_topology(name: str) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert [refused(values(name, topology)) for topology in CHANGED] == [""] * len(CHANGED)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"replcas": 2}, "$: Additional"),
        ({"topology": "fleets"}, "$.topology"),
        ({"fleet": {"drainBy": "force"}}, "$.fleet.drainBy"),
        ({"fleet": {"engines": 65}}, "$.fleet.engines"),
        ({"fleet": {"split": "version=v2"}}, "$.fleet.split"),
        ({"fleet": {"split": "version=v2:101"}}, "$.fleet.split"),
        ({"fleet": {"shadow": "Version=v2:1"}}, "$.fleet.shadow"),
        ({"fleet": {"labels": {"version": 2}}}, "$.fleet.labels.version"),
        ({"fleet": {"labels": {"app/version": "v2"}}}, "$.fleet.labels"),
        ({"fleet": {"modelName": "-m"}}, "$.fleet.modelName"),
        ({"fleet": {"minReadySeconds": -1}}, "$.fleet.minReadySeconds"),
        ({"fleet": {"groups": {"Canary": {"engines": 1}}}}, "$.fleet.groups"),
        ({"fleet": {"groups": {"canary": {}}}}, "$.fleet.groups.canary"),
        ({"fleet": {"groups": {"canary": {"engines": 1, "replicas": 1}}}}, "$.fleet.groups.canary"),
        ({"fleet": {"groups": {"canary": {"engines": 1, "image": "cpu-v2"}}}}, "$.fleet.groups.canary.image"),
        ({"fleet": {"groups": {"canary": {"engines": 1, "image": {"tga": "v2"}}}}}, "$.fleet.groups.canary.image"),
        ({"fleet": {"groups": {"canary": {"engines": 1, "modelName": ""}}}}, "$.fleet.groups.canary.modelName"),
        ({"fleet": {"groups": {"canary": {"engines": 1, "labels": {"v": "a b"}}}}}, "$.fleet.groups.canary.labels.v"),
        ({"adminKeys": {"secret": "Not A Name"}}, "$.adminKeys.secret"),
        ({"lameDuckSeconds": "5"}, "$.lameDuckSeconds"),
        ({"fleet": {"tls": {"secret": "Not A Name"}}}, "$.fleet.tls.secret"),
        ({"fleet": {"tls": {"crt": "tls.crt"}}}, "$.fleet.tls"),
        ({"topology": "multinode"}, "$.multinode.workerArgs"),
        ({"replicas": -1}, "$.replicas"),
        ({"replicas": "2"}, "$.replicas"),
        ({"image": {"digest": "latest"}}, "$.image.digest"),
        ({"image": {"tag": ""}}, "$.image.tag"),
        ({"gpus": 0.5}, "$.gpus"),
        ({"resources": {"limits": {"memory": "4 GB"}}}, "$.resources.limits.memory"),
        ({"apiKeys": {"secret": "Not A Name"}}, "$.apiKeys.secret"),
        ({"apiKeys": "secret"}, "$.apiKeys"),
        ({"preStopSeconds": 0}, "$.preStopSeconds"),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, "$.podDisruptionBudget.maxUnavailable"),
        ({"networkPolicy": {"clients": []}}, "$.networkPolicy.clients"),
        ({"networkPolicy": {"clients": [{"podSelecter": {}}]}}, "$.networkPolicy.clients[0]"),
        ({"autoscaling": {"kind": "both"}}, "$.autoscaling.kind"),
        ({"autoscaling": {"targetWorkSeconds": 0}}, "$.autoscaling.targetWorkSeconds"),
        ({"autoscaling": {"prometheusAddress": "prometheus:9090"}}, "$.autoscaling.prometheusAddress"),
        ({"settings": {"max-num-seqs": 4}}, "$.settings"),
        ({"multinode": {"groupSize": 1}}, "$.multinode.groupSize"),
    ],
)
def test_the_schema_refuses_wrong_values_and_says_which(given: dict[str, Any], where: str) -> None:
    assert refused(given).startswith(where), refused(given)


def test_the_schema_names_exactly_the_values_that_there_are() -> None:
    def names(defaults: Any, schema: Any) -> Iterator[str]:
        if "properties" not in schema or not isinstance(defaults, dict):
            return
        assert schema["additionalProperties"] is False
        assert set(defaults) == set(schema["properties"]) - {"global"}, set(defaults) ^ set(schema["properties"])
        for key, value in defaults.items():
            yield key
            yield from names(value, schema["properties"][key])

    assert len(list(names(yaml.safe_load((CHART / "values.yaml").read_text()), SCHEMA))) > 50
