"""The most memory that a start takes, beyond the file and the KV cache."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.counts import FULL
from tests.real_models.models import MODELS

MOST_MIB = 300
CACHE_BYTES = 1 << 30  # its mapping is the only one so large, and what of it is touched is not counted
MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) [rwxps-]{4} ")
pytestmark = pytest.mark.slow


@pytest.mark.skipif(not FULL, reason="takes half a minute; MILLRACE_FULL=1 runs it")
@pytest.mark.parametrize("name", MODELS)
def test_a_start_takes_at_most_300_mib_beyond_the_file_and_the_cache(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    if model.missing:
        pytest.skip(f"not installed: {', '.join(model.missing)}")
    file = model.gguf()
    command = [sys.executable, "-m", "millrace", "serve", str(file), "--port", "0", "--device", "cpu"]
    command += ["--kv-cache-bytes", str(CACHE_BYTES)]
    out = tmp_path / "out"
    with out.open("w") as to, subprocess.Popen(command, stdout=to, stderr=subprocess.DEVNULL) as server:
        try:
            most, ended_s = 0, float("inf")
            while time.monotonic() < ended_s:
                assert server.poll() is None
                most = max(most, resident_bytes(server.pid))
                if ended_s == float("inf") and '"ready"' in out.read_text():
                    ended_s = time.monotonic() + 2.0
        finally:
            server.kill()
    beyond = (most - file.stat().st_size) / 2**20
    print(f"{name}: {beyond:.1f} MiB beyond the file and the cache")
    assert beyond <= MOST_MIB


def resident_bytes(pid: int) -> int:
    """The resident memory of a process without its KV cache, in whole blocks of up to `CACHE_BYTES`."""
    is_cache, total = False, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := MAPPING.match(line):
            is_cache = int(match[2], 16) - int(match[1], 16) > 0.9 * CACHE_BYTES
        elif line.startswith("Rss:") and not is_cache:
            total += 1024 * int(line.split()[1])
    return total
