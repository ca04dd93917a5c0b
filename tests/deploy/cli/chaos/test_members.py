"""What the processes of a chaos run are given: wall clocks that are wrong, no settings of the user, full disks."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.deploy.cli.chaos.awake_clock import AwakeClock
from millrace.deploy.cli.chaos.fleet import ChaosFleet, FleetSize, end_process
from millrace.deploy.cli.chaos.members import FleetMember

CLOCKS = "import json, time; print(json.dumps([time.time(), time.time_ns() / 1e9, time.monotonic()]))"
DAY_S = 86_400


def test_the_wall_clock_of_a_process_is_wrong_by_a_day_and_its_other_clock_is_right(tmp_path: Path) -> None:
    fleet = ChaosFleet(FleetSize(1, 2), 0, tmp_path, (DAY_S, -DAY_S))
    for member, offset_s in zip(fleet.engines, (DAY_S, -DAY_S), strict=True):
        printed = subprocess.run(
            [sys.executable, "-c", CLOCKS], env=member.environment, capture_output=True, check=True, text=True
        ).stdout
        wall_s, wall_ns_s, monotonic_s = json.loads(printed)
        for found, due in ((wall_s, time.time()), (wall_ns_s, time.time())):
            assert abs(found - due - offset_s) < 300.0
        assert abs(monotonic_s - time.monotonic()) < 300.0


def test_settings_of_the_user_reach_no_process_of_the_fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILLRACE_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("OTHER", "4")
    member = FleetMember("engine0", (), tmp_path, {"MORE": "5"})
    assert "MILLRACE_MAX_NUM_SEQS" not in member.environment
    assert (member.environment["OTHER"], member.environment["MORE"]) == ("4", "5")


@pytest.mark.parametrize(
    ("code", "stood_still_s", "problem"),
    [
        (0, 0.0, None),
        (1, 0.0, "engine0 ended with exit status 1 after SIGTERM"),
        (1, 2.0, "engine0 ended with exit status 1 after SIGTERM"),
        (1, 40.0, None),  # its own limit passed meanwhile
        (3, 40.0, "engine0 ended with exit status 3 after SIGTERM"),
    ],
)
def test_an_end_with_an_error_is_a_problem_unless_the_machine_stood_still(
    tmp_path: Path, code: int, stood_still_s: float, problem: str | None
) -> None:
    class Clock(AwakeClock):
        async def wait(self, awaited: Sequence[Awaitable[Any]], limit_s: float) -> bool:
            self._lost_s += stood_still_s
            return await super().wait(awaited, limit_s)

    class Process:
        pid, returncode = 1, None

        def terminate(self) -> None:
            self.returncode = code

        async def wait(self) -> int:
            return code

    process: Any = Process()
    assert asyncio.run(end_process(FleetMember("engine0", (), tmp_path), process, Clock())) == problem


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prlimit is of Linux")
def test_a_full_disk_refuses_what_is_written_until_it_has_room_again(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "with open(sys.argv[1], 'ab', 0) as file:\n"
        "    for _ in sys.stdin:\n"
        "        try:\n"
        "            print(file.write(b'ab'), flush=True)\n"
        "        except OSError as error:\n"
        "            print(error.errno, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        member = FleetMember("engine0", (), tmp_path)
        member.process = process  # type: ignore[assignment]
        found = []
        for limit in (None, 1, None):
            member.limit_files(limit)
            process.stdin.write("\n")
            process.stdin.flush()
            found.append(process.stdout.readline().strip())
        process.stdin.close()
    assert found == ["2", str(errno.EFBIG), "2"]
