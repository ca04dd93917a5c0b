"""Logits processors of settings: imported, made, named, and applied to the rows that ask for each.

--logits-processor my_package.processors:NoRepeat,window=8
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...runtime.env.log import get_logger
from ..errors import ConfigError
from ..messages import Indices, Started
from ..plugins import find_plugin, make_plugin, parse_plugins
from .logits_processor import LogitsProcessor

GROUP = "millrace.logits_processors"  # of entry points

log = get_logger("millrace.stages")


def load_processors(settings: Sequence[str]) -> list[LogitsProcessor]:
    """The processors that the setting `logits_processor` names. Raises `ConfigError`."""
    made = []
    for spec in parse_plugins("logits_processor", settings, has_place=False):
        where, found = f"logits_processor = {spec.text}", find_plugin("logits_processor", spec.target, GROUP)
        if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
            base = "millrace.LogitsProcessor"
            raise ConfigError(f"{where}: {spec.target} must be a subclass of {base}, and is {found!r:.64}")
        processor: LogitsProcessor = make_plugin("logits_processor", spec, found)
        if name := spec.name or ("" if ":" in spec.target else spec.target):
            processor.name = name
        made.append(processor)
    return made


def check_processors(processors: Sequence[LogitsProcessor]) -> None:
    """Raises `ConfigError` if they cannot be used together, or here."""
    names = [processor.name for processor in processors]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"logits_processor: two are called {name}; add ,name=NAME to one of them")
    if processors and find_spec("torch") is None:
        raise ConfigError("logits_processor: needs PyTorch, which is not installed; pip install torch, or leave it out")


class ProcessorChain(LogitsProcessor):
    """Several processors, in their order, each for the rows that it processes."""

    def __init__(self, processors: Iterable[LogitsProcessor]) -> None:
        self.processors = tuple(processors)
        self.always = any(one.always for one in self.processors)  # type: ignore[misc]
        self._slots: tuple[set[int], ...] = tuple(set() for _ in self.processors)  # that each processes

    def start(self, started: Started) -> bool:
        asked, slot = started.params.extra_args, started.slot
        for processor, slots in zip(self.processors, self._slots, strict=True):
            with _logged(processor):
                is_processed = (processor.always or processor.name in asked) and processor.start(started)
            (slots.add if is_processed else slots.discard)(slot)
        return any(slot in slots for slots in self._slots)

    def process(self, slots: Indices, logits: Any) -> None:
        for processor, own in zip(self.processors, self._slots, strict=True):
            rows = _rows(slots, own)
            with _logged(processor):
                if len(rows) == len(slots):
                    processor.process(slots, logits)
                elif len(rows):
                    some = logits[rows]  # a copy
                    processor.process(slots[rows], some)
                    logits[rows] = some

    def note(self, slots: Indices, token_ids: Indices) -> None:
        for processor, own in zip(self.processors, self._slots, strict=True):
            if len(rows := _rows(slots, own)):
                with _logged(processor):
                    processor.note(slots[rows], token_ids[rows])


@contextmanager
def _logged(processor: LogitsProcessor) -> Iterator[None]:
    """Logs what a processor raises, with its traceback: the failed step names no processor."""
    try:
        yield
    except Exception as error:
        log.error("logits_processor.failed", name=processor.name, error=type(error).__name__, exc_info=error)
        raise


def _rows(slots: Indices, own: set[int]) -> Indices:
    """The rows of `slots` [n] that are among `own`."""
    return np.flatnonzero([slot in own for slot in slots.tolist()]) if own else slots[:0]
