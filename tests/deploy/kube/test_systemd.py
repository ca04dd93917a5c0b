"""The units of systemd: systemd accepts them, and they fit what the commands do."""

from __future__ import annotations

import re
import shutil
from configparser import RawConfigParser
from pathlib import Path

import pytest

from millrace.deploy.cli import main as cli
from millrace.deploy.cli.main import STARTUP_ERROR_EXIT_CODE
from millrace.deploy.cli.serve import STOP_S
from millrace.deploy.config import ServerConfig
from millrace.stages.traffic.labels import parse_labels
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.deploy.kube.tools import ROOT, needs, run

FOLDER = ROOT / "deploy" / "systemd"
MOST_EXPOSED = 3.0  # of 10, by systemd's own measure


UNITS = {  # file -> an installed name
    "millrace.service": "millrace.service",
    "millrace-engine@.service": "millrace-engine@7000.service",
    "millrace-route.service": "millrace-route.service",
}


def unit(name: str = "millrace.service") -> RawConfigParser:
    parser = RawConfigParser(strict=False, interpolation=None)  # a key may come twice
    parser.read(FOLDER / name)
    return parser


def installed(folder: Path, name: str) -> Path:
    """A unit, with a program that this machine has."""
    text = (FOLDER / name).read_text()
    (folder / name).write_text(text.replace("/opt/millrace/bin/millrace", "/bin/true"))
    return folder / name


def test_each_unit_is_tested() -> None:
    assert {path.name for path in FOLDER.glob("*.service")} == set(UNITS)


FLEET = ("millrace-engine@.service", "millrace-route.service")
CANARY = {  # unit -> the variable in its command, and the drop-in that sets it
    "millrace-engine@.service": ("LABELS", "engine-canary.conf"),
    "millrace-route.service": ("TRAFFIC", "route-split.conf"),
}


@pytest.mark.parametrize(
    ("name", "drop_in"),
    [
        *((name, None) for name in UNITS),
        ("millrace.service", "gpu.conf"),
        *((name, "fleet-tls.conf") for name in FLEET),
        ("millrace-engine@.service", "engine-canary.conf"),
        ("millrace-route.service", "route-split.conf"),
    ],
)
@needs("systemd-analyze", "apt install systemd")
def test_systemd_accepts_a_unit_and_rates_it_as_little_exposed(tmp_path: Path, name: str, drop_in: str | None) -> None:
    path = installed(tmp_path, name)
    if drop_in is not None:
        (source,) = FOLDER.rglob(drop_in)
        (tmp_path / f"{name}.d").mkdir()
        shutil.copy(source, tmp_path / f"{name}.d")
    done = run("systemd-analyze", "verify", path.with_name(UNITS[name]))
    assert [line for line in (done.stdout + done.stderr).splitlines() if "millrace" in line] == []
    rating = run("systemd-analyze", "security", "--offline=true", path).stdout
    found = re.search(r"exposure level for \S+\.service: ([\d.]+)", rating)
    assert found is not None and float(found[1]) <= MOST_EXPOSED, rating


def test_the_unit_waits_for_the_drain_and_leaves_wrong_settings_alone() -> None:
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) > ServerConfig().shutdown_timeout_s + STOP_S + 1
    assert float(service["WatchdogSec"]) > 2 * ServerConfig().stall_timeout_s
    assert service["RestartPreventExitStatus"] == str(STARTUP_ERROR_EXIT_CODE)
    assert service["Type"] == "notify" and service["NotifyAccess"] == "main"
    assert service["ExecStart"].startswith("/opt/millrace/bin/millrace serve --config ")


def test_the_label_of_the_canary_is_the_one_that_the_front_sends_a_share_to() -> None:
    engine, front = ((FOLDER / drop_in).read_text() for _, drop_in in CANARY.values())
    label, split = re.search(r'--label (\S+)"', engine), re.search(r'--split (\S+)"', front)
    assert label is not None and split is not None
    rules = TrafficRules.parse(split[1], None)
    assert rules.group_of(parse_labels("--label", [label[1]])) == "labelled"


@pytest.mark.parametrize("has_drop_ins", [False, True])
@pytest.mark.parametrize("name", FLEET)
def test_a_unit_of_a_fleet_starts_a_command_that_takes_its_options(
    name: str, has_drop_ins: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service, one, text = unit(name)["Service"], unit()["Service"], (FOLDER / name).read_text()
    assert "Environment=FLEET_TLS=\n" in text
    (tls,) = re.findall(r'^Environment="FLEET_TLS=(.*)"$', (FOLDER / "fleet-tls.conf").read_text(), re.MULTILINE)
    loaded = re.findall(
        r"^LoadCredential=([^:]+):/etc/millrace/", (FOLDER / "fleet-tls.conf").read_text(), re.MULTILINE
    )
    assert [f"%d/{each}" for each in loaded] == tls.split()[1::2]
    alike = set(one) - {"execstart", "watchdogsec", "environment", "statedirectory", "cachedirectory", "loadcredential"}
    assert {key: service[key] for key in alike} == {key: one[key] for key in alike}
    assert ("watchdogsec" in service) == (name == "millrace-route.service"), "an engine sends no signs of life"
    command = service["ExecStart"].replace("$FLEET_TLS", tls if has_drop_ins else "")
    variable, drop_in = CANARY[name]
    assert f"Environment={variable}=\n" in text
    (more,) = re.findall(rf'^Environment="{variable}=(.*)"$', (FOLDER / drop_in).read_text(), re.MULTILINE)
    assert command.count(f"${variable}") == 1
    command = command.replace(f"${variable}", more if has_drop_ins else "")
    program, *arguments = command.replace("%i", "7000").replace("%d", str(tmp_path)).split()
    assert program == "/opt/millrace/bin/millrace"
    credential, _, source = service["LoadCredential"].partition(":")
    assert source == "/etc/millrace/fleet.key"
    (tmp_path / credential).write_bytes(bytes(range(32)))
    (tmp_path / credential).chmod(0o600)
    for file, text in (
        ("engine.yaml", "max_num_seqs: 64"),
        ("route.yaml", "port: 8000"),
        ("engines", "127.0.0.1:7000"),
    ):
        (tmp_path / file).write_text(text)
    arguments = [each.replace("/etc/millrace", str(tmp_path)) for each in arguments]
    assert cli.main([*arguments, "--print-config"]) == 0, capsys.readouterr()
