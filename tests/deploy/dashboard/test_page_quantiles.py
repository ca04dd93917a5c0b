"""The page's reading of a sketch, run by Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from millrace.runtime.histogram import GROWTH, LatencyHistogram, quantile

FORMAT = Path(__file__).resolve().parents[3] / "deploy/static/dashboard/format.js"
SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)


def test_the_page_reads_the_same_quantiles_as_the_server():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: apt install nodejs")
    histogram = LatencyHistogram([10])
    histogram.observe_many(np.array([0, 0, 1, 3, 9, 100, 100, 2_000_000], np.int64))
    sketch = json.dumps({str(place): count for place, count in histogram.sketch.items()})
    told = f"console.log(JSON.stringify({json.dumps(SHARES)}.map((q) => sketchQuantile({sketch}, {GROWTH}, q))))"
    source = FORMAT.read_text() + told
    done = subprocess.run([node, "--input-type=module"], input=source, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == pytest.approx([quantile(histogram.sketch, share) for share in SHARES]), (
        done.stderr
    )
