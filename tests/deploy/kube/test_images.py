"""The image files: what they promise, what hadolint says, and, with MILLRACE_FULL=1, the CPU image itself."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from millrace.deploy.cli.main import make_parser
from millrace.deploy.config import ServerConfig
from millrace.stages.config import EngineConfig
from tests.deploy.kube import lock
from tests.deploy.kube.tools import ROOT, needs, run

FOLDER = ROOT / "deploy" / "containers"
FILES = ("Containerfile.cpu", "Containerfile.cuda")


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of the last stage, in order."""
    text = re.sub(r"^#.*\n", "", (FOLDER / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    last = max(i for i, (word, _, _) in enumerate(found) if word == "FROM")
    return [(word, " ".join(rest.split())) for word, _, rest in found[last:]]


@pytest.mark.parametrize("name", FILES)
def test_an_image_runs_as_nobody_and_stops_and_is_checked_as_the_server_expects(name: str) -> None:
    last = dict(instructions(name))
    assert last["USER"] == "65532:65532" and last["STOPSIGNAL"] == "SIGTERM" and last["EXPOSE"] == "8000"
    assert json.loads(last["ENTRYPOINT"]) == ["millrace"] and json.loads(last["CMD"]) == ["serve"]
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    assert check[0] == "millrace" and make_parser().parse_args(check[1:]).command == "health"
    copied = [rest for word, rest in instructions(name) if word == "COPY"]
    assert copied == ["--from=build /opt/millrace /opt/millrace"]  # no compiler, and no source


@pytest.mark.parametrize("name", FILES)
def test_an_images_settings_are_settings(name: str) -> None:
    (env,) = (rest for word, rest in instructions(name) if word == "ENV")
    fields = {*ServerConfig.__dataclass_fields__, *EngineConfig.__dataclass_fields__}
    named = re.findall(r"\bMILLRACE_([A-Z_]+)=", env)
    assert len(named) == 3 and {each.lower() for each in named} <= fields


def test_the_locked_versions_are_those_that_the_project_asks_for_and_no_torch() -> None:
    locked = lock.locked()
    for each in map(Requirement, lock.wanted()):
        assert each.specifier.contains(locked[lock.canonical(each.name)]), each
    assert not {*locked} & {*lock.LEFT_OUT}
    lines = lock.LOCK.read_text().removeprefix(lock.HEAD).splitlines()
    assert len(lines) == len(locked) == len(set(locked)) > 30


def test_the_context_of_a_build_has_every_package_and_nothing_that_is_not_named() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]

    def is_sent(path: str) -> bool:
        is_left_out = False
        for rule in rules:  # the last that matches decides
            pattern = rule.removeprefix("!")
            parents = [path, *map(str, Path(path).parents)]
            if any(fnmatch(each, pattern) for each in parents if each != "."):
                is_left_out = not rule.startswith("!")
        return not is_left_out

    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {*setuptools["package-dir"].values()}
    assert [folder for folder in sorted(folders) if not is_sent(f"{folder}/__init__.py")] == []
    assert all(map(is_sent, ("pyproject.toml", "LICENSE", "deploy/containers/requirements-cpu.txt")))
    for path in (
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "api-keys",
        "deploy/docs/api.md",
        "build/kube/x",
    ):
        assert not is_sent(path), path


@needs("hadolint")
def test_hadolint_has_no_complaint_and_would_notice_a_base_without_a_version(tmp_path: Path) -> None:
    assert {path.name for path in FOLDER.glob("Containerfile*")} == {*FILES}
    for name in FILES:
        run("hadolint", "--no-color", FOLDER / name)
    (tmp_path / "Containerfile").write_text("FROM debian\n")
    done = run("hadolint", "--no-color", tmp_path / "Containerfile", code=None)
    assert done.returncode == 1 and "DL3006" in done.stdout
