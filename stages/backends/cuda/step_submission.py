"""The device's thread: submits a step's uploads, copies, launches and downloads, and waits for nothing but room.

Three streams. On *compute* run, in order, each step's diff, its forward pass and its sampling. *results* brings to the
host what was chosen, behind the step's `done`. *swaps* copies blocks to the host and back, beside the steps around it:

- out of a block: behind all earlier steps, which may write it; a step that gives it to somebody else comes after;
- into a block: behind nothing, as no step in flight knows the block (the fence: whoever gave it back waited for them);
  the step that reads it comes after.

A step is over when its results and its copies are on the host. Knows order. Refuses to know what is computed.

A step of which the host must see the logits is *attended*: all before it are over first, then it is computed by who
submits it, and is over as soon as that returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from ....runtime.device_streams.interface import Event, Stream, Streams
from ....runtime.workers.in_order import InOrder, Turn
from ...device.device import StepFell
from ...messages import BlockCopy, Direction, Ints, StepGrant, StepTokens
from ...outputs import Batch, CaptureReport
from .cuda_graphs import Captured, Graphs
from .idle_time import IdleGaps
from .pinned_ring import Pinned, SendRing
from .step_update import Ends, write

SPARE_STEPS = 2  # events and buffers beyond those of the steps in flight: for the step before, and the one after


class Work(Protocol):
    """What runs on the device for a step, each by launches alone: nothing here waits, or asks what is in the device's
    memory. `batch` is the step's size with its padding."""

    def take_news(self) -> None:
        """Writes what is new in the diff into the tables."""

    def make_inputs(self, batch: Batch) -> None:
        """From the diff and the tables to the inputs of the step."""

    def forward(self, batch: Batch) -> None:
        """From those to the logits, which are left where `sample` of any step finds them."""

    def sample(self, batch: Batch, kind: int) -> None:
        """From those to tokens, as rows of this kind ask: into the tables, and into the step's result."""

    def fork(self, sources: Ints, destinations: Ints) -> None:
        """Copies whole blocks on the device."""

    def block(self, block: int) -> Any:
        """The memory of one block of the device, as a stream copies it."""

    def host_block(self, block: int) -> Any:
        """The memory of one block of the host."""


class Settles(Protocol):
    """Who keeps the books of what the device has told."""

    def settle(self, grant: StepGrant, told: Ints, scores: Ints | None = None) -> StepTokens:
        """What a step came to. `told` [2, L] is one of the device's results, cut to the sampled rows: token ids, -1
        where a sequence had ended before; and how each ends, see `step_state.FINISHED`. `scores` [L, W] comes with
        steps of a scored kind. Steps come in order, on the thread that tells or the device's, never on both at
        once."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What steps are sent in and told by; static, as graphs know the device's part by its address."""

    diff: Any  # [C] i32 on the device
    result: Any  # [2, P] i32 on the device, see `step_state.settle`
    diffs: Sequence[Pinned]  # [C] each
    results: Sequence[Pinned]  # [2, P] each, as many as steps in flight and SPARE_STEPS
    scores: Any = None  # [P, W] i32 on the device; None: no step is scored
    told_scores: Sequence[Pinned] = ()  # [P, W] each, as many as `results`


class Step:
    """One submitted step; `wait`, on another thread, returns when it is over."""

    __slots__ = (
        *("_line", "batch", "began", "captured", "copied", "done", "grant", "has_swaps", "kind", "result", "swapped"),
        *("is_scored", "logits", "scores", "tokens", "turn"),
    )

    def __init__(
        self, line: StepLine, events: tuple[Event, Event, Event, Event], result: Pinned, scores: Pinned | None
    ) -> None:
        self._line = line
        self.began, self.done, self.copied, self.swapped = events
        self.result, self.scores = result, scores
        self.grant: StepGrant | None = None  # None: never used
        self.batch = Batch(0, 0, True)
        self.captured: Captured | None = None
        self.kind = 0
        self.is_scored = False
        self.has_swaps = False
        self.logits: Any = None  # of an attended step between its halves
        self.turn: Turn[Step] | None = None  # to be settled; None: its tokens are known without
        self.tokens: StepTokens | None = None  # once it is settled

    def wait(self) -> StepTokens:
        """What it came to, once all of it is on the host and nothing of it runs any more. Steps in order."""
        return self._line.finish(self)


