"""Plans: what is struck and when, from a file, by name, or drawn from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ....stages.errors import ConfigError
from .fleet import FleetSize, engine_name, front_name

KINDS = {  # kind -> what it may strike
    "kill": "front engine",
    "stop": "front engine",
    "drain": "engine",
    "upgrade": "front engine",
    "fill-disk": "front engine",
    "cut": "front engine link",
    "half": "front engine link",
    "stall": "front engine link",
    "delay": "front engine link",
}
STRIKE = re.compile(r"(?P<kind>[a-z-]+) (?P<target>\S+?)@(?P<at>\d+(\.\d+)?)(\+(?P<for>\d+(\.\d+)?))?")
TARGET = re.compile(r"(?:front(\d+))?-?(?:engine(\d+))?")
FORM = "KIND TARGET@SECONDS, and +SECONDS for how long, such as: stop engine1@5+3, cut front0-engine2@9+2"

FIRST_S, PAUSES_S = 1.0, (1.5, 5.0)  # of a drawn plan: before the first strike, and between two
SHORT_S = (0.5, 4.0)  # how long a strike lasts
QUIET_S = 10.0  # before the first strike of an upgrade
LONG_S = 13.0  # longer than the silence after which a link counts as lost


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault. `front` and `engine`: what it strikes; both: the link between them. Seconds from the first request."""

    kind: str
    front: int | None
    engine: int | None
    at_s: float
    for_s: float = 2.0

    @property
    def target(self) -> str:
        parts = [] if self.front is None else [front_name(self.front)]
        return "-".join(parts + ([] if self.engine is None else [engine_name(self.engine)]))

    def __str__(self) -> str:
        return f"{self.kind} {self.target}@{self.at_s:g}+{self.for_s:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does.

    num_requests   the run ends after so many, and after its strikes; None: after its time
    in_turn        each strike waits for the end of the one before it, and the run ends after the last one
    wall_clocks    seconds by which the wall clocks of the processes are wrong, engines first
    drops_fields   each second link passes as between adjacent versions: fields with defaults are not known
    """

    strikes: tuple[Strike, ...]
    rate: float | None = None  # requests a second of all clients; None: as asked for
    num_requests: int | None = None
    in_turn: bool = False
    wall_clocks: tuple[int, ...] = ()
    drops_fields: bool = False


def parse_strike(text: str, size: FleetSize) -> Strike:
    """Raises `ConfigError`."""
    found = STRIKE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"strike {text!r}: must be {FORM}")
    kind, target = found["kind"], TARGET.fullmatch(found["target"])
    if kind not in KINDS:
        raise ConfigError(f"strike {text!r}: the kinds are {', '.join(KINDS)}")
    front, engine = (None, None) if target is None else (int(one) if one else None for one in target.groups())
    what = "link" if front is not None and engine is not None else "engine" if front is None else "front"
    is_there = (front or 0) < size.num_fronts and (engine or 0) < size.num_engines and (front, engine) != (None, None)
    if not is_there or what not in KINDS[kind].split():
        names = {"front": "frontN", "engine": "engineN", "link": "frontN-engineN"}
        may_be = ", ".join(names[one] for one in KINDS[kind].split())
        raise ConfigError(f"strike {text!r}: in a fleet of {size}, {kind} strikes one of {may_be}")
    return Strike(kind, front, engine, float(found["at"]), float(found["for"] or 2.0))


def read_plan(path: Path, size: FleetSize) -> Plan:
    """A plan from a YAML or JSON file. Raises `ConfigError`."""
    try:
        fields = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}; the plans by name are {', '.join(PLANS)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {path}: no YAML: {error}") from None
    known = {"strikes", "rate", "requests", "in_turn"}
    if not isinstance(fields, dict) or not set(fields) <= known or not isinstance(fields.get("strikes"), list):
        raise ConfigError(f"--plan {path}: must have a list of strikes, and may have rate, requests and in_turn")
    strikes = tuple(parse_strike(str(one), size) for one in fields["strikes"])
    return Plan(
        strikes=strikes,
        rate=_number(path, fields, "rate", float),
        num_requests=_number(path, fields, "requests", int),
        in_turn=bool(fields.get("in_turn", False)),
    )


def _number(path: Path, fields: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = fields.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0):
        raise ConfigError(f"--plan {path}: {name} = {value}: must be a positive number")
    return value


# -- plans by name


def upgrade(size: FleetSize) -> Plan:
    """Replaces each engine and then each front while requests go on, after some seconds of quiet to compare with."""
    targets: list[tuple[int | None, int | None]] = [(None, engine) for engine in range(size.num_engines)]
    targets += [(front, None) for front in range(size.num_fronts)]
    strikes = tuple(Strike("upgrade", *target, 1.0 if place else QUIET_S) for place, target in enumerate(targets))
    return Plan(strikes=strikes, rate=20.0, num_requests=500, in_turn=True)


def partition(size: FleetSize) -> Plan:
    """Cuts the link between each pair and heals it, and then silences it, without a word and for longer than that."""
    pairs = [(front, engine) for front in range(size.num_fronts) for engine in range(size.num_engines)]
    cuts = [Strike("cut", *pair, 1.0, 2.0) for pair in pairs]
    return Plan(strikes=(*cuts, *(Strike("stall", *pair, 1.0, LONG_S) for pair in pairs)), in_turn=True)


def clocks(size: FleetSize) -> Plan:
    """Wall clocks a day apart, and each front's links late by 50 to 500 ms in turn."""
    strikes = tuple(Strike("delay", front, None, 1.0, 6.0) for front in range(size.num_fronts))
    return Plan(strikes=strikes, in_turn=True, wall_clocks=(86_400, -86_400, 3_600, 0, -86_400, 86_400))


def versions(size: FleetSize) -> Plan:
    """As `upgrade`, with links between adjacent versions, which do not know each other's newest fields."""
    plan = upgrade(size)
    return Plan(
        strikes=plan.strikes, rate=plan.rate, num_requests=plan.num_requests, in_turn=plan.in_turn, drops_fields=True
    )


PLANS = {"upgrade": upgrade, "partition": partition, "clocks": clocks, "versions": versions}


def drawn(size: FleetSize, seed: int, minutes: float) -> Plan:
    """The plan of a seed. A strike of one kind or another begins each few seconds; some overlap."""
    draw = random.Random(f"plan {seed}")
    return Plan(strikes=tuple(_drawn(size, draw, 60.0 * minutes)))


def _drawn(size: FleetSize, draw: random.Random, end_s: float) -> Iterator[Strike]:
    at_s = FIRST_S
    while at_s < end_s - max(SHORT_S):
        kind = draw.choice(["kill", "kill", "stop", "drain", "upgrade", "fill-disk", "cut", "half", "stall", "delay"])
        what = draw.choice([one for one in KINDS[kind].split() for _ in range(1 if one == "front" else 3)])
        front = draw.randrange(size.num_fronts) if what != "engine" else None
        engine = draw.randrange(size.num_engines) if what != "front" else None
        is_long = kind in ("stop", "stall") and draw.random() < 0.25 and at_s + LONG_S < end_s
        for_s = LONG_S if is_long else round(draw.uniform(*SHORT_S), 1)
        yield Strike(kind, front, engine, round(at_s, 1), for_s)
        at_s += draw.uniform(*PAUSES_S)
