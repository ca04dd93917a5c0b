"""The commands of the page "From one machine to many", each as far as this machine goes.

Servers are started with MILLRACE_FULL=1; otherwise their settings are read. Commands of helm are rendered, also those
of the chart's card, and `kubectl create` is printed; of the others the names, options and bodies are looked at, as
docker needs a daemon and kubectl a cluster.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.deploy.admin.traffic import TrafficBody
from millrace.deploy.cli import main as cli
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.counts import FULL
from tests.deploy.kube.chart import documents
from tests.deploy.kube.tools import ROOT, needs, run
from tests.deploy.running import RunningServer

PAGE = ROOT / "deploy" / "docs" / "deployment.md"
CARD = ROOT / "deploy" / "chart" / "README.md"


def commands(page: Path) -> list[list[str]]:
    """The commands of a page, as a shell reads them."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


COMMANDS = commands(PAGE)
PROGRAMS = {
    "millrace",
    "curl",
    "docker",
    "kubectl",
    "helm",
    "pip",
    "ray",
    "serve",
    "(umask",
    "openssl",
    "printf",
}  # serve: Ray's
OF_COMMANDS = {
    "--listen",
    "--fleet-key-file",
    "--fleet-tls-cert",
    "--fleet-tls-key",
    "--fleet-tls-ca",
    "--metrics-port",
    "--engine",
    "--fleet",
    "--minutes",
    "--label",
    "--split",
    "--shadow",
}  # options that are no settings
(COMBINED,) = (
    ["millrace", "serve", *found.split()] for found in re.findall(r"`(--data\S+ \d[^`]*)`", PAGE.read_text())
)
IS_REMOTE = {"Qwen/Qwen3-0.6B", "MODEL", "ray"}  # not on this machine


def of(program: str, word: str = "") -> list[Sequence[str]]:
    return [command for command in [*COMMANDS, COMBINED] if command[0] == program and (not word or word in command)]


def test_the_page_has_commands_of_known_programs_alone() -> None:
    assert {command[0] for command in COMMANDS} == PROGRAMS and len(COMMANDS) > 12
    assert len(COMBINED) == 6


@pytest.mark.parametrize("command", of("millrace"), ids=" ".join)
def test_millrace_has_each_option_and_accepts_its_value(
    command: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command[1:], "--print-config"]) == 0
    shown = capsys.readouterr().out
    for option, value in zip(command, command[1:], strict=False):
        if option.startswith("--") and option not in OF_COMMANDS and value != "KEY":  # keys are not shown
            assert re.search(rf"^{option[2:].replace('-', '_')}\W.*\b{value}\b", shown, re.MULTILINE), shown


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="starts a server for each command: MILLRACE_FULL=1")
@pytest.mark.parametrize("command", [each for each in of("millrace", "serve") if not IS_REMOTE & {*each}], ids=" ".join)
def test_each_server_answers_says_that_it_is_healthy_and_stops(command: Sequence[str]) -> None:
    on_cpu = [] if "--device" in command else ["--device", "cpu"]
    ranks = ["--dtype", "float32"] if "--tensor-parallel-size" in command else []
    full = [sys.executable, "-m", "millrace.deploy", *command[1:], *on_cpu, *ranks, "--port", "0"]
    (curl,) = (command for command in of("curl") if "-d" in command)
    (health,) = of("millrace", "health")
    with RunningServer(command=full) as server:
        body = yaml.safe_load(curl[curl.index("-d") + 1])
        answer = server.post(curl[1].removeprefix("http://127.0.0.1:8000"), body)
        assert answer.status == 200 and answer.json["choices"][0]["text"]
        asked = [sys.executable, "-m", "millrace.deploy", *health[1:], "--url", server.url]
        assert subprocess.run(asked, capture_output=True, text=True, cwd=ROOT).stdout == "ready\n"
        server.signal(signal.SIGTERM)
        assert server.process.wait(40) == 0


def test_files_in_commands_of_docker_are_there_and_images_are_built_before_they_run() -> None:
    built = {command[command.index("-t") + 1] for command in of("docker", "build")}
    assert built == {"millrace:cpu", "millrace:cuda"}
    for command in of("docker"):
        files = [value for option, value in zip(command, command[1:], strict=False) if option == "-f"]
        assert all((ROOT / file).exists() for file in files)
        if "run" in command:
            image = next(word for word in command if word.startswith("millrace:"))
            arguments = command[command.index(image) + 1 :]
            assert image in built and cli.make_parser().parse_args(arguments).command == "serve"


def test_shares_that_curl_moves_are_those_of_the_admin_route() -> None:
    moved = [command for command in of("curl") if command[-1].endswith("/admin/traffic")]
    assert len(moved) == 2
    for command in moved:
        body = json.loads(command[command.index("--json") + 1])
        assert body.keys() <= TrafficBody.model_fields.keys()
        assert TrafficRules.parse(body.get("split"), body.get("shadow")).split is not None
        assert "Authorization: Bearer KEY" in command


def secrets(page: Path) -> dict[str, list[str]]:
    """The Secrets that a page creates, with the files that they are of."""
    made = [command for command in commands(page) if command[:4] == ["kubectl", "create", "secret", "generic"]]
    return {command[4]: [word.removeprefix("--from-file=") for word in command[5:]] for command in made}


