"""The compose file: its services fit each other, and the files and options that it names are there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.deploy.cli import main as cli
from millrace.deploy.cli.serve import STOP_S
from millrace.deploy.config import ServerConfig
from millrace.runtime.processes.auth import FleetKey
from millrace.stages.traffic.labels import parse_labels
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.deploy.kube.tools import ROOT, needs, run

FOLDER = ROOT / "deploy" / "containers"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


ROUTES, ENGINES = ("route-1", "route-2"), ("engine-1", "engine-2", "engine-3")
CANARY: dict[str, Any] = yaml.safe_load((FOLDER / "compose.canary.yaml").read_text())
NEW = ("engine-canary", "engine-shadow")


def merged(base: Any, over: Any) -> Any:
    """As compose merges a file over another: mappings by key, and commands and plain values whole."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merged(base[key], value) if key in base else value for key, value in over.items()}
    return over


def substituted(value: Any, environment: Mapping[str, str]) -> Any:
    """With the variables of an environment in place of ${NAME:-DEFAULT}."""
    if isinstance(value, dict):
        return {key: substituted(one, environment) for key, one in value.items()}
    if isinstance(value, list):
        return [substituted(one, environment) for one in value]
    while isinstance(value, str) and "${" in value:  # the innermost first
        value = re.sub(r"\$\{(\w+):-([^${}]*)\}", lambda found: environment.get(found[1]) or found[2], value)
    return value


def with_canary(environment: Mapping[str, str]) -> Mapping[str, Any]:
    """The services of both files."""
    services: dict[str, Any] = substituted(merged(COMPOSE, CANARY)["services"], environment)
    return services


