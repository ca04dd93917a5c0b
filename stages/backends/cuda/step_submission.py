"""Step submission: the order of a step's copies and launches on three streams.

The device thread submits; it waits only for a free upload buffer. The completion thread waits for finished steps.

The *compute* stream runs, in order, each step's update (diff), forward pass and sampling. The *results* stream copies
the chosen tokens to the host, after the step's `done`. The *swaps* stream copies blocks to the host and back,
concurrently with the steps around it:

- A copy out of a block runs after all earlier steps, which may write it. A step that reassigns the block runs after it.
- A copy into a block waits for nothing: no step in flight uses the block, because a block is freed only after all steps
  that use it have ended. The step that reads it runs after the copy.

States of recurrent layers are copied by the same rules. A step is the last that writes its slots before their states
are saved, so such copies run on the compute stream behind its forward pass. A copy of a state into a slot waits for all
earlier steps, as the state that was there may be saved by one of them.

A step has ended when its results and its copies are on the host.

LoRA adapters are copied into their slots on a stream of their own. A step that loads some has ended when they are
there; no step in flight reads those slots, and rows may use them once the step has ended.

A step whose logits the host must see is *attended*. Its forward pass is submitted like any other. The device thread
then waits for the results of all earlier steps and for the logits (`read`). Some attended steps need more of the model
than their logits: the device thread computes these itself, after all earlier steps (`attend`). An attended step has
ended when the host has written its tokens.

The sampling of a step may read a *guide* of the host (see `guide_uploads.py`), uploaded on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from ....runtime.device_streams.interface import DeviceEvent, DeviceStream, DeviceStreams
from ....runtime.workers.in_order import InOrder, OrderTicket
from ...device.device import StepSkipped
from ...device.device_guard import is_out_of_memory
from ...messages import STATES, BlockCopy, Direction, Ints, StepGrant, StepTokens
from ...outputs import CaptureReport, GraphBatch
from .cuda_graphs import CapturedGraphs, CudaGraphs, with_adapters
from .guide_uploads import GuideUploads, WriteGuide
from .idle_time import IdleGaps
from .pinned_ring import PinnedMemory, SendRing
from .step_device import ATTENDED, DeviceWork, StepMemory, TracksOutcomes
from .step_update import EndRules, num_logits, write


class SubmittedStep:
    """One submitted step. The device thread makes it; the completion thread calls `wait`."""

    __slots__ = (
        *("_line", "batch", "began", "captured", "copied", "done", "grant", "has_swaps", "kind", "result", "swapped"),
        *("is_scored", "logits", "scores", "tokens", "turn"),
    )

    def __init__(
        self,
        line: StepSubmitter,
        events: tuple[DeviceEvent, DeviceEvent, DeviceEvent, DeviceEvent],
        result: PinnedMemory,
        scores: PinnedMemory | None,
    ) -> None:
        self._line = line
        self.began, self.done, self.copied, self.swapped = events
        self.result, self.scores = result, scores
        self.grant: StepGrant | None = None  # None: never used
        self.batch = GraphBatch(0, 0, True)
        self.captured: CapturedGraphs | None = None
        self.kind = 0
        self.is_scored = False
        self.has_swaps = False
        self.logits: Any = None  # of a step that the device thread computed, between its phases
        self.turn: OrderTicket[SubmittedStep] | None = (
            None  # its place in the order of `note_tokens`; None: an attended step
        )
        self.tokens: StepTokens | None = None  # once its result is applied

    def wait(self) -> StepTokens:
        """Blocks until the step has ended, and returns its tokens.

        On the completion thread, for steps in order.
        """
        return self._line.finish(self)


class StepSubmitter:
    """The steps of one device, in order.

    The device thread calls `enter`, `forward`, `sample`, `read`, `attend` and `attended`. The completion thread calls
    `SubmittedStep.wait`, and `drain` after an error. `warm` and `capture` run on the loading thread, before the first
    step. At most `num_steps` of `step_memory` may be in flight: submitted, and not yet returned by `wait`.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        memory: StepMemory,
        work: DeviceWork,
        graphs: CudaGraphs,
        ends: EndRules,
        outcomes: TracksOutcomes,
    ) -> None:
        self.graphs = graphs
        self.outcomes = outcomes
        self._streams, self._memory, self._work, self._ends = streams, memory, work, ends
        self._compute, self._results, self._swaps = (streams.stream(name) for name in ("compute", "results", "swaps"))
        self._diffs = SendRing(memory.diffs, streams)
        self._ring = [
            SubmittedStep(self, _four_events(streams), result, scores)
            for result, scores in zip_longest(memory.results, memory.result_scores)
        ]
        self._guides = GuideUploads(streams, self._compute, memory.guide, memory.guides) if memory.guides else None
        self._num_submitted = 0
        self.adapter_copies: DeviceEvent | None = None  # the last copy of a LoRA adapter into its slot; None: no slots
        self._unsettled: InOrder[SubmittedStep] = InOrder(_wait, self._note_outcome)  # submitted, result not applied
        self._lost_generation = -1  # the host's state lacks the tokens of a step of this generation
        self.gaps = IdleGaps()  # owned by the completion thread

    def warm(self, batches: Sequence[GraphBatch], kinds: Sequence[int]) -> None:
        """Runs an empty step of each size and kind, for lazy initialization.

        Called before the first step.
        """
        for batch in batches:
            self._launch_forward(batch)
            if self.graphs.has_adapters:
                self._launch_forward(with_adapters(batch))
            for kind in kinds:
                self._launch_sample(batch, kind)
        self._streams.wait()

    def capture(self, clock: Callable[[], float]) -> CaptureReport:
        """Captures a step of each size, and replays each graph once to find broken ones.

        Called before the first step. `clock` returns seconds. Sizes for which there is no memory are dropped, the
        largest first; raises `ConfigError` if none is left. The report counts all memory that is no longer free, which
        includes what the driver keeps for graphs, some of it from their first replay on.
        """
        for batch in self.graphs.batches:
            if not self._warms(batch):
                self.graphs.drop(batch, self._streams.free_bytes())
        launches = (self._launch_forward, self._launch_sample)
        free_bytes = self._streams.free_bytes()
        report = self.graphs.capture(self._compute, *launches, clock, self._streams.free_bytes)
        for captured in self.graphs.captured:
            for graph in (captured.forward, captured.adapted, *captured.samples.values()):
                if graph is not None:
                    self._compute.replay(graph)
        self._streams.wait()
        return replace(report, num_bytes=max(report.num_bytes, free_bytes - self._streams.free_bytes()))

    def _warms(self, batch: GraphBatch) -> bool:
        """As `warm`, for one size. False if there is too little memory for it."""
        try:
            self.warm([batch], self.graphs.kinds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    # -- on the device thread

    def enter(self) -> None:
        """The thread's first call: puts its device operations on the compute stream.

        They are then in order with the steps.
        """
        self._compute.use()

    def forward(
        self, grant: StepGrant, kind: int = 0, *, is_scored: bool = False, has_adapters: bool = False
    ) -> SubmittedStep:
        """Submits a step up to its logits.

        `kind` is the kind of sampling, as `DeviceWork.sample` takes it, or ATTENDED. With `is_scored`, scores come with
        the result. `has_adapters`: some of its rows have a LoRA adapter.
        """
        step = self._begin(grant)
        step.kind, step.is_scored = kind, is_scored
        if not len(grant.slots):
            self._compute.launch(self._work.apply_updates)
            return step
        is_decode = bool((grant.num_tokens == 1).all())
        num_rows = len(grant.slots) if grant.drafts is None else max(len(grant.slots), num_logits(grant))
        step.batch, step.captured = self.graphs.choose(num_rows, grant.num_computed, is_decode)
        graph = None
        if step.captured is not None:
            graph = step.captured.adapted if has_adapters else step.captured.forward
        if graph is not None:
            self._compute.replay(graph)
        else:
            self._launch_forward(with_adapters(step.batch) if has_adapters else step.batch)
        self.save_states(grant)
        return step

    def save_states(self, grant: StepGrant) -> None:
        """Submits the copy of states behind a step, if it has one. Of an attended step, once it is computed."""
        if grant.copies and grant.copies[-1].direction is Direction.SAVE:  # the last one, if any
            self._copy_blocks(grant.copies[-1], self._compute)

    @property
    def num_pending(self) -> int:
        """At most as many submitted steps have results that are not applied."""
        return len(self._unsettled) + 1  # one may be being applied

    def sample(self, grant: StepGrant, step: SubmittedStep, guide: WriteGuide | None = None) -> SubmittedStep:
        """Submits the rest of a step: sampling, by the `guide` if its kind reads one, and the download of its result.

        Waits for a free buffer if there is a guide.
        """
        assert step.grant is grant, f"step {grant.step} is sampled with the logits of another step"
        if len(grant.slots):
            if guide is not None:
                assert self._guides is not None, f"step {grant.step} has a guide, and there is no memory for one"
                self._guides.send(guide)
            self._compute.wait(self._before(step).copied)  # that copy reads the device's only result buffer
            graph = None if step.captured is None else step.captured.samples.get(step.kind)
            if graph is not None:
                self._compute.replay(graph)
            else:
                self._launch_sample(step.batch, step.kind)
            if guide is not None and self._guides is not None:
                self._guides.note_read()
        self._compute.record(step.done)
        self._results.wait(step.done)
        self._results.copy(step.result.array, self._memory.result)
        if step.is_scored and step.scores is not None:
            self._results.copy(step.scores.array, self._memory.scores)
        self._results.record(step.copied)
        step.turn = self._unsettled.append(step)
        return step

    def await_results(self, grant: StepGrant) -> None:
        """Blocks until the results of all earlier steps are applied.

        Raises `StepSkipped` if one could not be applied: the host's sampling state lacks its tokens, until a later
        generation restarts those sequences.
        """
        self._unsettled.do_all()
        if grant.generation <= self._lost_generation:
            raise StepSkipped(f"step {grant.step} follows one whose result could not be applied")

    def read(self, grant: StepGrant, step: SubmittedStep) -> None:
        """Blocks until the host may read the logits of an attended step and choose its tokens.

        Raises as `await_results`.
        """
        self.await_results(grant)
        self._compute.record(step.done)
        step.done.wait()

    def attend(self, grant: StepGrant) -> SubmittedStep:
        """As `forward`, for a step that the caller computes, without a graph.

        Blocks until the results of all earlier steps are applied, and the step's own copies and updates are on the
        device. Raises as `await_results`.
        """
        self.await_results(grant)
        self.graphs.num_eager += 1
        step = self._begin(grant)
        step.kind, step.is_scored = ATTENDED, False
        self._compute.launch(self._work.apply_updates)
        self._compute.record(step.done)
        step.done.wait()
        return step

    def attended(self, step: SubmittedStep, tokens: StepTokens) -> SubmittedStep:
        """Ends an attended step. `tokens` are its tokens, already written to the device's tables."""
        self._compute.record(step.done)
        self._results.wait(step.done)
        self._results.record(step.copied)
        step.tokens, step.logits = tokens, None
        return step

    def probe(self) -> None:
        """Blocks until all submitted work and a tiny operation have ended. Raises the device's error.

        Called on a thread of its own, after an error.
        """
        self._streams.probe()

    def drain(self) -> None:
        """Blocks until all submitted work has ended.

        Called on the completion thread, after an error.
        """
        self._streams.wait()

    def _begin(self, grant: StepGrant) -> SubmittedStep:
        step = self._ring[self._num_submitted % len(self._ring)]
        self._num_submitted += 1
        step.grant, step.has_swaps, step.turn, step.tokens, step.logits = grant, False, None, None, None
        self._compute.record(step.began)
        if grant.copies:
            self._copy(grant, step)
        if grant.adapter_loads and self.adapter_copies is not None:
            self._results.wait(self.adapter_copies)  # so the step ends after them, and steps around it do not wait
        self._upload(grant)
        return step

    def _before(self, step: SubmittedStep) -> SubmittedStep:
        return self._ring[self._ring.index(step) - 1]

    def _launch_forward(self, batch: GraphBatch) -> None:
        self._compute.launch(self._work.apply_updates)
        self._compute.launch(partial(self._work.make_inputs, batch))
        self._compute.launch(partial(self._work.forward, batch))

    def _launch_sample(self, batch: GraphBatch, kind: int) -> None:
        self._compute.launch(partial(self._work.sample, batch, kind))

    def _upload(self, grant: StepGrant) -> None:
        """Uploads the diff.

        All parts but the last are applied to the tables at once, the last with the step.
        """
        taken: list[tuple[PinnedMemory, DeviceEvent]] = []

        def buffers() -> Iterator[Ints]:
            while True:
                taken.append(self._diffs.take())
                yield taken[-1][0].numbers

        for size, is_last in write(grant, self._ends, buffers(), self._memory.num_slots):
            buffer, sent = taken.pop()
            self._compute.copy(self._memory.diff[:size], buffer.array[:size])
            self._compute.record(sent)
            if not is_last:
                self._compute.launch(self._work.apply_updates)

    def _copy(self, grant: StepGrant, step: SubmittedStep) -> None:
        """Submits the block copies before the step, in their order."""
        last: DeviceStream = self._compute
        for copy in grant.copies:
            if copy.direction is Direction.SAVE:
                continue
            stream = self._compute if copy.direction is Direction.FORK else self._swaps
            if stream is self._swaps:
                step.has_swaps = True
                if copy.direction is Direction.OUT or copy.kind == STATES:
                    self._swaps.wait(step.began)
            if last is not stream and copy is not grant.copies[0]:
                last.record(step.swapped)
                stream.wait(step.swapped)
            self._copy_blocks(copy, stream)
            last = stream
        if step.has_swaps:
            self._swaps.record(step.swapped)
            if _is_touched(grant):
                self._compute.wait(step.swapped)

    def _copy_blocks(self, copy: BlockCopy, stream: DeviceStream) -> None:
        if copy.direction in (Direction.FORK, Direction.SAVE):
            return stream.launch(partial(self._work.fork, copy.sources, copy.destinations, copy.kind))
        on_device, on_host = self._work.block, self._work.host_block
        to, source = (on_host, on_device) if copy.direction is Direction.OUT else (on_device, on_host)
        for source_id, destination_id in zip(copy.sources.tolist(), copy.destinations.tolist(), strict=True):
            stream.copy(to(destination_id, copy.kind), source(source_id, copy.kind))

    # -- on the completion thread

    def finish(self, step: SubmittedStep) -> StepTokens:
        """See `SubmittedStep.wait`."""
        assert step.grant is not None
        _wait(step)
        if step.turn is not None:
            self._unsettled.do_through(step.turn)
        assert step.tokens is not None, f"step {step.grant.step} was never sampled"
        self.gaps.note(step, self._before(step), step.tokens)
        return step.tokens

    # -- on the completion thread or the device thread, never both at once

    def _note_outcome(self, step: SubmittedStep) -> None:
        """Applies a step's result. `finish` of that step raises what this raises.

        The results of later steps are applied all the same. Those steps are void, and the state of each slot starts
        afresh with its next `Started`.
        """
        assert step.grant is not None
        try:
            step.tokens = self.outcomes.note_tokens(step.grant, *_copy_result(step, num_logits(step.grant)))
        except BaseException:
            self._lost_generation = max(self._lost_generation, step.grant.generation)
            raise


def _copy_result(step: SubmittedStep, num_rows: int) -> tuple[Ints, Ints | None]:
    """Copies of a step's result and scores."""
    scores = step.scores.numbers[:num_rows].copy() if step.is_scored and step.scores is not None else None
    return step.result.numbers[:, :num_rows].copy(), scores


def _wait(step: SubmittedStep) -> None:
    """Blocks until a submitted step has ended on the device."""
    step.copied.wait()
    if step.has_swaps:
        step.swapped.wait()


def _is_touched(grant: StepGrant) -> bool:
    """Whether the step reads blocks that its copies write, or writes blocks that they read."""
    if any(copy.direction is Direction.IN or copy.kind for copy in grant.copies) or grant.more_tables:
        return True  # blocks of different kinds may be the same memory
    sources = [copy.sources for copy in grant.copies if copy.direction is Direction.OUT]
    return bool(np.isin(np.concatenate(sources), grant.table_blocks).any())


def _four_events(streams: DeviceStreams) -> tuple[DeviceEvent, DeviceEvent, DeviceEvent, DeviceEvent]:
    return streams.event(), streams.event(), streams.event(), streams.event()
