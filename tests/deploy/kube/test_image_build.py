"""The CPU image, built without a daemon and run as its user on a read-only root. Needs MILLRACE_FULL=1 and root.

No registry is asked: the base is a Debian 12 that mmdebstrap makes, without pages of manuals, as the official one.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.counts import FULL
from tests.deploy.kube.tools import ROOT, needs, run
from tests.deploy.running import RunningServer, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not FULL or os.geteuid() != 0, reason="builds an image: MILLRACE_FULL=1, as root"),
    needs("buildah", "apt install buildah"),
    needs("mmdebstrap", "apt install mmdebstrap"),
]
MOST_BYTES = 400_000_000
MOST_S = 5.0  # from the start of the container to the end of a completion
LEFT_OUT = ("doc", "man", "info", "locale")  # of /usr/share
BASE = "FROM scratch\nADD base.tar /\n"
PIP = "apt-get update && apt-get install --yes --no-install-recommends python3-pip python3-venv"
BUILD_BASE = f"FROM localhost/base\nRUN {PIP}\n"
# Enters a root as user 65532: read-only, with a /tmp of its own.
ENTER = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"
mount -t tmpfs -o nosuid,nodev,noexec,mode=1777 tmpfs "$1/tmp"
mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev"
root=$1; shift
exec chroot --userspec=65532:65532 "$root" /usr/bin/env -i "$@"
"""


class Storage:
    """Images and containers of this test alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        policy = {"default": [{"type": "insecureAcceptAnything"}]}
        (folder / "policy.json").write_text(json.dumps(policy))

    def __call__(self, *arguments: str | Path) -> str:
        where = ("--root", self.folder / "root", "--runroot", self.folder / "run", "--storage-driver", "vfs")
        return run("buildah", *where, *arguments).stdout.strip()

    def build(self, name: str, text: str, context: Path, *options: str) -> None:
        file = self.folder / f"{name}.containerfile"
        file.write_text(text)
        certificates = "/etc/ssl/certs:/etc/ssl/certs:ro"  # of this machine: its network may have one of its own
        how = ("--isolation", "chroot", "--signature-policy", self.folder / "policy.json", "--volume", certificates)
        self("bud", *how, *options, "--tag", f"localhost/{name}", "--file", file, context)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    folder = tmp_path_factory.mktemp("image")
    options = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
    suite = ("bookworm", folder / "base.tar")
    run("mmdebstrap", "--variant=minbase", "--mode=root", "--include=python3,ca-certificates", *options, *suite)
    storage = Storage(folder)
    storage.build("base", BASE, folder)
    (folder / "empty").mkdir()
    storage.build("build-base", BUILD_BASE, folder / "empty")
    text = (ROOT / "deploy" / "containers" / "Containerfile.cpu").read_text()
    bases = ("--build-arg", "BASE=localhost/base", "--build-arg", "BUILD_BASE=localhost/build-base")
    storage.build("millrace", text, ROOT, "--format", "docker", *bases)
    return storage


@pytest.fixture(scope="module")
def container(storage: Storage) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The root of a container of the image, and the image's configuration."""
    name = storage("from", "--signature-policy", storage.folder / "policy.json", "localhost/millrace")
    config = json.loads(storage("inspect", name))["Docker"]["config"]
    yield Path(storage("mount", name)), config
    storage("umount", name)


def test_the_image_is_at_most_400_megabytes_and_has_no_compiler_and_no_torch(
    container: tuple[Path, dict[str, Any]],
) -> None:
    root, _ = container
    files = {(stat.st_dev, stat.st_ino): stat.st_size for stat in map(os.lstat, root.rglob("*"))}
    assert sum(files.values()) <= MOST_BYTES, sum(files.values())
    assert [*root.rglob("site-packages/torch"), *root.glob("usr/bin/g++*"), *root.rglob("pip")] == []


def test_it_answers_a_completion_as_its_user_on_a_read_only_root_within_5_s(
    container: tuple[Path, dict[str, Any]],
) -> None:
    root, config = container
    assert config["User"] == "65532:65532" and config["StopSignal"] == "SIGTERM"
    port = free_port()
    enter = ["unshare", "--mount", "sh", "-ec", ENTER, "sh", str(root), *config["Env"]]
    settings = [*config["Entrypoint"], *config["Cmd"], "--allow-no-key", "--port", str(port), "--log-format", "console"]
    began_s = time.monotonic()
    with RunningServer(command=[*enter, *settings]) as server:
        server.address = ("127.0.0.1", port)
        answer = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
        took_s = time.monotonic() - began_s
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 8
        status = Path(f"/proc/{server.ready['pid']}/status").read_text()
        assert "\nUid:" + 4 * "\t65532" + "\n" in status
        check = config["Healthcheck"]["Test"]
        assert check[0] == "CMD"
        asked = subprocess.run([*enter, *check[1:], "--port", str(port)], capture_output=True, text=True)
        assert (asked.returncode, asked.stdout) == (0, "ready\n"), asked.stderr
    assert took_s <= MOST_S
