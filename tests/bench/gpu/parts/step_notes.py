"""Every step of an engine on a GPU as a row: what it held, whether it was a graph, how long it took, the gap before."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from millrace.stages.backends.cuda.idle_time import LONGEST_US, IdleGaps

Row = dict[str, Any]


@contextmanager
def noted_steps() -> Iterator[list[Row]]:
    """The steps that finish meanwhile, in any engine of this process; microseconds since the first one began.

    A gap of a second and more is a pause of the load: time does not pass in it.
    """
    rows: list[Row] = []
    note = IdleGaps.note

    def note_too(gaps: IdleGaps, step: Any, before: Any, tokens: Any) -> None:
        grant = step.grant
        gap_us = step.began.us_since(before.done) if rows and before.grant is not None else 0.0
        gap_us = gap_us if 0 <= gap_us < LONGEST_US else 0.0
        began_us = (rows[-1]["done_us"] if rows else 0.0) + gap_us
        rows.append(
            {
                "step": grant.step,
                "rows": len(grant.slots),
                "tokens": int(grant.num_computed),
                "runs": ("eager" if step.captured is None else "graph") + ", attended" * (step.turn is None),
                "began_us": began_us,
                "done_us": began_us + step.done.us_since(step.began),
                "gap_us": gap_us,
            }
        )
        note(gaps, step, before, tokens)

    IdleGaps.note = note_too  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        IdleGaps.note = note  # type: ignore[method-assign]


def summed(rows: Sequence[Row]) -> Iterator[Row]:
    """By how steps ran, and whether they had prompts: how many, how long together, and the gaps before them."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["runs"], "decode" if row["rows"] == row["tokens"] else "mixed"].append(row)
    for (runs, what), group in groups.items():
        took_us = [row["done_us"] - row["began_us"] for row in group]
        yield {
            "name": f"{what} steps, {runs}",
            "us": statistics.median(took_us),
            "count": len(group),
            "seconds": sum(took_us) / 1e6,
            "gap_seconds": sum(row["gap_us"] for row in group) / 1e6,
            "median_gap_us": statistics.median(row["gap_us"] for row in group),
        }
