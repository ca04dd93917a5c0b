"""Each family of ours against transformers: its tiny checkpoints give the same greedy tokens on each backend.

In CI one row of each type and of some wrappers, in one way on each backend; with MILLRACE_FULL=1 all rows in all ways,
which `python -m tests.families` also does.
"""

from __future__ import annotations

import pytest

from millrace.model.backend_gaps import Backend, missing
from millrace.model.families.registry import MODULES, WRAPPERS, read_spec
from tests.counts import FULL, count
from tests.families.oracle import LENGTHS, NUM_NEW
from tests.families.row import Row
from tests.families.rows import ROWS
from tests.families.ways import WAYS, Outcome, run_way
from tests.families.zoo import Zoo, by_type

SOME_WRAPPERS = ("gemma3-image", "llava-llama", "qwen2-vl")  # their decoders are those of other rows
BACKENDS: tuple[Backend, ...] = ("native", "torch")
SERVED = [row for row in ROWS if "own" in row.by and row.model_type in {*MODULES, *WRAPPERS}]
FIRST = [rows[0] for _, rows in by_type(SERVED)]
CHOSEN = SERVED if FULL else [row for row in FIRST if row.model_type not in WRAPPERS or row.name in SOME_WRAPPERS]
OTHER_WAYS = ("chunked", "forked", "prefix", "aborted", "among16")  # for preemptions CI's answers are too short
SPLIT_WAYS = {"chunked", "aborted"}  # in steps of at most 16 and 8 tokens


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"), count(7, NUM_NEW), LENGTHS if FULL else LENGTHS[:2])


@pytest.mark.slow
@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.name)
def test_a_family_gives_the_tokens_of_transformers(row: Row, zoo: Zoo) -> None:
    entry = zoo.entry(row)
    gaps = {backend: missing(read_spec(entry.folder), backend) for backend in BACKENDS}
    for backend in BACKENDS:
        for way in ways_of(row, is_first=backend == "native" or bool(gaps["native"])):
            outcome = run_way(entry, way, backend)
            if not gaps[backend]:
                assert outcome == Outcome("equal"), f"{backend}, {way}"
            else:
                assert outcome.state == "refused" and gaps[backend][0] in outcome.detail, f"{backend}: {outcome}"


def ways_of(row: Row, is_first: bool) -> list[str]:
    """In CI one that changes from type to type on the first backend that serves it, and plain on the other one.

    The first is plain too where that way splits the longest prompt among steps.
    """
    if FULL:
        return list(WAYS)
    way = OTHER_WAYS[CHOSEN.index(row) % len(OTHER_WAYS)] if is_first else "plain"
    return ["plain", way] if way in SPLIT_WAYS else [way]


@pytest.mark.parametrize("model_type", sorted({*MODULES, *WRAPPERS}))
def test_each_served_type_has_a_row(model_type: str) -> None:
    assert [row for row in SERVED if model_type in (row.model_type, row.text_type)]
