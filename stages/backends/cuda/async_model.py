"""The model of an asynchronous device: both phases of a step.

Most steps are only submitted: their input, and the parameters that choose their tokens, are on the device already.

A row with a grammar, a thinking budget, allowed tokens or bad words makes a step *guided*. The host computes which
tokens these rows may get, from the tokens of the steps before, and uploads it while the forward pass runs. Then it
submits the sampling of all rows, and the next step. So the device waits only if the host takes longer than a forward
pass.

Some steps are *attended* (see `step_submission.py`): the host chooses the tokens of all their rows, by the plain
sampler, and the next step begins when it has. The tokens are the same either way; only the timing differs.

- A user's logits processor makes a step attended. The forward pass is submitted as always.
- A step with a pooled sequence or a scored prompt is computed by the plain runner, without a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...execute.model_runner import ModelRunner
from ...messages import Started, StepGrant
from ...sample.logits_processor import LogitsProcessor
from ...sample.sampler import Sampler
from .device_work import TorchDeviceWork
from .guide_uploads import WriteGuide
from .guide_writer import GuideWriter
from .step_device import ATTENDED
from .step_submission import StepSubmitter, SubmittedStep
from .triton_chooser import SCORED, TritonTokenChooser, is_guided


class AsyncModel:
    """Both phases of a step.

    All methods run on the device thread, except `prepare` (event loop) and `use` (start-up). `sampler` also records the
    tokens that the device has chosen.
    """

    def __init__(
        self,
        line: StepSubmitter,
        work: TorchDeviceWork,
        runner: ModelRunner,
        sampler: Sampler,
        chooser: TritonTokenChooser,
    ) -> None:
        self.line = line
        self.runner = runner
        self.sampler = sampler
        self.num_attended = 0  # steps
        self._work, self._chooser = work, chooser
        self._writer = GuideWriter(sampler, chooser.guides)

    def prepare(self, started: Sequence[Started]) -> None:
        """As `Sampler.prepare`. Called on the event loop."""
        self.sampler.prepare(started)

    def use(self, processor: LogitsProcessor) -> None:
        """As `Sampler.use`."""
        self.sampler.use(processor)

    def find_adapters(self, find: Callable[[str], Any]) -> None:
        """As `ModelRunner.find_adapters`."""
        self.runner.find_adapters(find)

    def take_failed_loads(self, step: int) -> dict[str, Exception]:
        """As `ModelRunner.take_failed_loads`."""
        return self.runner.take_failed_loads(step)

    def forward(self, grant: StepGrant) -> SubmittedStep:
        """Submits a step up to its logits; computes the logits, if the plain runner must."""
        self.runner.apply_updates(grant)
        for started in grant.started:
            self.sampler.start(started)
        if not self.runner.wants_more(grant):
            slots = grant.slots[grant.is_sampled]
            kind = self._chooser.kind(slots)
            has_adapters = self.runner.has_adapters(grant)
            return self.line.forward(grant, kind, is_scored=kind >= SCORED, has_adapters=has_adapters)
        step = self.line.attend(grant)
        self._work.copy_newest_tokens(self.runner.last_tokens)
        step.logits = self.runner.compute(grant)
        self.line.save_states(grant)
        return step

    def sample(self, grant: StepGrant, step: SubmittedStep) -> Any:
        """Submits the rest of a step; samples it, if attended.

        Returns the step, on which `AsyncDevice` waits.
        """
        if step.kind != ATTENDED:
            return self.line.sample(grant, step, self._guide(grant) if is_guided(step.kind) else None)
        self.num_attended += 1
        logits = step.logits
        if logits is None:
            self.line.read(grant, step)
            logits = self._work.logits(len(grant.logits_slots))
        tokens = self.sampler.choose(grant, logits)
        positions = self.sampler.table.num_prompt[tokens.slots] + tokens.places
        self._work.note(tokens.slots, positions, tokens.token_ids, tokens.finishes)
        return self.line.attended(step, tokens)

    def _guide(self, grant: StepGrant) -> WriteGuide:
        """Blocks until the tokens are known on which the step's guide depends; its forward pass runs meanwhile."""
        if self._writer.awaits_results(grant, self.line.num_pending):
            self.line.await_results(grant)
        return partial(self._writer.write, grant)
