"""The model of an asynchronous device: both phases of a step.

Most steps are only submitted: their input, and the parameters that choose their tokens, are on the device already. Some
steps are *attended* (see `step_submission.py`). These have drafts, a pooled sequence, a scored prompt, or a row whose
choice needs the host: a grammar, a thinking budget, allowed tokens, bad words, or a user's logits processor. Attended
steps run by the plain runner and sampler. The tokens are the same either way; only the timing differs.

NOTE: one such row makes the whole step attended. All of its rows are computed without a CUDA graph, after all earlier
steps and before any later one, as with one step in flight. Only the computation of masks then overlaps.
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
    """Both phases of a step.

    All methods run on the device thread, except `prepare` (event loop) and `use` (start-up). `sampler` also records the
    tokens that the device has chosen.
    """

    def __init__(
        self, line: StepLine, work: TorchWork, runner: ModelRunner, sampler: Sampler, choosing: KernelChoosing
    ) -> None:
        self.line = line
        self.runner = runner
        self.sampler = sampler
        self.num_attended = 0  # steps
        self._work, self._choosing = work, choosing

    def prepare(self, started: Sequence[Started]) -> None:
        """As `Sampler.prepare`. Called on the event loop."""
        self.sampler.prepare(started)

    def use(self, processor: LogitsProcessor) -> None:
        """As `Sampler.use`."""
        self.sampler.use(processor)

    def forward(self, grant: StepGrant) -> Step:
        """Submits a step up to its logits; computes the logits, if the step is attended."""
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
        """Submits the rest of a step; samples it, if attended.

        Returns the step, on which `LateDevice` waits.
        """
        if step.logits is None:
            return self.line.sample(grant, step)
        tokens = self.sampler.choose(grant, step.logits)
        positions = self.sampler.table.num_prompt[tokens.slots] + tokens.places
        self._work.note(tokens.slots, positions, tokens.token_ids, tokens.finishes)
        return self.line.attended(step, tokens)

    def _kind(self, grant: StepGrant) -> int | None:
        """The kind of sampling by which the device chooses the step's tokens; None: attended."""
        if grant.drafts is not None or self.runner.wants_more(grant):
            return None
        return self._choosing.kind(grant.slots[grant.is_sampled])
