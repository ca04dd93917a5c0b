"""Commands whose output is cut off, cannot be written or cannot be encoded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.running import RunningServer

COMMAND = [sys.executable, "-m", "millrace.deploy"]


def cut_off(*arguments: str, num_bytes: int) -> tuple[int, str]:
    """The exit code and standard error of a command whose reader leaves after so many bytes, as `| head -c` does."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert len(process.stdout.read(num_bytes)) == num_bytes
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    return process.wait(60), errors


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("serve", "--print-config"), ("serve", "--help")])
def test_a_command_ends_quietly_when_its_reader_leaves(arguments: tuple[str, ...]) -> None:
    code, errors = cut_off(*arguments, num_bytes=0)
    assert (code, errors) in ((141, ""), (0, "")), "0: all of it fitted the pipe before the reader left"


@pytest.mark.slow
def test_a_completion_ends_quietly_when_its_reader_leaves(slow_server: RunningServer) -> None:
    arguments = ("complete", "Once", "--url", slow_server.url, "--max-tokens", "400")
    assert cut_off(*arguments, num_bytes=5) == (141, "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("serve", "--print-config"), ("--version",)])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "millrace: cannot write the output: No space left on device\n")


@pytest.mark.slow
def test_closed_standard_streams_are_opened_into_nothing(tmp_path: Path) -> None:
    """So that no file of the command gets their numbers, and its lines."""

    def close() -> None:
        for descriptor in (0, 1, 2):
            os.close(descriptor)

    code = (
        "from millrace.deploy.cli import standard_streams; standard_streams.prepare(); import os, sys\n"
        f"file = os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_WRONLY)\n"
        "print('out'); print('err', file=sys.stderr); sys.stdout.flush(); sys.exit(10 + file)"
    )
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=close, timeout=60)
    assert done.returncode >= 10 + 3
    assert (tmp_path / "file").read_bytes() == b""
