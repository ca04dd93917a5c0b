"""The scheduling policy: order of service, preemption and admission. Users may replace it:

    class ShortestPromptFirst(Policy):
        def weight(self, sequence: Sequence) -> float:
            return sequence.num_prompt

    millrace serve --scheduler my_package.my_module:ShortestPromptFirst

The scheduler stays correct whatever a policy returns: a poor policy makes the engine slow, not wrong.
"""

from __future__ import annotations

import importlib

from ..config import EngineConfig
from ..errors import ConfigError
from .sequence import Sequence


class Policy:
    """By priority (lower first), then by arrival.

    At equal priority, swapped sequences go before new ones. Subclass it and override any method. The engine creates one
    instance, without arguments. NOTE: results must depend only on the arguments and on earlier calls, not on a clock or
    random numbers, or recordings do not replay.
    """

    def on_add(self, sequence: Sequence) -> None:
        """Called when a sequence arrives."""

    def on_end(self, sequence: Sequence) -> None:
        """Called when a sequence ends, for any reason."""

    def weight(self, sequence: Sequence) -> float:
        """The order of service: lower is served first; equal weights are served by arrival.

        Called when the sequence begins to wait and when it gets a slot. The sequence served last is preempted first
        when blocks run out.
        """
        return sequence.priority

    def rank(self, sequence: Sequence) -> tuple[float, bool, float, int]:
        """The order in the waiting queue; lower is admitted first.

        The steps of a beam search keep its arrival time, and so its rank.
        """
        return (self.weight(sequence), not sequence.num_swapped, sequence.arrival_s, sequence.sequence_id)

    def is_better(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether `waiting` may preempt `running`.

        NOTE: True only if strictly better, else they preempt in turn.
        """
        return waiting.priority < running.priority

    def may_enter(self, first: Sequence, num_blocks: int, num_spare: int) -> bool:
        """Whether the first waiting sequence may have a slot. Not called while no sequence runs.

        It needs `num_blocks` blocks to start; the running sequences are likely to leave `num_spare`. Of several kinds
        of memory, these are blocks of the kind that keeps all tokens, with those of the others beside them.
        """
        return num_blocks <= num_spare


class Fifo(Policy):
    """First come, first served. Ignores priorities."""

    def weight(self, sequence: Sequence) -> float:
        return 0.0

    def is_better(self, waiting: Sequence, running: Sequence) -> bool:
        return False


class AgeingPriority(Policy):
    """By priority, improved by one level per `ageing_s` of waiting: no request starves.

    It needs no clock, since only the difference of two arrival times counts: a request of priority p ranks as if it had
    arrived `p * ageing_s` later.
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

    Raises `ConfigError` if the class does not exist or is not a `Policy`.
    """
    name = config.scheduler
    if name == "priority" and config.priority_ageing_s is not None:
        return AgeingPriority(config.priority_ageing_s)
    made = BUILT_IN[name]() if name in BUILT_IN else _load(name)
    if config.priority_ageing_s is not None:
        raise ConfigError(f"priority_ageing_s = {config.priority_ageing_s}: must be unset unless scheduler = priority")
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
        raise ConfigError(f"scheduler = {name!r}: must be constructible without arguments: {error}") from error
