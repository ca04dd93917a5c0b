"""The commands of the page "From one machine to many", each as far as this machine goes.

Servers are started with MILLRACE_FULL=1; otherwise their settings are read. `helm install` is rendered, and
`kubectl create` printed. docker needs a daemon, so of its commands only files and options are looked for.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from millrace.deploy.cli import main as cli
from tests.counts import FULL
from tests.deploy.kube.tools import ROOT, find, needs, run
from tests.deploy.running import RunningServer

PAGE = ROOT / "deploy" / "docs" / "deployment.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.splitlines()]
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
    (curl,) = of("curl")
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


@needs("kubectl")
def test_kubectl_makes_the_secret_that_the_chart_reads(tmp_path: Path) -> None:
    (command,) = of("kubectl")
    for name in ("api-keys", "metrics-key"):
        (tmp_path / name).write_text("a-key")
    done = run("kubectl", *command[1:], "--dry-run=client", "--output=yaml", cwd=tmp_path)
    assert set(yaml.safe_load(done.stdout)["data"]) == {"api-keys", "metrics-key"}
    assert command[4] == "millrace-keys" and find("kubectl") is not None


@needs("helm")
def test_each_helm_command_renders_with_the_values_of_those_before_it() -> None:
    kept: list[str] = []
    made = []
    for command in of("helm"):
        assert list(command[2:4]) == ["millrace", "deploy/chart"] and command[1] in ("install", "upgrade")
        assert (command[4] == "--reuse-values") == (command[1] == "upgrade")
        kept += [word for option, value in _pairs(command) if option == "--set" for word in (option, value)]
        made.append(run("helm", "template", *command[2:4], *kept).stdout)
    assert "secretName: millrace-keys" in made[0] and "replicas: 3" in made[1]
    assert "nvidia.com/gpu: 2" in made[2] and "tensor_parallel_size: 2" in made[2]
    assert "kind: ScaledObject" in made[3] and "replicas: 3" not in made[3]


def _pairs(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from zip(command, command[1:], strict=False)
