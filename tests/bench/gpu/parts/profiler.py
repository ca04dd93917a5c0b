"""The part `ncu`: NVIDIA's profiler over one launch of attention, where it is installed: stall reasons, L2 and DRAM.

    python -m tests.bench.gpu.parts.profiler CASE     # what it profiles: launches the attention of one load, twice

The profiler's pages lie beside the rows, CASE.ncu.txt.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time

from tests.bench.gpu.place import Place

TOOL = "ncu"
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute", "/opt/cuda/bin")
CASES = ("qwen3-0.6b decode 256 x 1024", "qwen3-0.6b extend 1 x 8192")
DRY_CASES = ("tiny decode",)
OPTIONS = ("--clock-control", "none", "--set", "full", "-c", "1", "--kernel-name", "regex:attention_kernel")
WANTED = (
    *("Memory Throughput", "DRAM Throughput", "L2 Hit Rate", "Registers Per Thread", "Achieved Occupancy"),
    *("No Eligible", "Duration"),
)


def run(place: Place) -> None:
    """Tells some of the profiler's figures."""
    tool = shutil.which(TOOL, path=os.pathsep.join((os.environ.get("PATH", ""), *PLACES)))
    if tool is None:
        place.tell({"name": TOOL, "skipped": f"{TOOL} is not installed"})
        return
    for case in place.in_time(DRY_CASES if place.is_dry else CASES):
        with place.trying(case):
            place.tell({"name": case, **profile(place, tool, case)})


def profile(place: Place, tool: str, case: str) -> dict[str, str]:
    """Of one load: the figures of `WANTED` that the page has, with their units."""
    assert place.out is not None
    page = place.out / f"{case.replace(' ', '-')}.ncu.txt"
    command = [tool, *OPTIONS, sys.executable, "-m", "tests.bench.gpu.parts.profiler", case]
    command += ["--dry"] * place.is_dry
    limit_s = min(60.0, max(1.0, place.end_s - time.monotonic()))
    with page.open("wb") as out:
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=True)
    return figures(page.read_text(errors="replace"))


def figures(page: str) -> dict[str, str]:
    """Lines of a page are a name, a unit and a number, with spaces between."""
    found = {}
    for name in WANTED:
        if line := re.search(rf"^\s*{re.escape(name)}\s{{2,}}(\S*)\s+([\d.,]+)\s*$", page, re.MULTILINE):
            found[name] = f"{line[2]} {line[1]}"
    return found


def main() -> None:
    import torch

    from millrace.kernels import kernel_set
    from tests.bench.gpu.sweeps.attention import NUM_LAYERS, cases_of
    from tests.bench.gpu.trials.attention import AttentionLoad

    is_dry = "--dry" in sys.argv
    device = torch.device("cpu") if is_dry else torch.device("cuda", 0)
    place = Place(device, 0, lambda row: None, lambda sentence: None)
    (case,) = (case for case in cases_of(place) if case.name == sys.argv[1])
    draw = torch.Generator(device).manual_seed(0)
    load = AttentionLoad.drawn(
        kernel_set.load("triton"), case.widths, NUM_LAYERS, case.load, place.dtype, draw, is_fp8=case.is_fp8
    )
    load.attend(load.plan())


if __name__ == "__main__":
    main()
