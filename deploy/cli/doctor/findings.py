"""A finding of `millrace doctor`, and its line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
COLOURS: dict[Status, int] = {"ok": 32, "warn": 33, "fail": 31}
WIDTH = 16  # of names


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    status: Status
    text: str
    next_step: str = ""  # of a warning or failure

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "text": self.text, "next_step": self.next_step}


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def warn(name: str, text: str, next_step: str) -> Finding:
    return Finding(name, "warn", text, next_step)


def fail(name: str, text: str, next_step: str) -> Finding:
    return Finding(name, "fail", text, next_step)


def to_text(finding: Finding, *, has_colours: bool) -> str:
    """The line of a finding, and below it what to do."""
    status = f"{finding.status:<4}"
    if has_colours:
        status = f"\x1b[{COLOURS[finding.status]}m{status}\x1b[0m"
    line = f"{status}  {finding.name:<{WIDTH}}{finding.text}"
    return f"{line}\n{'':6}{'':{WIDTH}}-> {finding.next_step}" if finding.next_step else line
