"""The runner of a pipeline's last rank: orders steps to the other ranks ahead of its own part of them.

The order of a step goes out as soon as the step is granted: the tokens that it reads are known then, as no row is in
another step that chooses one for it. So the first ranks compute the next steps while this one waits for their hidden
states, and chooses tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....model.decoder.step_inputs import StepInputs
from ....model.lora.adapter import Adapter
from ....runtime.processes.order_line import LineEnded
from ....runtime.workers.ahead_thread import AheadThread
from ...device.arrays import Array
from ...device.pooler import Pooler
from ...device.scored_prompts import LogitsWithPrompts, ScoredChunk
from ...execute.model_runner import AdapterTable, KVCacheProtocol, ModelRunner, StatesProtocol
from ...executor.orders import CopyOrder, SentTables
from ...messages import STATES, BlockCopy, Direction, Started, StepGrant
from .layer_leader import LastLayers
from .leading import about_step, step_order

Longs = NDArray[np.int64]
KINDS = {Direction.OUT: "out", Direction.IN: "in", Direction.FORK: "fork", Direction.SAVE: "fork"}  # of copies


@dataclass(slots=True, eq=False)
class OrderedStep:
    """A step that the other ranks compute, and what is left to do here."""

    grant: StepGrant
    copies: list[tuple[int, BlockCopy]] = field(default_factory=list)  # with the numbers of their orders
    saves: list[tuple[int, BlockCopy]] = field(default_factory=list)  # the same, behind the step
    loads: list[tuple[int, str, Adapter]] = field(default_factory=list)  # slot, digest
    number: int | None = None  # of its order; None: it has no rows, or no order was sent
    inputs: StepInputs[Any] | None = None
    runs: tuple[ScoredChunk, ...] = ()
    adapter_slots: Longs | None = None  # of its tokens
    error: Exception | None = None  # with which its orders failed


class TokenSlots:
    """In place of a runner's adapters: keeps the slots of the tokens of the next step, for its order."""

    def __init__(self) -> None:
        self.slots: Longs | None = None

    def load(self, slot: int, adapter: Any) -> None:
        raise AssertionError("adapters are loaded by PipelineRunner")

    def begin_step(self, slots: Longs | None) -> None:
        """As of `AdapterTable`."""
        self.slots = slots


