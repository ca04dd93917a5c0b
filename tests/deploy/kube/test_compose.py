"""The compose file: its services fit each other, and the files and options that it names are there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.deploy.cli import main as cli
from millrace.deploy.cli.serve import STOP_S
from millrace.deploy.config import ServerConfig
from millrace.runtime.processes.auth import FleetKey
from tests.deploy.kube.tools import ROOT, needs, run

FOLDER = ROOT / "deploy" / "containers"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


ROUTES, ENGINES = ("route-1", "route-2"), ("engine-1", "engine-2", "engine-3")


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


@pytest.mark.parametrize("name", [*ROUTES, *ENGINES])
def test_fronts_and_engines_of_the_fleet_share_a_key_and_end_in_time(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, command = SERVICES[name], SERVICES[name]["command"]
    for variable, value in (("MILLRACE_HOST", "0.0.0.0"), ("MILLRACE_MODEL", ""), ("MILLRACE_LOG_FORMAT", "json")):
        monkeypatch.setenv(variable, value)  # as image and compose set them
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and "fleet:/fleet:ro" in service["volumes"]
    assert cli.main([*command, "--print-config"]) == 0, capsys.readouterr()
    words = [part for word in command for part in word.split("=")]
    assert f'"{words[words.index("--fleet-key-file") + 1]}"' in SERVICES["fleet-key"]["command"][0]
    waits, lame_duck_s = service["depends_on"], 0
    if name in ENGINES:
        assert waits == {"fleet-key": {"condition": "service_completed_successfully"}}
        assert words[words.index("--drain-by") + 1] == "migrate"
        pages = f"http://127.0.0.1:{words[words.index('--metrics-port') + 1]}"
        assert service["healthcheck"]["test"] == ["CMD", "millrace", "health", "--url", pages]
    else:
        port = SERVICES[ENGINES[0]]["command"][2].rpartition(":")[2]
        assert [each for each in words if each.endswith(f":{port}")] == [f"{one}:{port}" for one in ENGINES]
        assert set(waits) == set(ENGINES) and name in words
        lame_duck_s = int(words[words.index("--lame-duck-s") + 1])
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > lame_duck_s + ServerConfig().shutdown_timeout_s + STOP_S + 1


def test_prometheus_finds_the_fleet_by_the_names_that_it_allows() -> None:
    job = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"][1]
    named = {name: found["port"] for found in job["dns_sd_configs"] for name in found["names"]}
    assert named == dict.fromkeys(ROUTES, 8000) | dict.fromkeys(ENGINES, 9100)
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
def test_yamllint_has_no_complaint() -> None:
    rules = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, braces: disable}}"
    files = [
        *FOLDER.rglob("*.y*ml"),
        *(ROOT / "deploy/chart").glob("*.yaml"),
        *(ROOT / "tests/deploy/kube").glob("values/*"),
    ]
    run("yamllint", "--strict", "--config-data", rules, *files)
