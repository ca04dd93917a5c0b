"""What a run of the families found, as lines and as a summary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.families.row import Row
from tests.families.ways import Outcome
from tests.families.zoo import Zoo

LEAST_MARGIN = 2e-4  # of the best logit over the second, in standard deviations: 100 times what float32 rounds
LEAST_DISTINCT = 10  # tokens of an answer


class Report:
    """Outcomes, as they come."""

    def __init__(self) -> None:
        self.states: Counter[tuple[str, str]] = Counter()  # (backend, state)
        self.unexpected: list[str] = []

    def add(self, row: Row, backend: str, outcomes: Mapping[str, Outcome]) -> str:
        """Note the outcomes of a row by its ways; returns the lines to show."""
        worst = next(
            (
                found
                for state in ("failed", "differs", "refused")
                for found in outcomes.values()
                if found.state == state
            ),
            Outcome("equal"),
        )
        self.states[backend, worst.state] += 1
        path = {"auto": row.by[:1], "transformers": ("fallback",)}.get(backend, ("own",))
        is_expected = bool(path) and path[0] in row.by
        if worst.state in ("equal", "refused") and is_expected != (worst.state == "equal"):
            self.unexpected.append(f"{row.name} ({backend}): {worst.state}")
        head = f"{row.name:28} {row.model_type:18} {backend:12} "
        if worst.state == "equal":
            return f"{head}equal    {' '.join(outcomes)}"
        if worst.state == "refused":
            return f"{head}refused  {worst.detail}"
        lines = [f"{head}{worst.state}"]
        return "\n".join([*lines, *(f"    {way:10} {found.state:8} {found.detail}" for way, found in outcomes.items())])

    def summary(self, seconds: float) -> str:
        """Counts for each backend, and where a row is served or refused against its description."""
        lines = [""]
        for backend in dict.fromkeys(backend for backend, _ in self.states):
            counts = [f"{self.states[backend, state]} {state}" for state in ("equal", "differs", "failed", "refused")]
            lines.append(f"{backend}: {', '.join(counts)}")
        if self.unexpected:
            lines += [f"{len(self.unexpected)} not as the rows say:", *(f"    {line}" for line in self.unexpected)]
        return "\n".join([*lines, f"{seconds:.0f} s"])

    @property
    def status(self) -> int:
        """The exit status: 1 if a row differs or failed."""
        return int(any(state in ("differs", "failed") for _, state in self.states))


def list_rows(zoo: Zoo, rows: Sequence[Row]) -> int:
    """Show each row's margin and number of tokens; returns 1 if one is too small."""
    bad = 0
    for row in rows:
        began = time.monotonic()
        answers = zoo.entry(row).answers
        margin, distinct = min(one.margin for one in answers), [one.num_distinct for one in answers]
        is_good = not row.by or (margin >= LEAST_MARGIN and min(distinct) >= LEAST_DISTINCT)
        bad += not is_good
        served = "+".join(row.by) or "neither"
        tail = f"{time.monotonic() - began:.2f} s{'' if is_good else '  BAD'}"
        print(
            f"{row.name:28} {row.model_type:18} {served:13} margin {margin:.1e} distinct {distinct} {tail}", flush=True
        )
    print(f"{len(rows)} rows of {len({row.model_type for row in rows})} types, {bad} bad")
    return int(bad > 0)