class PipelineRunner(ModelRunner):
    """As `ModelRunner`, with two threads: its own makes the inputs of steps and sends orders, in the order of grants;
    the device thread runs `forward`, which waits for the rank before.

    Tables and other input of rows belong to the first, cache, pooler and own adapters to the second. `last_tokens` is
    written by the second, in slots that no granted step reads yet.
    """

    def __init__(
        self,
        decoder: LastLayers,
        cache: KVCacheProtocol,
        last_tokens: Array,
        max_blocks_per_slot: int,
        num_host_blocks: Sequence[int],
        pooler: Pooler,
        short_length: int,
        adapters: AdapterTable | None,
        states: StatesProtocol | None = None,
    ) -> None:
        """As of `ModelRunner`. The thread ends with the line of `decoder.leader`."""
        leader = self._leader = decoder.leader
        self._layers, self._own_adapters, self._token_slots = decoder, adapters, TokenSlots()
        ordered = None if adapters is None else self._token_slots
        sizes = (max_blocks_per_slot, num_host_blocks, pooler, short_length)
        super().__init__(decoder, cache, last_tokens, *sizes, ordered, states)
        self._sent_tables = SentTables()
        self._now: OrderedStep | None = None  # being ordered
        self._orders = AheadThread("millrace-pipeline", self._ordered)
        leader.line.on_close.append(self._orders.close)

    def offer(self, grant: StepGrant) -> None:
        """Orders a step. Called on any thread, in the order of grants."""
        self._orders.offer(grant)

    # -- on the device thread

    def forward(self, grant: StepGrant) -> Array | LogitsWithPrompts:
        """As of `ModelRunner`, of a step that was offered, or is now. Steps offered before it are void."""
        for step in self._orders.take(grant):
            if step.grant is grant:
                with self._arrays.inference():
                    return self._run_own(step)
            self._skip(step)
        raise LineEnded(self._leader.line.cause)

    def _run_own(self, step: OrderedStep) -> Array | LogitsWithPrompts:
        if step.error is not None:
            self._skip(step)
            raise step.error
        for started in step.grant.started:
            super()._start_pooling(started)
        self._copy_all(step.copies)
        for slot, digest, adapter in step.loads:
            with self._noting_failure(step.grant.step, digest):
                assert self._own_adapters is not None
                self._own_adapters.load(slot, adapter)
        found: Array | LogitsWithPrompts = self._upload(np.zeros((0, 0), np.float32))
        if step.number is not None and step.inputs is not None:
            if self._own_adapters is not None:
                self._own_adapters.begin_step(step.adapter_slots)
            with self._obeying(step.number):
                found = self.run(step.grant, step.inputs, step.runs)
        self._copy_all(step.saves)
        return found

    def _copy_all(self, ordered: Sequence[tuple[int, BlockCopy]]) -> None:
        for number, copy in ordered:
            with self._obeying(number):
                self._copy(copy)

    def _skip(self, step: OrderedStep) -> None:
        """Drops what the other ranks have computed of a void step, and will not be read again."""
        for number, _ in step.copies:
            with self._obeying(number):
                pass
        if step.number is not None and step.inputs is not None:
            with self._obeying(step.number):
                if self._own_adapters is not None:
                    self._own_adapters.begin_step(None)
                self._layers.skip(step.inputs, self.cache)
        for number, _ in step.saves:
            with self._obeying(number):
                pass

    def _obeying(self, number: int) -> AbstractContextManager[None]:
        log = self._leader.comm.log
        return self._leader.line.obeying(number, lambda: (log.number, log.last))

    # -- on the thread that sends orders

    def _ordered(self, grant: StepGrant) -> OrderedStep:
        step = self._now = OrderedStep(grant)
        try:
            with self._arrays.inference():
                self._order(step)
        except Exception as error:  # the step's, which raises it
            step.error = error
        return step

    def _order(self, step: OrderedStep) -> None:
        grant = step.grant
        self.apply_updates(grant)
        saves = [copy for copy in grant.copies if copy.direction is Direction.SAVE]
        step.copies += [(self._order_copy(copy), copy) for copy in grant.copies if copy.direction is not Direction.SAVE]
        if len(grant.slots):
            self._order_rows(step)
        step.saves += [(self._order_copy(copy), copy) for copy in saves]

    def _order_copy(self, copy: BlockCopy) -> int:
        """Returns the number of the order."""
        kind, is_states = KINDS[copy.direction], copy.kind == STATES
        sources, destinations = copy.sources.astype(np.int64), copy.destinations.astype(np.int64)
        about = f"copies {kind} of {len(sources)} {'states' if is_states else 'blocks'}"
        return self._leader.line.send(CopyOrder(kind, sources, destinations, is_states), about)

    def _order_rows(self, step: OrderedStep) -> None:
        grant, inputs = step.grant, self.inputs(step.grant)
        step.runs, step.adapter_slots = self.scored_runs(grant), self._token_slots.slots
        order = step_order(inputs, False, step.adapter_slots, self._sent_tables)
        step.inputs = inputs
        step.number = self._leader.line.send(order, about_step(inputs), len(inputs.input_ids))

    def _start_pooling(self, started: Started) -> None:
        pass  # on the device thread

    def _load_adapter(self, step: int, number: int, digest: str) -> None:
        assert self._find_adapter is not None and self._now is not None
        with self._noting_failure(step, digest):
            adapter = self._find_adapter(digest)
            self._leader.load_adapter(number, adapter)
            self._now.loads.append((number, digest, self._leader.part_of(adapter, 0)))

    @contextmanager
    def _noting_failure(self, step: int, digest: str) -> Iterator[None]:
        """A load that fails does not fail the step."""
        try:
            yield
        except Exception as error:
            self._failed_loads.setdefault(step, {})[digest] = error
