"""Who goes first, who gives way, and who is let in: the part of scheduling that one may want otherwise.

    class ShortestPromptFirst(Policy):
        def weight(self, sequence: Sequence) -> float:
            return sequence.num_prompt

    millrace serve --scheduler my_package.my_module:ShortestPromptFirst

Knows sequences. Refuses to know steps, blocks by number, and the device: the scheduler's books are right whatever a
policy says, and a poor policy makes things slow, not wrong.
"""

from __future__ import annotations

import importlib

from ..config import EngineConfig
from ..errors import ConfigError
from .sequence import Sequence


class Policy:
    """By priority (lower first), then first come, first served; what is swapped out before what is new.

    Subclass it and change what you like. One is made per engine, without arguments. Answers must follow from the
    arguments and from what it was told before: no clock, no dice, so that a recording replays.
    """

    def on_add(self, sequence: Sequence) -> None:
        """A sequence arrived."""

    def on_end(self, sequence: Sequence) -> None:
        """A sequence is over, for whatever reason."""

    def weight(self, sequence: Sequence) -> float:
        """Where it stands: lower is served first, and of two that weigh the same the one that came first. Asked when
        the sequence begins to wait and when it gets a slot. Who is served last gives way first when blocks run out."""
        return sequence.priority

    def rank(self, sequence: Sequence) -> tuple[float, bool, float, int]:
        """Its place in the line of those that wait for a slot; lower is let in first. (The steps of a beam search have
        its arrival, and so its place.)"""
        return (self.weight(sequence), not sequence.num_swapped, sequence.arrival_s, sequence.sequence_id)

    def is_better(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether `waiting` may take the slot and the blocks of `running`. Say so of strictly better ones only."""
        return waiting.priority < running.priority

    def may_enter(self, first: Sequence, num_blocks: int, num_spare: int) -> bool:
        """Whether the first in line may have a slot. It needs `num_blocks` blocks to begin with; `num_spare` are
        likely to be left over by those that run. Not asked while nobody runs."""
        return num_blocks <= num_spare


class Fifo(Policy):
    """First come, first served; priorities count for nothing."""

    def weight(self, sequence: Sequence) -> float:
        return 0.0

    def is_better(self, waiting: Sequence, running: Sequence) -> bool:
        return False


class AgeingPriority(Policy):
    """By priority, but who waits becomes better: by one for each `ageing_s` seconds, so that nobody starves.

    What counts is the difference between two arrivals, so it needs no clock: it is as if a request of priority p had
    come `p * ageing_s` later.
    """

    def __init__(self, ageing_s: float) -> None:
        self.ageing_s = ageing_s

    def weight(self, sequence: Sequence) -> float:
        return sequence.arrival_s + sequence.priority * self.ageing_s

    def is_better(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.priority < running.priority and self.weight(waiting) < self.weight(running)


BUILT_IN = {"priority": Policy, "fifo": Fifo}


def make_policy(config: EngineConfig) -> Policy:
    """The policy that `config.scheduler` names: "priority", "fifo" or "package.module:Class".

    Raises `ConfigError` if there is no such class, or it is no `Policy`.
    """
    name = config.scheduler
    if name == "priority" and config.priority_ageing_s is not None:
        return AgeingPriority(config.priority_ageing_s)
    made = BUILT_IN[name]() if name in BUILT_IN else _load(name)
    if config.priority_ageing_s is not None:
        raise ConfigError(f"priority_ageing_s = {config.priority_ageing_s}: only scheduler = priority knows ageing")
    return made


def _load(name: str) -> Policy:
    where, _, class_name = name.partition(":")
    if not where or not class_name:
        raise ConfigError(f"scheduler = {name!r}: must be {', '.join(BUILT_IN)} or package.module:Class")
    try:
        found = getattr(importlib.import_module(where), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"scheduler = {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"scheduler = {name!r}: must be a subclass of millrace.stages.schedule.policy.Policy")
    try:
        return found()
    except TypeError as error:
        raise ConfigError(f"scheduler = {name!r}: is made without arguments, and that failed: {error}") from error