def options(service: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options of a command with their values."""
    words = [part for word in service["command"] for part in word.split("=", 1)]
    return list(zip(words, words[1:], strict=False))


def test_each_service_is_of_a_fixed_version_and_open_to_this_machine_alone() -> None:
    started = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert started == {"millrace", "open-webui", "prometheus", "grafana"}
    fleet = {name for name, service in SERVICES.items() if service.get("profiles") == ["fleet"]}
    assert fleet == {*ROUTES, *ENGINES, "fleet-key"} and started | fleet == set(SERVICES)
    for name, service in SERVICES.items():
        assert re.fullmatch(r"[a-z0-9./-]+:(cpu|v?\d+\.\d+\.\d+)", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert ("ports" in service) == (name not in {*ENGINES, "fleet-key"})
    published = [port.split(":")[1] for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(set(published)) == len(published)
    head = (FOLDER / "compose.yaml").read_text().partition("name: ")[0]
    assert sorted(re.findall(r"http://127\.0\.0\.1:(\d+)", head)) == sorted(published)


def test_each_mount_is_a_file_of_the_repository_or_a_volume_of_the_file() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], mount


def test_the_fleets_key_is_made_once_and_readable_by_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = SERVICES["fleet-key"]["command"]
    monkeypatch.setattr(os, "chown", lambda *_: None)
    (tmp_path / "new").write_bytes(b"left")  # by a start that was cut short
    found = []
    for _ in range(2):
        exec(code.replace("/fleet/", f"{tmp_path}/"), {})
        found.append((tmp_path / "key").read_bytes())
    assert len(found[0]) == 32 and found[0] == found[1] and [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o400
    FleetKey.read(tmp_path / "key")


@pytest.mark.parametrize(
    ("services", "engines", "name"),
    [
        *((SERVICES, ENGINES, name) for name in (*ROUTES, *ENGINES)),
        *((with_canary({}), (*ENGINES, *NEW), name) for name in (*ROUTES, *NEW)),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_fronts_and_engines_of_the_fleet_share_a_key_and_end_in_time(
    services: Mapping[str, Any],
    engines: tuple[str, ...],
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, command = services[name], services[name]["command"]
    for variable, value in (("MILLRACE_HOST", "0.0.0.0"), ("MILLRACE_MODEL", ""), ("MILLRACE_LOG_FORMAT", "json")):
        monkeypatch.setenv(variable, value)  # as image and compose set them
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and "fleet:/fleet:ro" in service["volumes"]
    assert cli.main([*command, "--print-config"]) == 0, capsys.readouterr()
    words = [part for word in command for part in word.split("=")]
    assert f'"{words[words.index("--fleet-key-file") + 1]}"' in SERVICES["fleet-key"]["command"][0]
    waits, lame_duck_s = service["depends_on"], 0
    if name in engines:
        assert waits == {"fleet-key": {"condition": "service_completed_successfully"}}
        assert words[words.index("--drain-by") + 1] == "migrate"
        pages = f"http://127.0.0.1:{words[words.index('--metrics-port') + 1]}"
        assert service["healthcheck"]["test"] == ["CMD", "millrace", "health", "--url", pages]
    else:
        port = SERVICES[ENGINES[0]]["command"][2].rpartition(":")[2]
        assert [each for each in words if each.endswith(f":{port}")] == [f"{one}:{port}" for one in engines]
        assert set(waits) == set(engines) and name in words
        lame_duck_s = int(words[words.index("--lame-duck-s") + 1])
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > lame_duck_s + ServerConfig().shutdown_timeout_s + STOP_S + 1


@pytest.mark.parametrize(
    ("environment", "shares", "images"),
    [
        ({}, ("version=v2:5", "version=v3:1"), ("millrace:cpu", "millrace:cpu")),
        (
            {"MILLRACE_SPLIT": "version=v2:0", "MILLRACE_SHADOW": "version=v3:2.5", "MILLRACE_CANARY_IMAGE": "m:v2"},
            ("version=v2:0", "version=v3:2.5"),
            ("m:v2", "millrace:cpu"),
        ),
    ],
)
def test_the_canary_gets_a_share_and_the_shadow_copies_as_the_environment_says(
    environment: Mapping[str, str], shares: tuple[str, str], images: tuple[str, str]
) -> None:
    services = with_canary(environment)
    for name in ROUTES:
        given = options(services[name])
        assert tuple(dict(given)[flag] for flag in ("--split", "--shadow")) == shares
        assert [one for one in given if one[0] not in ("--split", "--shadow")][-6:] == options(SERVICES[name])[-6:]
        assert services[name]["ports"] == SERVICES[name]["ports"]
    rules = TrafficRules.parse(*shares)
    labels = {
        name: parse_labels("--label", [value for flag, value in options(services[name]) if flag == "--label"])
        for name in (*ENGINES, *NEW)
    }
    groups = {name: rules.group_of(labels[name]) for name in labels}
    assert groups == dict.fromkeys(ENGINES, "rest") | dict(zip(NEW, ("labelled", "shadow"), strict=True))
    assert tuple(services[name]["image"] for name in NEW) == images


def test_the_engines_of_the_canarys_file_are_as_the_others_but_are_not_built() -> None:
    services = with_canary({"MILLRACE_MODEL": "a", "MILLRACE_SHADOW_MODEL": "b"})
    assert [services[name]["environment"]["MILLRACE_MODEL"] for name in (*ENGINES, *NEW)] == ["a", "a", "a", "a", "b"]
    for name in NEW:
        own, other = dict(services[name]), dict(services["engine-1"])
        assert "build" not in own, "a build would take the place of the image of the new version"
        for key in ("build", "image", "command", "environment"):
            own.pop(key, None), other.pop(key, None)
        assert own == other
    assert set(CANARY["services"]) == {*ROUTES, *NEW}


def test_prometheus_finds_the_fleet_by_the_names_that_it_allows() -> None:
    job = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"][1]
    named = {name: found["port"] for found in job["dns_sd_configs"] for name in found["names"]}
    assert named == dict.fromkeys(ROUTES, 8000) | dict.fromkeys((*ENGINES, *NEW), 9100)
    rule = job["relabel_configs"][0]
    found = re.fullmatch(rule["regex"], "route-1;172.18.0.5:8000")
    assert found is not None and found.expand(rule["replacement"].replace("$", "\\")) == "route-1:8000"


def test_millrace_runs_read_only_with_options_that_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    millrace = SERVICES["millrace"]
    assert millrace["read_only"] and millrace["cap_drop"] == ["ALL"] and "/tmp" in millrace["tmpfs"]
    monkeypatch.setenv("MILLRACE_HOST", "0.0.0.0")  # as the image sets it
    monkeypatch.setenv("MILLRACE_MODEL", "")  # as compose sets what is not given
    assert cli.main([*millrace["command"], "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"allowed_host\W+millrace", shown) and re.search(r"host\W+0\.0\.0\.0", shown)
    grace_s = int(millrace["stop_grace_period"].removesuffix("s"))
    assert grace_s > 30 + 4  # shutdown_timeout_s, and what the process takes at most after it


def test_the_chat_page_and_prometheus_ask_millrace_and_grafana_asks_prometheus() -> None:
    assert SERVICES["open-webui"]["environment"]["OPENAI_API_BASE_URL"] == "http://millrace:8000/v1"
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["millrace:8000"]
    mounted = dict(mount.split(":")[1::-1] for mount in SERVICES["prometheus"]["volumes"])
    assert mounted["/etc/prometheus/alerts.yml"] == "../monitoring/alerts.yml"
    assert scraped["rule_files"] == ["alerts.yml"]  # beside the configuration
    (source,) = yaml.safe_load((FOLDER / "grafana" / "datasources.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]


def test_grafana_finds_the_projects_dashboard_as_its_first_page() -> None:
    grafana = SERVICES["grafana"]
    mounted = dict(mount.split(":")[1::-1] for mount in grafana["volumes"])
    (provider,) = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text())["providers"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert json.loads((FOLDER / mounted[home]).read_text())["title"] == "millrace"


@needs("yamllint")
def test_yamllint_has_no_complaint_and_would_notice_a_key_that_comes_twice(tmp_path: Path) -> None:
    rules = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, braces: disable}}"
    files = [
        *FOLDER.rglob("*.y*ml"),
        *(ROOT / "deploy/chart").glob("*.yaml"),
        *(ROOT / "tests/deploy/kube").glob("values/*"),
    ]
    assert {"compose.yaml", "compose.canary.yaml", "prometheus.yml", "values.yaml", "keda.yaml"} <= {
        file.name for file in files
    }
    run("yamllint", "--strict", "--config-data", rules, *files)
    (tmp_path / "wrong.yaml").write_text("a: 1\na: 2\n")
    done = run("yamllint", "--strict", "--config-data", rules, tmp_path / "wrong.yaml", code=None)
    assert done.returncode == 1 and "duplication of key" in done.stdout
