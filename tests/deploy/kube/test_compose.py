"""The compose file: its services fit each other, and the files and options that it names are there."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from millrace.deploy.cli import main as cli
from tests.deploy.kube.tools import ROOT, needs, run

FOLDER = ROOT / "deploy" / "containers"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def test_each_service_is_of_a_fixed_version_and_open_to_this_machine_alone() -> None:
    assert set(SERVICES) == {"millrace", "open-webui", "prometheus", "grafana"}
    for name, service in SERVICES.items():
        assert re.fullmatch(r"[a-z0-9./-]+:(cpu|v?\d+\.\d+\.\d+)", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
    published = [port.split(":")[1] for service in SERVICES.values() for port in service["ports"]]
    assert len(set(published)) == len(published)
    head = (FOLDER / "compose.yaml").read_text().partition("name: ")[0]
    assert sorted(re.findall(r"http://127\.0\.0\.1:(\d+)", head)) == sorted(published)


def test_each_mount_is_a_file_of_the_repository_or_a_volume_of_the_file() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], mount


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
