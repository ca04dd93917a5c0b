"""Logs throughput, queue lengths and cache use every few seconds while requests run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from ...runtime.env.log import get_logger

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

NumTokens = Callable[["Engine"], tuple[int, int]]  # prompt tokens and generated tokens so far

log = get_logger("millrace.deploy")


@dataclass(frozen=True, slots=True)
class _Counts:
    num_prompt: int
    num_generated: int
    num_queries: int
    num_hits: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int
    idle_us: int  # of the device, between steps

    def since(self, last: _Counts) -> _Counts:
        """What was counted since. A count that fell began anew, in an engine process that replaced another."""
        before_and_now = zip(astuple(last), astuple(self), strict=True)
        return _Counts(*(now - before if now >= before else now for before, now in before_and_now))


class StatsLine:
    """Writes the `engine.stats` log line of one engine every `interval_s`; 0: never."""

    def __init__(self, engine: Engine, num_tokens: NumTokens, interval_s: float) -> None:
        self._engine = engine
        self._num_tokens = num_tokens
        self._interval_s = interval_s
        self._last_s = engine.pipeline.env.now()
        self._last = self._counts()

    def check(self) -> None:
        """Logs if `interval_s` have passed and requests ran meanwhile.

        Call it a few times in each interval.
        """
        passed_s = (now_s := self._engine.pipeline.env.now()) - self._last_s
        if passed_s < self._interval_s or not self._interval_s:
            return
        last, counts = self._last, self._counts()
        self._last, self._last_s = counts, now_s
        if counts != last or (self._engine.pipeline.exit is not None and self._engine.pipeline.exit.live):
            self._log(counts.since(last), passed_s)

    def _log(self, counts: _Counts, passed_s: float) -> None:
        in_core: dict[str, float | None] = {}
        if (core := self._engine.status().core) is not None:
            scheduler = core.scheduler
            in_core = {
                "num_running": scheduler.num_running,
                "num_waiting": scheduler.num_waiting,
                "num_swapped": scheduler.num_swapped,
                "kv_usage": round(core.cache.used_share, 4),
                "prefix_hit_rate": round(counts.num_hits / counts.num_queries, 4) if counts.num_queries else None,
                "num_preemptions": counts.num_preemptions,
            }
        if core is not None and core.idle_gaps_us is not None:
            in_core["device_idle"] = round(counts.idle_us / 1e6 / passed_s, 4)
        if counts.num_draft_tokens:
            in_core["num_draft_tokens"] = counts.num_draft_tokens
            in_core["draft_acceptance_rate"] = round(counts.num_accepted_tokens / counts.num_draft_tokens, 4)
        log.info(
            "engine.stats",
            prompt_tokens_per_s=round(counts.num_prompt / passed_s, 1),
            generated_tokens_per_s=round(counts.num_generated / passed_s, 1),
            **in_core,
        )

    def _counts(self) -> _Counts:
        num_prompt, num_generated = self._num_tokens(self._engine)
        core = self._engine.status().core
        if core is None:
            return _Counts(num_prompt, num_generated, 0, 0, 0, 0, 0, 0)
        cache, scheduler, idle = core.cache.prefixes, core.scheduler, core.idle_gaps_us
        queries, hits = (0, 0) if cache is None else (cache.num_queries, cache.num_hits)
        drafts = (scheduler.drafts.num_draft_tokens, scheduler.drafts.num_accepted_tokens)
        idle_us = 0 if idle is None else idle.total
        return _Counts(num_prompt, num_generated, queries, hits, scheduler.num_preemptions, *drafts, idle_us)