@needs("kubectl")
@pytest.mark.parametrize("page", [PAGE, CARD], ids=lambda page: page.name)
def test_kubectl_makes_the_secrets_that_the_chart_reads(tmp_path: Path, page: Path) -> None:
    found = secrets(page)
    assert found["millrace-keys"] == ["api-keys", "metrics-key"] and found["millrace-fleet"] == ["fleet-key"]
    assert found.get("millrace-admin", ["admin-keys"]) == ["admin-keys"]
    for name, files in found.items():
        for file in files:
            (tmp_path / file).write_text("a-key")
        made = [f"--from-file={file}" for file in files]
        command = ("create", "secret", "generic", name, *made, "--dry-run=client", "--output=yaml")
        assert set(yaml.safe_load(run("kubectl", *command, cwd=tmp_path).stdout)["data"]) == set(files)


@cache
def releases(page: Path) -> list[tuple[Sequence[str], list[dict[str, Any]]]]:
    """Each helm command of a page, and the objects of its release then: with the values of those before it."""
    kept: dict[str, list[str]] = {}
    found: list[tuple[Sequence[str], list[dict[str, Any]]]] = []
    for command in (one for one in commands(page) if one[0] == "helm"):
        _, verb, release, chart, *_ = command
        assert chart == "deploy/chart" and verb in ("install", "upgrade")
        assert (command[4] == "--reuse-values") == (verb == "upgrade") == (release in kept)
        pairs = zip(command, command[1:], strict=False)
        kept.setdefault(release, []).extend(word for pair in pairs if pair[0] == "--set" for word in pair)
        found.append((command, documents(run("helm", "template", release, chart, *kept[release]).stdout)))
    return found


@pytest.mark.slow
@needs("helm")
@pytest.mark.parametrize("page", [PAGE, CARD], ids=lambda page: page.name)
def test_each_helm_command_renders_and_names_secrets_that_the_page_creates(page: Path) -> None:
    selectors: dict[str, Any] = {}
    assert {one[1] for one in commands(page) if one[0] == "helm"} >= {"install"}
    for command, objects in releases(page):
        named = {*re.findall(r"'secretName': '([^']+)'", str(objects))}
        assert named and named <= secrets(page).keys(), command
        for one in objects:
            if one["kind"] in ("Deployment", "StatefulSet"):
                name = f"{one['kind']} {one['metadata']['name']}"
                kept = selectors.setdefault(name, one["spec"]["selector"])
                assert kept == one["spec"]["selector"], f"{command}: Kubernetes does not change selectors"


@pytest.mark.slow
@needs("helm")
def test_commands_for_servers_change_their_number_their_gpus_and_their_scaling() -> None:
    made = [str(objects) for command, objects in releases(PAGE) if command[2] == "millrace"]
    assert "'secretName': 'millrace-keys'" in made[0] and "'replicas': 3" in made[1]
    assert "'nvidia.com/gpu': 2" in made[2] and "tensor_parallel_size: 2" in made[2]
    assert "'kind': 'ScaledObject'" in made[3] and "'replicas': 3" not in made[3]


@pytest.mark.slow
@needs("helm")
def test_commands_for_a_canary_part_its_engines_move_shares_and_take_it_away() -> None:
    told = []
    for command, objects in releases(PAGE):
        if command[2] != "fleet":
            continue
        (fronts,) = (one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment")
        args = fronts["containers"][0]["args"]
        shares = {flag[2:]: args[args.index(flag) + 1] for flag in ("--split", "--shadow") if flag in args}
        groups = {}
        for one in objects:
            if one["kind"] == "StatefulSet":
                (container,) = one["spec"]["template"]["spec"]["containers"]
                labels = [word for word in container["args"] if word.startswith("version=")]
                image = container["image"].rpartition(":")[2]
                groups[one["metadata"]["name"].rpartition("-")[2]] = (one["spec"]["replicas"], image, *labels)
        assert len(groups) == args.count("--engine")
        told.append((shares, groups))
    old, new, tuned = (4, "v1"), (4, "v2"), (1, "v2", "version=v4")
    assert told == [
        ({}, {"engine": old}),
        ({"split": "version=v2:5"}, {"engine": old, "canary": (1, "v2", "version=v2")}),
        ({"split": "version=v2:25"}, {"engine": old, "canary": (1, "v2", "version=v2")}),
        ({}, {"engine": new}),
        ({"shadow": "version=v3:1"}, {"engine": new, "shadow": (1, "v3", "version=v3")}),
        ({}, {"engine": new}),
        ({"split": "version=v4:5"}, {"engine": new, "tuned": tuned}),
        ({"split": "version=v4:100"}, {"engine": new, "tuned": (4, *tuned[1:])}),
        ({"split": "version=v4:100"}, {"engine": (*new, "version=v4"), "tuned": (4, *tuned[1:])}),
        ({}, {"engine": (*new, "version=v4")}),
    ]


@pytest.mark.slow
@needs("helm")
def test_kubectl_finds_the_fronts_of_the_fleet_and_their_port() -> None:
    (objects,) = (objects for command, objects in releases(PAGE) if list(command[1:3]) == ["install", "fleet"])
    (fronts,) = (one["spec"]["template"] for one in objects if one["kind"] == "Deployment")
    (command,) = of("kubectl", "pods")
    selected = dict(pair.split("=") for pair in command[command.index("--selector") + 1].split(","))
    assert selected.items() <= fronts["metadata"]["labels"].items()
    (forward,) = of("kubectl", "port-forward")
    here, there = forward[-1].split(":")
    (container,) = fronts["spec"]["containers"]
    assert int(there) in {port["containerPort"] for port in container["ports"]}
    assert any(f"http://127.0.0.1:{here}/" in command[-1] for command in of("curl"))
