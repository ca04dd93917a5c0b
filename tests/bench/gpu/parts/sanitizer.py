"""The part `sanitizer`: the checks of the kernels, tiny, under NVIDIA's compute-sanitizer.

It looks at each access to memory: one of its tools at where each goes, the other at accesses to shared memory that
nothing orders. Either is stopped when it has had its share of the part's time, and is complained of then.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.gpu.place import Place

TOOL = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
CHECKS = ("memcheck", "racecheck")
CHECK_LIMIT_S = 17.0
FOUND_STATUS = 86  # that the tool is told to end with where it found something


def run(place: Place) -> None:
    """The part `sanitizer`; where the tool is not installed it says so, and nothing is wrong."""
    tool = shutil.which(TOOL, path=os.pathsep.join((os.environ.get("PATH", ""), *PLACES)))
    if tool is None:
        place.tell({"skipped": f"{TOOL} is not installed"})
        return
    for check in CHECKS:
        try:
            place.tell({"name": check, "status": sanitize(place, tool, check)})
        except subprocess.TimeoutExpired:
            place.tell({"name": check, "stopped_after_s": CHECK_LIMIT_S})
            place.complain(f"{check} was stopped after {CHECK_LIMIT_S:g} s, and has shown nothing")


def sanitize(place: Place, tool: str, check: str) -> int:
    """Runs the checks under the tool; its exit status."""
    with TemporaryDirectory() as folder:
        command = [tool, "--tool", check, "--error-exitcode", str(FOUND_STATUS), "--target-processes", "all"]
        command += [sys.executable, "-m", "tests.bench.gpu.timed_run.worker", "--once", "checks", "checks:run_all"]
        command += ["--tiny", "--seed", str(place.seed), "--out", folder] + ["--dry"] * place.is_dry
        # Without torch's own pools each tensor is an allocation, so that an access beside one is seen.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        status, said = _run(command, environment)
    if status:
        place.complain(f"{check}: exit status {status}: {said[-2000:]}")
    return status


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit status and output. Processes that it has started end with it, also where it takes too long."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=CHECK_LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said
