"""Fault injection: `stage=execute,delay=200ms,rate=0.01` delays one batch in a hundred.

An operator uses it to see how clients, dashboards and alerts react to a fault. Off by default. A fault has one kind:

    delay=200ms  the stage waits this long before it takes the batch
    error        the stage raises `InjectedError` with the batch in hand, and is treated as after any crash
    freeze       the stage never returns from the batch

`rate` is the share of batches that are affected, by default 1. It is drawn from the env's random stream for the stage,
so a seed repeats a run.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .env.env import Env

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
FORM = "stage=NAME,delay=200ms|error|freeze[,rate=0.01]"


class InjectedError(Exception):
    """An error that `--inject` raised in a stage."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one stage."""

    stage: str
    kind: Literal["delay", "error", "freeze"]
    delay_s: float = 0.0
    rate: float = 1.0  # share of batches


def parse_fault(text: str) -> Fault:
    """Parses a fault. ValueError: the message says what is wrong and gives the right form."""
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    kinds = parts.keys() & {"delay", "error", "freeze"}
    unknown = parts.keys() - {"stage", "rate", *kinds}
    if unknown or len(kinds) != 1 or not parts.get("stage"):
        raise ValueError(f"{text!r} is not a fault: must be {FORM}")
    (kind,) = kinds
    if kind != "delay" and parts[kind]:
        raise ValueError(f"{text!r}: {kind} takes no value; must be {FORM}")
    delay_s = _seconds(text, parts["delay"]) if kind == "delay" else 0.0
    return Fault(parts["stage"], kind, delay_s, _share(text, parts.get("rate", "1")))  # type: ignore[arg-type]


class Faults:
    """The faults of one stage."""

    def __init__(self, faults: Sequence[Fault], env: Env) -> None:
        self._faults = faults
        self._env = env
        self._draw = env.random(f"inject.{faults[0].stage}").random
        self.num_struck = 0

    async def strike(self) -> None:
        """Applies the faults. Called before the stage gets each batch."""
        for fault in self._faults:
            if self._draw() >= fault.rate:
                continue
            self.num_struck += 1
            if fault.kind == "error":
                raise InjectedError(f"stage {fault.stage} failed on purpose, by --inject")
            await (self._env.sleep(fault.delay_s) if fault.kind == "delay" else asyncio.Event().wait())


def _seconds(text: str, duration: str) -> float:
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f"{text!r}: delay={duration} is not a duration; must be like 200ms, 1.5s or 50us")
    return float(match[1]) * _SECONDS[match[2]]


def _share(text: str, rate: str) -> float:
    try:
        share = float(rate)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{text!r}: rate={rate} must be above 0 and at most 1, the share of batches to affect")
    return share
