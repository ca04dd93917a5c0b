"""The table of models in markdown: which backend serves which type, from the rows and the specs of their families."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from millrace.model.backend_gaps import Backend, missing
from millrace.model.errors import CheckpointError
from millrace.model.families.registry import MODULES, WRAPPERS, parse_config
from tests.families.checkpoint import make_config, rewritten
from tests.families.row import Row
from tests.families.zoo import by_type, quiet

BACKENDS: tuple[Backend, ...] = ("native", "torch", "triton")


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the table."""
    own = [row for row in rows if row.model_type in {*MODULES, *WRAPPERS}]
    yield "| `model_type` | native | torch | Triton | through transformers |"
    yield "|---|---|---|---|---|"
    for model_type, its_rows in sorted(by_type(own)):
        cells = [_cell(its_rows, backend) for backend in BACKENDS]
        yield f"| `{model_type}` | {' | '.join(cells)} | {_fallback(its_rows)} |"
    others = [row for row in rows if row not in own]
    yield ""
    yield f"Through transformers alone: {_names(row for row in others if 'fallback' in row.by)}."
    yield ""
    yield f"Refused: {_names(row for row in others if not row.by)}."


def _cell(rows: Sequence[Row], backend: Backend) -> str:
    gaps = [_gaps(row, backend) for row in rows]
    lacking = dict.fromkeys(gap for found in gaps for gap in found)
    if not lacking:
        return "yes"
    return f"{'no' if all(gaps) else 'partly'}: {'; '.join(lacking)}"


def _gaps(row: Row, backend: Backend) -> list[str]:
    """What a backend lacks of a row, or the message of its family."""
    with quiet():
        keys = json.loads(make_config(row).to_json_string())
    try:
        return missing(parse_config(rewritten(row, keys), "config.json"), backend)
    except CheckpointError as error:
        return [str(error).removeprefix("config.json: ")]


def _fallback(rows: Sequence[Row]) -> str:
    served = ["fallback" in row.by for row in rows]
    return "yes" if all(served) else "partly" if any(served) else "no"


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{name}`" for name in sorted({row.model_type for row in rows})) or "none"
