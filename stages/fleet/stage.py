"""The stages dispatch and merge: where the pipeline of a front process spreads over engine processes, and joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Never

from ...runtime.stage import Context, Outlet, Stage
from ..messages import StepTokens, TokenRequest
from .core_set import CoreSet
from .merged_channel import CoreTokens
from .traffic.shadow_copies import ShadowCopies


class Dispatch(Stage[TokenRequest, Never]):
    """Sends each prompt to an engine process, see `CoreSet`. Waits only while none takes it."""

    def __init__(self, cores: CoreSet) -> None:
        self._cores = cores
        self._context: Context | None = None
        self._waits = False

    @property
    def waits_for(self) -> str | None:
        return "schedule" if self._waits else None

    async def setup(self, context: Context) -> None:
        self._context = context

    async def handle(self, batch: Sequence[TokenRequest], out: Outlet[Never]) -> None:
        assert self._context is not None
        for request in batch:
            while self._context.is_live(request.request_id) and not self._cores.place(request):
                self._waits = True
                try:
                    await self._cores.wait()
                finally:
                    self._waits = False


class Merge(Stage[CoreTokens, StepTokens]):
    """Joins the steps of all engine processes, in the order of their arrival. Each has `num_slots` slots of its own.

    A sequence that moves to another process leaves its slot, as after a preemption. Detokenize drops tokens whose place
    it has seen.
    """

    def __init__(
        self, num_slots: int, on_answer: Callable[[int], object] = int, copies: ShadowCopies | None = None
    ) -> None:
        """`on_answer` is called with the number of tokens of each answer that ends. `copies` are taken out."""
        self._num_slots, self._on_answer, self._copies = num_slots, on_answer, copies

    async def handle(self, batch: Sequence[CoreTokens], out: Outlet[StepTokens]) -> None:
        for item in batch:
            tokens: StepTokens | None = item.tokens
            if self._copies is not None and self._copies.is_watching:
                tokens = self._copies.take(item.core, item.tokens)
            if tokens is None:
                continue
            if tokens.finishes.any():
                for place in tokens.places[tokens.finishes != 0].tolist():
                    self._on_answer(place + 1)
            out.send(self.shifted(tokens, item.core * self._num_slots) if item.core else tokens)

    @staticmethod
    def shifted(step: StepTokens, by: int) -> StepTokens:
        """The step with all its slots moved."""
        return StepTokens(  # spelled out, as `replace` takes twice as long
            step.step,
            step.slots + by,
            step.sequence_ids,
            step.places,
            step.token_ids,
            step.finishes,
            tuple(replace(one, slot=one.slot + by) for one in step.started) if step.started else (),
            step.logprobs,
            {slot + by: pooled for slot, pooled in step.pooled.items()} if step.pooled else step.pooled,
            step.prompt_logprobs,
            step.progress,
            step.began_s,
            step.grammar_us,
        )
