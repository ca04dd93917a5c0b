"""The alert rules under drawn figures, and the configuration of compose's Prometheus, by promtool."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from tests.deploy.kube.tools import ROOT, needs, run

TESTS = Path(__file__).parent / "alerts.test.yml"
MONITORING = ROOT / "deploy" / "monitoring"


def alerts() -> list[str]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent() -> None:
    well, ill = yaml.safe_load(TESTS.read_text())["tests"]
    assert [case["alertname"] for case in well["alert_rule_test"]] == alerts()
    fired = [sample["labels"] for sample in ill["promql_expr_test"][0]["exp_samples"]]
    assert fired == [f'{{alertname="{name}"}}' for name in alerts()]


@needs("promtool")
def test_alerts_fire_on_their_causes_and_are_silent_on_a_server_that_is_well(tmp_path: Path) -> None:
    run("promtool", "test", "rules", TESTS)
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    broken = TESTS.read_text().replace("../../../deploy/monitoring/", "").replace("9x60", "9+1x60", 1)
    (tmp_path / "alerts.test.yml").write_text(broken)  # the queue grows on the server that is well
    failed = run("promtool", "test", "rules", tmp_path / "alerts.test.yml", code=None)
    assert failed.returncode != 0 and "MillraceQueueGrows" in failed.stdout + failed.stderr


@needs("promtool")
def test_promtool_accepts_the_configuration_of_compose(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    shutil.copy(ROOT / "deploy" / "containers" / "prometheus.yml", tmp_path)
    assert f"{len(alerts())} rules found" in run("promtool", "check", "config", tmp_path / "prometheus.yml").stdout