class StepLine:
    """The steps of one device, in order: `forward` and `sample` on its thread, `Step.wait` on the one that tells.

    At most `num_steps` may be in flight: submitted, and not yet returned by `wait`.
    """

    def __init__(
        self, streams: Streams, memory: Memory, work: Work, graphs: Graphs, ends: Ends, outcomes: Settles
    ) -> None:
        self.graphs = graphs
        self.outcomes = outcomes
        self._streams, self._memory, self._work, self._ends = streams, memory, work, ends
        self._compute, self._results, self._swaps = (streams.stream(name) for name in ("compute", "results", "swaps"))
        self._diffs = SendRing(memory.diffs, streams)
        self._ring = [
            Step(self, _four_events(streams), result, scores)
            for result, scores in zip_longest(memory.results, memory.told_scores)
        ]
        self._num_submitted = 0
        self._unsettled: InOrder[Step] = InOrder(_wait, self._settle)  # submitted whole
        self._lost_generation = -1  # the books lack a step of it
        self.gaps = IdleGaps()  # the telling thread's

    def warm(self, batches: Sequence[Batch], kinds: Sequence[int]) -> None:
        """Runs a step of each size and kind without rows, so that what is made at first use is made. Before the first
        step."""
        for batch in batches:
            self._launch_forward(batch)
            for kind in kinds:
                self._launch_sample(batch, kind)
        self._streams.wait()

    def capture(self, clock: Callable[[], float]) -> CaptureReport:
        """Captures a step of each size, and replays each graph once, without rows: one that does not work shows here.
        Before the first step. `clock` tells seconds."""
        self.warm(self.graphs.batches, self.graphs.kinds)
        report = self.graphs.capture(self._compute, self._launch_forward, self._launch_sample, clock)
        for captured in self.graphs.captured:
            self._compute.replay(captured.forward)
            for graph in captured.samples.values():
                self._compute.replay(graph)
        self._streams.wait()
        return report

    # -- on the device's thread

    def enter(self) -> None:
        """The first call on that thread: what it asks of the device by itself is in order with the steps."""
        self._compute.use()

    def forward(self, grant: StepGrant, kind: int = 0, *, is_scored: bool = False) -> Step:
        """Submits all of a step up to its logits. `kind` is the work's word for how its rows are sampled; of those that
        are scored, scores come with the result."""
        step = self._begin(grant)
        step.kind, step.is_scored = kind, is_scored
        if not len(grant.slots):
            self._compute.launch(self._work.take_news)
            return step
        is_decode = bool((grant.num_tokens == 1).all())
        step.batch, step.captured = self.graphs.choose(len(grant.slots), grant.num_computed, is_decode)
        if step.captured is not None:
            self._compute.replay(step.captured.forward)
        else:
            self._launch_forward(step.batch)
        return step

    def sample(self, grant: StepGrant, step: Step) -> Step:
        """Submits the rest of it."""
        assert step.grant is grant, f"step {grant.step} is sampled with another's logits"
        if len(grant.slots):
            self._compute.wait(self._before(step).copied)  # the device has one result, and that reads it
            graph = None if step.captured is None else step.captured.samples.get(step.kind)
            if graph is not None:
                self._compute.replay(graph)
            else:
                self._launch_sample(step.batch, step.kind)
        self._compute.record(step.done)
        self._results.wait(step.done)
        self._results.copy(step.result.array, self._memory.result)
        if step.is_scored and step.scores is not None:
            self._results.copy(step.scores.array, self._memory.scores)
        self._results.record(step.copied)
        step.turn = self._unsettled.append(step)
        return step

    def attend(self, grant: StepGrant) -> Step:
        """As `forward`, of a step that the caller computes: returns when all before it are settled, and its copies and
        news are where it will look for them. Raises `StepFell` if one of them could not be settled: the books that the
        host would choose by lack its tokens, until a later generation starts those sequences anew."""
        self._unsettled.do_all()
        if grant.generation <= self._lost_generation:
            raise StepFell(f"step {grant.step} is computed behind one that was not settled")
        step = self._begin(grant)
        self._compute.launch(self._work.take_news)
        self._compute.record(step.done)
        step.done.wait()
        return step

    def attended(self, step: Step, tokens: StepTokens) -> Step:
        """The rest of it: `tokens` is what it came to, and they are in the tables."""
        self._compute.record(step.done)
        self._results.wait(step.done)
        self._results.record(step.copied)
        step.tokens, step.logits = tokens, None
        return step

    def drain(self) -> None:
        """Returns when nothing runs that was submitted."""
        self._streams.wait()

    def _begin(self, grant: StepGrant) -> Step:
        step = self._ring[self._num_submitted % len(self._ring)]
        self._num_submitted += 1
        step.grant, step.has_swaps, step.turn, step.tokens, step.logits = grant, False, None, None, None
        self._compute.record(step.began)
        if grant.copies:
            self._copy(grant, step)
        self._upload(grant)
        return step

    def _before(self, step: Step) -> Step:
        return self._ring[self._ring.index(step) - 1]

    def _launch_forward(self, batch: Batch) -> None:
        self._compute.launch(self._work.take_news)
        self._compute.launch(partial(self._work.make_inputs, batch))
        self._compute.launch(partial(self._work.forward, batch))

    def _launch_sample(self, batch: Batch, kind: int) -> None:
        self._compute.launch(partial(self._work.sample, batch, kind))

    def _upload(self, grant: StepGrant) -> None:
        """Sends the diff; the tables take all parts but the last at once, the last with the step."""
        taken: list[tuple[Pinned, Event]] = []

        def buffers() -> Iterator[Ints]:
            while True:
                taken.append(self._diffs.take())
                yield taken[-1][0].numbers

        for size, is_last in write(grant, self._ends, buffers()):
            buffer, sent = taken.pop()
            self._compute.copy(self._memory.diff[:size], buffer.array[:size])
            self._compute.record(sent)
            if not is_last:
                self._compute.launch(self._work.take_news)

    def _copy(self, grant: StepGrant, step: Step) -> None:
        """The blocks that move before the step runs, in their order."""
        last: Stream = self._compute
        for copy in grant.copies:
            stream = self._compute if copy.direction is Direction.FORK else self._swaps
            if stream is self._swaps:
                step.has_swaps = True
                if copy.direction is Direction.OUT:
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

    def _copy_blocks(self, copy: BlockCopy, stream: Stream) -> None:
        if copy.direction is Direction.FORK:
            return stream.launch(partial(self._work.fork, copy.sources, copy.destinations))
        on_device, on_host = self._work.block, self._work.host_block
        to, source = (on_host, on_device) if copy.direction is Direction.OUT else (on_device, on_host)
        for source_id, destination_id in zip(copy.sources.tolist(), copy.destinations.tolist(), strict=True):
            stream.copy(to(destination_id), source(source_id))

    # -- on the thread that tells

    def finish(self, step: Step) -> StepTokens:
        """See `Step.wait`."""
        assert step.grant is not None
        _wait(step)
        if step.turn is not None:
            self._unsettled.do_through(step.turn)
        assert step.tokens is not None, f"step {step.grant.step} was never submitted whole"
        self.gaps.note(step, self._before(step), step.tokens)
        return step.tokens

    # -- on either

    def _settle(self, step: Step) -> None:
        """What it raises, `finish` of that step raises. The steps behind it are settled all the same: they fall with
        it, and the books begin anew with the next `Started` of each slot."""
        assert step.grant is not None
        try:
            step.tokens = self.outcomes.settle(step.grant, *_told(step, step.grant.num_sampled))
        except BaseException:
            self._lost_generation = max(self._lost_generation, step.grant.generation)
            raise


def _told(step: Step, num_rows: int) -> tuple[Ints, Ints | None]:
    """Result and scores of a step, copies of their own."""
    scores = step.scores.numbers[:num_rows].copy() if step.is_scored and step.scores is not None else None
    return step.result.numbers[:, :num_rows].copy(), scores


def _wait(step: Step) -> None:
    """Returns when nothing of a submitted step runs any more."""
    step.copied.wait()
    if step.has_swaps:
        step.swapped.wait()


def _is_touched(grant: StepGrant) -> bool:
    """Whether the step reads what its copies bring, or writes where they read."""
    if any(copy.direction is Direction.IN for copy in grant.copies):
        return True
    sources = [copy.sources for copy in grant.copies if copy.direction is Direction.OUT]
    return bool(np.isin(np.concatenate(sources), grant.table_blocks).any())


def _four_events(streams: Streams) -> tuple[Event, Event, Event, Event]:
    return streams.event(), streams.event(), streams.event(), streams.event()
