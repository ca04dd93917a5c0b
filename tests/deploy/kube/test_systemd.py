"""The unit of systemd: systemd accepts it, and it fits what the server does."""

from __future__ import annotations

import re
import shutil
from configparser import RawConfigParser
from pathlib import Path

import pytest

from millrace.deploy.cli.main import STARTUP_ERROR_EXIT_CODE
from millrace.deploy.cli.serve import STOP_S
from millrace.deploy.config import ServerConfig
from tests.deploy.kube.tools import ROOT, needs, run

FOLDER = ROOT / "deploy" / "systemd"
MOST_EXPOSED = 3.0  # of 10, by systemd's own measure


def unit() -> RawConfigParser:
    parser = RawConfigParser(strict=False, interpolation=None)  # a key may come twice
    parser.read(FOLDER / "millrace.service")
    return parser


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit, with a program that this machine has."""
    text = (FOLDER / "millrace.service").read_text()
    (tmp_path / "millrace.service").write_text(text.replace("/opt/millrace/bin/millrace", "/bin/true"))
    return tmp_path / "millrace.service"


@pytest.mark.parametrize("has_gpu", [False, True])
@needs("systemd-analyze", "apt install systemd")
def test_systemd_accepts_the_unit_and_rates_it_as_little_exposed(installed: Path, has_gpu: bool) -> None:
    if has_gpu:
        shutil.copytree(FOLDER / "millrace.service.d", installed.with_name("millrace.service.d"))
    done = run("systemd-analyze", "verify", installed)
    assert [line for line in (done.stdout + done.stderr).splitlines() if "millrace" in line] == []
    rating = run("systemd-analyze", "security", "--offline=true", installed).stdout
    found = re.search(r"exposure level for millrace\.service: ([\d.]+)", rating)
    assert found is not None and float(found[1]) <= MOST_EXPOSED, rating


def test_the_unit_waits_for_the_drain_and_leaves_wrong_settings_alone() -> None:
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) > ServerConfig().shutdown_timeout_s + STOP_S + 1
    assert float(service["WatchdogSec"]) > 2 * ServerConfig().stall_timeout_s
    assert service["RestartPreventExitStatus"] == str(STARTUP_ERROR_EXIT_CODE)
    assert service["Type"] == "notify" and service["NotifyAccess"] == "main"
    assert service["ExecStart"].startswith("/opt/millrace/bin/millrace serve --config ")
