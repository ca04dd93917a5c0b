"""What the processes of a chaos run are given: wall clocks that are wrong, no settings of the user, full disks."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.deploy.cli.chaos.fleet import ChaosFleet, FleetSize
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
