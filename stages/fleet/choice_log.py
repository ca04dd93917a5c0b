"""The last choices of an engine process for a request, with what was known of each at that moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .dispatcher import CoreLoad

MAX_CHOICES = 256


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """One choice. Scores are in seconds, and the least wins but for what is close; empty: by the least work."""

    request_id: str
    engine: int
    at_s: float
    num_prompt: int  # tokens
    loads: Sequence[CoreLoad]  # of all that could take the request
    scores: Mapping[int, float]
    cached: Mapping[int, int]  # tokens of the prompt, by engine

    def to_json(self) -> dict[str, Any]:
        """As pages show it."""
        engines = [
            {
                "index": load.core,
                "score_s": None if (score := self.scores.get(load.core)) is None else round(score, 4),
                "num_cached_tokens": self.cached.get(load.core, 0),
                "work": load.work,
                "num_requests": load.num_requests,
            }
            for load in sorted(self.loads, key=lambda load: load.core)
        ]
        found = {"request_id": self.request_id, "engine": self.engine, "at_s": round(self.at_s, 3)}
        return found | {"num_prompt_tokens": self.num_prompt, "engines": engines}


class ChoiceLog:
    """Keeps the last `MAX_CHOICES`. A note costs about a microsecond: nothing is copied."""

    def __init__(self) -> None:
        self._choices: deque[EngineChoice] = deque(maxlen=MAX_CHOICES)

    def note(self, choice: EngineChoice) -> None:
        """A prompt was sent to an engine process."""
        self._choices.append(choice)

    def newest(self, count: int = MAX_CHOICES) -> list[EngineChoice]:
        """The last ones, the newest first."""
        return list(self._choices)[: -count - 1 : -1]
