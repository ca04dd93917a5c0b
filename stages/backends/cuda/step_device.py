"""What step submission needs of a device and of the host: the launches of a step, its buffers, and where results go.

`device_work.py` has the launches on torch tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...messages import Ints, StepGrant, StepTokens
from ...outputs import GraphBatch
from .pinned_ring import PinnedMemory

ATTENDED = -1  # the kind of sampling of a step whose tokens the host chooses
SPARE_STEPS = 2  # events and buffers beyond the steps in flight: for the step before them, and the one after


class DeviceWork(Protocol):
    """The device work of a step.

    Each method only launches: it never waits or reads device memory. `batch` is the size of the step, padding included.
    """

    def apply_updates(self) -> None:
        """Applies the updates in the diff to the tables."""

    def make_inputs(self, batch: GraphBatch) -> None:
        """Computes the inputs of the step from the diff and the tables."""

    def forward(self, batch: GraphBatch) -> None:
        """Computes the logits from the inputs, and leaves them at a fixed address for `sample`."""

    def sample(self, batch: GraphBatch, kind: int) -> None:
        """Chooses tokens by this kind of sampling; writes them to the tables and the result."""

    def fork(self, sources: Ints, destinations: Ints, kind: int) -> None:
        """Copies whole blocks of a kind on the device, or states of recurrent layers: see `BlockCopy`."""

    def block(self, block: int, kind: int) -> Any:
        """The memory of one device block, or of one state, for copies on a stream."""

    def host_block(self, block: int, kind: int) -> Any:
        """The memory of one host block, or of one state, for copies on a stream."""


class TracksOutcomes(Protocol):
    """Applies the results of the device to the host's sampling state."""

    def note_tokens(self, grant: StepGrant, result: Ints, scores: Ints | None = None) -> StepTokens:
        """Applies a step's result and returns its tokens.

        `result` [2, L] is the device's, for the rows of logits: token ids, -1 where a sequence had ended before, or
        after a wrong draft; and how each ends, see `step_state.FINISHED`. `scores` [L, W] comes with steps of a scored
        kind. Called for steps in order, on the completion thread or the device thread, never on both at once.
        """


@dataclass(frozen=True, slots=True, eq=False)
class StepMemory:
    """The buffers between host and device.

    Their addresses are fixed, as CUDA graphs contain them.
    """

    diff: Any  # [C] i32 on the device
    result: Any  # [2, P] i32 on the device, see `step_state.note_tokens`
    diffs: Sequence[PinnedMemory]  # [C] each
    results: Sequence[PinnedMemory]  # [2, P] each, as many as steps in flight plus SPARE_STEPS
    scores: Any = None  # [P, W] i32 on the device; None: no step is scored
    result_scores: Sequence[PinnedMemory] = ()  # [P, W] each, as many as `results`
    guide: Any = None  # i32 on the device, see `GuideLayout`; None: no step has a guide
    guides: Sequence[PinnedMemory] = ()  # as large as `guide` each
    num_slots: int = 0  # of the tables; 0: their blocks are of one kind
