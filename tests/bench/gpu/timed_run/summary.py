"""What a run found, from its rows: a table with predictions beside measurements, and the results as one object.

A prediction is of an H200. On another card it is the same share of that card's floor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "results"
PREDICTIONS = RESULTS / "predictions-gpu-h200.json"
TROUBLE = ("wrong", "oom", "left_out", "failed", "stopped", "skipped")
UNITS = {"us": ("us", 1.0), "step_us": ("ms", 1e-3), "tokens_per_s": ("tok/s", 1.0), "ratio": ("x", 1.0)}
MOST_SHOWN = 40  # rows of a part: the others are in the file


def told(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of the run as one object: of each part its rows and complaints, and what became of it. A part that
    was run twice has those of its last time."""
    found: dict[str, Any] = {"parts": {}}
    for row in rows:
        name = row["part"]
        kind, value = next((kind, value) for kind, value in row.items() if kind not in ("t", "part"))
        if name == "run":
            found |= value if kind == "run" else {"seconds": value}
        elif kind in ("device", "versions"):
            found[kind] = value
        else:
            parts = found["parts"]
            if kind in ("began", "skipped") or name not in parts:
                parts[name] = {"rows": [], "wrong": []}
            _take(parts[name], kind, value)
    for entry in found["parts"].values():
        if "began" in entry and not {"seconds", "failed", "stopped"} & entry.keys():
            entry["stopped"] = "with the run"
    return found


def _take(entry: dict[str, Any], kind: str, value: Any) -> None:
    if kind in ("row", "wrong"):
        entry["rows" if kind == "row" else kind].append(value)
    elif kind in ("oom", "left_out") and isinstance(value, dict):
        entry.setdefault(kind, []).append(value)
    elif kind == "oom":
        entry["failed"] = value
    else:
        entry["seconds" if kind == "ended" else kind] = value


def is_well(found: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong and no part failed; what was skipped or left out was not asked."""
    return not any(part["wrong"] or {"failed", "stopped"} & part.keys() for part in found["parts"].values())


def predictions(path: Path = PREDICTIONS) -> dict[tuple[str, str], dict[str, Any]]:
    """By part and name of the row."""
    entries = json.loads(path.read_text())["predictions"] if path.exists() else []
    return {(entry["part"], entry["name"]): entry for entry in entries}


def table(found: Mapping[str, Any], predicted: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[str]:
    """The lines of the summary."""
    yield f"# {found.get('device', 'no device')}: {found.get('seconds', '?')} s of {found.get('budget_s', '?')}"
    for name, part in found["parts"].items():
        took = f"{part['seconds']} s" if "seconds" in part else "not ended"
        yield f"# {name}, {took}{_health(part)}"
        rows = [row for row in part["rows"] if row.get("is_shown", True)]
        for row in rows[:MOST_SHOWN]:
            yield "  " + line(row, predicted.get((name, str(row.get("name", "")))))
        if len(rows) > MOST_SHOWN:
            yield f"  {len(rows) - MOST_SHOWN} more rows in the file"
        for kind in TROUBLE:
            said = part.get(kind, [])
            for each in said if isinstance(said, list) else [said]:
                what = f"{each['what']}: {each['why']}" if isinstance(each, dict) else each
                yield f"  {kind.upper()}: {what}"


def line(row: Mapping[str, Any], predicted: Mapping[str, Any] | None) -> str:
    """A row: its name, what was measured, the floor and the share of it, the prediction; and whatever else it has."""
    shown = [str(row["name"])] if "name" in row else []
    field = next((field for field in UNITS if field in row), None)
    if field is not None:
        unit, scale = UNITS[field]
        shown.append(f"{_short(scale * row[field])} {unit}")
        if "floor_us" in row and field != "tokens_per_s":
            shown.append(f"floor {_short(scale * row['floor_us'])}, share {row['floor_us'] / row[field]:.2f}")
        if predicted is not None:
            low, high = (scale * value * _scale(row, predicted) for value in predicted["between"])
            before = f", before {_short(scale * predicted['before'])}" if "before" in predicted else ""
            shown.append(f"predicted {_short(low)} to {_short(high)}{before}")
    rest = {key: value for key, value in row.items() if key not in ("name", field, "floor_us", "floor_share")}
    shown += [f"{key} {_short(value)}" for key, value in rest.items()]
    return "  ".join(shown)


def _scale(row: Mapping[str, Any], predicted: Mapping[str, Any]) -> float:
    """From an H200 to the card of this row."""
    if "floor_us" not in row or "floor_us" not in predicted:
        return 1.0
    return float(row["floor_us"] / predicted["floor_us"])


def _health(part: Mapping[str, Any]) -> str:
    """Of the clock, the power and the temperature."""
    health = part.get("health", {})
    if "clocks.sm" not in health:
        return ""
    return (
        f", {health['clocks.sm']} of {health['clocks.max.sm']} MHz, {health['power.draw']} W, "
        f"{health['temperature.gpu']} C, slowed down by {health['clocks_event_reasons.active']}"
    )


def _short(value: object) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1e4
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )
