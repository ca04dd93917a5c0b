"""`millrace doctor`: each finding names the next step, and a failure is the exit code."""

from __future__ import annotations

import json
import re
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.deploy.cli import doctor
from millrace.deploy.cli.doctor import installation, machine, service
from millrace.deploy.cli.doctor.findings import Finding, to_text
from millrace.deploy.cli.main import main
from millrace.deploy.config import ServerConfig
from millrace.kernels.native import build
from millrace.model.demo import WEIGHTS
from millrace.stages.config import EngineConfig
from tests.deploy.running import free_port

GIB = 1 << 30


@pytest.fixture
def of_the_service_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the model, the downloads and the address are checked."""
    for name in ("check_machine", "check_installation"):
        monkeypatch.setattr(doctor, name, lambda *_: iter(()))


def examined(capsys: Any, *arguments: str) -> tuple[int, dict[str, Finding]]:
    """Exit code and the last finding of each name."""
    code = main(["doctor", "--json", "--port", str(free_port()), *arguments])
    told = json.loads(capsys.readouterr().out)
    assert told["fail"] == sum(each["status"] == "fail" for each in told["checks"]) and code == (told["fail"] > 0)
    assert all(each["next_step"] or each["status"] == "ok" for each in told["checks"])
    return code, {each["name"]: Finding(**each) for each in told["checks"]}


def test_a_machine_that_serves_has_no_failure_and_names_what_it_checked(capsys: Any) -> None:
    code, found = examined(capsys)
    assert code == 0, found
    assert {"python", "memory", "open files", "packages", "native library", "model", "address"} <= set(found)
    assert found["model"].text.startswith("demo loads: ")


@pytest.mark.usefixtures("of_the_service_alone")
def test_a_port_in_use_is_a_failure(capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, found = examined(capsys, "--port", str(port))
    assert code == 1 and f"cannot listen on 127.0.0.1:{port}" in found["address"].text


@pytest.mark.usefixtures("of_the_service_alone")
def test_a_wrong_certificate_or_parser_is_told_as_at_a_start(capsys: Any) -> None:
    code, found = examined(capsys, "--ssl-certfile", "nowhere.pem", "--reasoning-parser", "none-such")
    assert code == 1 and found["certificate"].text.startswith("ssl_certfile = nowhere.pem")
    assert found["parsers"].text.startswith("reasoning_parser = 'none-such': must be")


@pytest.mark.usefixtures("of_the_service_alone")
def test_a_model_that_would_not_load_is_told_as_at_a_start(capsys: Any, tmp_path: Path) -> None:
    shutil.copytree(WEIGHTS, tmp_path, dirs_exist_ok=True)
    code, found = examined(capsys, str(tmp_path), "--max-model-len", "1M")
    assert code == 1 and found["model"].text.startswith("max_model_len = 1048576: must be at most")
    code, found = examined(capsys, str(tmp_path), "--tensor-parallel-size", "3")
    assert code == 1 and found["model"].text.startswith("tensor_parallel_size = 3: must divide")
    (tmp_path / "tokenizer.json").write_text("{")
    code, found = examined(capsys, str(tmp_path))
    assert code == 1 and "tokenizer.json" in found["model"].text
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    code, found = examined(capsys, str(tmp_path))
    assert code == 1 and found["model"].status == "fail"


@pytest.mark.usefixtures("of_the_service_alone")
def test_a_model_that_is_not_here_is_a_warning_unless_downloads_are_off(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service, "HUB", "localhost.invalid")
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    arguments = ("owner/there-is-no-such-name", "--download-dir", str(tmp_path))
    code, found = examined(capsys, *arguments)
    assert (code, found["model"].status, found["hub"].status) == (1, "warn", "fail")
    assert "localhost.invalid cannot be reached" in found["hub"].text
    code, found = examined(capsys, *arguments, "--offline")
    assert (code, found["model"].status) == (1, "fail") and "downloads are off" in found["model"].text


def test_the_hub_is_asked_as_a_download_asks_it_by_its_mirror_and_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(service, "HUB", "localhost.invalid")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        for proxy in (f"http://{place}", place):
            monkeypatch.setenv("HTTPS_PROXY", proxy)
            asked = service._hub()
            assert (asked.status, asked.text) == ("ok", f"localhost.invalid, by the proxy {place}, answers")
        monkeypatch.setenv("HF_ENDPOINT", f"http://{place}")
        assert service._hub().status == "ok"
    assert service._hub().text.startswith("127.0.0.1 cannot be reached: ")
    for wrong in ("nonsense", "http://[::1", "ftp://a"):
        monkeypatch.setenv("HF_ENDPOINT", wrong)
        assert service._hub().text == f"{wrong}: must be like https://localhost.invalid"


@pytest.mark.parametrize(
    ("free", "status"), [(GIB - 1, "fail"), (GIB, "warn"), (4 * GIB - 1, "warn"), (4 * GIB, "ok"), (0, "fail")]
)
def test_free_memory_is_judged_by_what_the_smallest_model_takes(free: int, status: str) -> None:
    assert machine.memory(free, 8 * GIB).status == status


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        ("always [madvise] never", "ok", "madvise"),
        ("[always] madvise never", "ok", "always"),
        ("always madvise [never]", "warn", "never"),
        ("", "ok", "the kernel does not say"),
    ],
)
def test_huge_pages_that_are_off_are_a_warning(text: str, status: str, told: str) -> None:
    finding = machine.huge_pages(text)
    assert finding.status == status and finding.text.startswith(told)


def test_a_server_raises_its_files_itself_but_not_above_the_hard_limit() -> None:
    assert machine.open_files(2048, 1024, 65536).status == "ok"
    assert "1024 before the server raises it" in machine.open_files(2048, 1024, 65536).text
    assert machine.open_files(2048, 1024, resource.RLIM_INFINITY).text.startswith("unlimited")
    few = machine.open_files(2048, 1024, 2048)
    assert few.status == "warn" and "ulimit -Hn 2176" in few.next_step


def test_missing_packages_fail_but_those_of_some_models_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"numpy": "2.0", "aiohttp": "1.0", "jinja2": "3.1.6"}
    wanted = ["numpy>=1.26", "aiohttp>=3.14", "torch>=2.11,<2.14", "anyio>=4.4", "jinja2>=3", 'rich; extra == "top"']

    def version(name: str) -> str:
        if name not in there:
            raise installation.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(installation, "requires", lambda _: wanted)
    monkeypatch.setattr(installation, "version", version)
    found = [(each.status, each.text) for each in installation.packages()]
    assert found == [
        ("warn", "aiohttp 1.0: must be >=3.14"),
        ("warn", "torch is not installed: it is for GPUs, encoders and models that the native library lacks"),
        ("fail", "anyio is not installed"),
        ("ok", "numpy 2.0, jinja2 3.1.6"),
    ]


@pytest.mark.parametrize(("compiler", "status"), [(None, "fail"), ("g++", "warn")])
def test_a_library_that_is_not_compiled_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch, compiler: str | None, status: str
) -> None:
    monkeypatch.setattr(installation, "loading", SimpleNamespace(choose_instruction_set=lambda: "avx2"))
    monkeypatch.setattr(build, "is_ready", lambda _: False)
    monkeypatch.setattr(build, "find_compiler", lambda: compiler)
    assert installation.native_library().status == status


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_machine(*_: Any) -> Any:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(doctor, "check_machine", check_machine)
    monkeypatch.setattr(doctor, "check_service", lambda *_: iter(()))
    first = next(doctor.examine(EngineConfig(), ServerConfig()))
    assert (first.status, first.text) == ("fail", "check_machine broke: ZeroDivisionError: no")


def test_a_line_has_its_status_first_and_below_it_the_next_step() -> None:
    finding = Finding("memory", "warn", "little", "free some")
    lines = to_text(finding, has_colours=False).splitlines()
    assert lines == ["warn  memory          little", " " * 22 + "-> free some"]
    assert re.sub("\x1b\\[[0-9]*m", "", to_text(finding, has_colours=True)).splitlines() == lines
