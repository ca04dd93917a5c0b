"""A model on a device that runs beside the host: what the execute and the sample stage hand their steps to.

Most steps are submitted and no more: their input comes from the device, and so does what chooses their tokens. Some are
*attended*, see `step_submission.py`: those with a row whose choice needs the host (a grammar, a thinking budget,
allowed tokens, bad words, a user's processor), with drafts, with a pooled sequence, or with a prompt that is scored.
They run as on any device, by runner and sampler, and between them and the others nothing differs but the time.

NOTE: one such row takes the whole step along: every row beside it is computed without a graph, behind all earlier steps
and before any later one, as with one step in flight. What overlaps then is the making of masks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...execute.model_runner import ModelRunner
from ...messages import Started, StepGrant
from ...sample.logits_processor import LogitsProcessor
from ...sample.sampler import Sampler
from .device_work import TorchWork
from .step_submission import Step, StepLine
from .triton_chooser import SCORED, KernelChoosing


class LateModel:
    """Both phases of a step, on the device's thread. `sampler` keeps the books of what was told, too."""

    def __init__(
        self, line: StepLine, work: TorchWork, runner: ModelRunner, sampler: Sampler, choosing: KernelChoosing
    ) -> None:
        self.line = line
        self.runner = runner
        self.sampler = sampler
        self.num_attended = 0  # steps
        self._work, self._choosing = work, choosing

    def prepare(self, started: Sequence[Started]) -> None:
        """As `Sampler.prepare`."""
        self.sampler.prepare(started)

    def use(self, processor: LogitsProcessor) -> None:
        """As `Sampler.use`."""
        self.sampler.use(processor)

    def forward(self, grant: StepGrant) -> Step:
        """Submits a step up to its logits; computes them, if it is attended."""
        self.runner.take_news(grant)
        for started in grant.started:
            self.sampler.start(started)
        kind = self._kind(grant)
        if kind is not None:
            return self.line.forward(grant, kind, is_scored=kind >= SCORED)
        step = self.line.attend(grant)
        self._work.tell_newest(self.runner.last_tokens)
        step.logits = self.runner.compute(grant)
        self.num_attended += 1
        return step

    def sample(self, grant: StepGrant, step: Step) -> Any:
        """The rest of it. Returns the step, of which a `LateDevice` makes the tokens."""
        if step.logits is None:
            return self.line.sample(grant, step)
        tokens = self.sampler.choose(grant, step.logits)
        positions = self.sampler.table.num_prompt[tokens.slots] + tokens.places
        self._work.note(tokens.slots, positions, tokens.token_ids, tokens.finishes)
        return self.line.attended(step, tokens)

    def _kind(self, grant: StepGrant) -> int | None:
        """How the device chooses all of the step's tokens; None: the step is attended, whole, for the sake of the rows
        that need it."""
        if grant.drafts is not None or self.runner.wants_more(grant):
            return None
        return self._choosing.kind(grant.slots[grant.is_sampled])
