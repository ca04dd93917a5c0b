"""The native runner: decode steps and token choice in C++, straight from the slots' columns.

No torch. `step_ahead.py` says which thread does what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....kernels.native.cache import NativeCache
from ....kernels.native.model import NativeModel
from ....kernels.native.slot_step import NO_IDS, NativeChooser, SlotStep, StepChain
from ....model.decoder.native_decoder import NativeDecoder, NativeLoraTable
from ....model.decoder.rope import GrowingTables
from ...array_checks import num_true
from ...device.arrays import Array
from ...device.pooler import Pooler
from ...device.step_result import StepResult, TokenChoice
from ...engine_settings import LogprobsMode
from ...execute.model_runner import ModelRunner
from ...grammar.masks import AllowedTokens
from ...messages import Bools, StepGrant
from ...sample.logits_processor import LogitsProcessor
from ...sample.sampling_math import Longs
from ...sample.slot_params import SlotParams
from ...sample.token_chooser import SampledRows, TokenChooser
from .step_ahead import StepAhead


class NativeRunner(ModelRunner):
    """As `ModelRunner`, but a step whose rows all read their newest token is one C++ call.

    The runner reports to the cache which blocks are used, and when a step starts and ends.

    After `use_chooser`, a step that was offered may have its tokens chosen with its forward pass: see `StepAhead`. If
    all tokens are greedy, no logits are made. All but `offer` is called on the device thread.
    """

    def __init__(
        self,
        model: NativeModel,
        cache: NativeCache,
        last_tokens: Longs,
        max_blocks_per_slot: int,
        num_host_blocks: int | Sequence[int],
        pooler: Pooler,
        short_length: int = 0,
        adapters: NativeLoraTable | None = None,
        positions: GrowingTables | None = None,
    ) -> None:
        """`positions`: the model's rotary tables, which grow before the steps that need more; None: they are whole."""
        self._positions = positions
        self._native = NativeDecoder(model, adapters)
        sizes = (max_blocks_per_slot, num_host_blocks)
        super().__init__(self._native, cache, last_tokens, *sizes, pooler, short_length, adapters, cache.states)
        self._native_cache = cache
        self._decoding = SlotStep(
            model,
            cache,
            last_tokens=last_tokens,
            num_known=self._num_known,
            tables=self.tables,
            rope_offsets=self._rope_offsets,
            adapters=None if adapters is None else self._adapter_slots,
        )
        self.ahead = StepAhead(len(last_tokens), self.tables, self._grow_positions)
        self._generation = -1  # the newest of any step

    def use_chooser(self, chooser: NativeChooser | None) -> None:
        """Lets the runner choose tokens that need nothing but logits, from the next step on.

        None turns this off.
        """
        has_line = self._native.model.step_thread_id > 0
        chain = StepChain(self._decoding, chooser) if chooser is not None and has_line else None
        self.ahead.use(chain, chooses=chooser is not None)

    def offer(self, grant: StepGrant) -> None:
        """See `RunsAhead`. Called on the event loop."""
        self.ahead.offer(grant)

    def forward(self, grant: StepGrant) -> StepResult:
        """As `ModelRunner.forward`, or a `TokenChoice` if all sampled rows need nothing else."""
        self._native_cache.begin_step()
        try:
            is_new, self._generation = grant.generation > self._generation, grant.generation
            if is_new or grant.copies or grant.adapter_loads:
                # a step that is void with its predecessor may still read adapters, and read and write columns
                self.ahead.drain()
            return super().forward(grant)
        finally:
            self._native_cache.end_step()

    def apply_updates(self, grant: StepGrant) -> None:
        self._grow_positions(grant)
        if not self.ahead.take(grant.step).is_handed_over:
            super().apply_updates(grant)
        if len(grant.table_blocks):
            self._native_cache.note_used(int(grant.table_blocks.max()))
        for entries in grant.more_tables:
            self._native_cache.note_used(int(entries.blocks.max()), entries.kind)

    def _grow_positions(self, grant: StepGrant) -> None:
        """A token is computed after its sequence has a block for it, so blocks bound the positions."""
        if self._positions is not None and len(grant.table_places):
            self._positions.grow((int(grant.table_places.max()) + 1) * self._native_cache.block_size)

    def compute(self, grant: StepGrant) -> StepResult:
        count, offered = len(grant.slots), self.ahead.take(grant.step)
        chosen = self.ahead.finish(grant, offered)
        if chosen is not None:
            return chosen
        if offered.is_greedy and not self.wants_more(grant):
            return self._take_likeliest(grant)
        is_plain = grant.is_decode and grant.drafts is None and self.pooler is not None and not self.pooler.num_pooled
        if is_plain and count and num_true(grant.is_sampled) == count:
            logits = self._decoding.step(grant.slots, grant.starts)
            if logits is not None:
                return logits
        return super().compute(grant)

    def _take_likeliest(self, grant: StepGrant) -> TokenChoice:
        slots, chosen = grant.slots[grant.is_sampled], None
        if grant.is_decode and len(slots) == len(grant.slots):
            chosen = self._decoding.likeliest(slots, grant.starts)
        if chosen is None:
            chosen = self._native.likeliest(self.inputs(grant), self._native_cache)
        self.last_tokens[slots] = chosen[0]
        return TokenChoice(*chosen)


class NativeTokenChooser(TokenChooser):
    """As `TokenChooser`, in C++, which reads the columns of the table directly.

    Installs its chooser in `runner`.
    """

    def __init__(
        self,
        table: SlotParams,
        last_tokens: Array,
        mode: LogprobsMode,
        *,
        model: NativeModel,
        runner: NativeRunner | None = None,
    ) -> None:
        super().__init__(table, last_tokens, mode)
        self._runner = runner
        self._chooser = NativeChooser(
            model,
            is_random=table.is_random,
            draws=table.draws,
            seeds=table.seeds,
            num_prompt=table.num_prompt,
        )
        if runner is not None:
            runner.use_chooser(self._chooser)

    def use(self, processor: LogitsProcessor) -> None:
        super().use(processor)
        if self._runner is not None and processor.always:  # else the requests that name it have no plain choice
            self._runner.use_chooser(None)

    def _choose(self, rows: SampledRows, logits: Array, allowed: AllowedTokens | None) -> tuple[Longs, Bools]:
        masks, mask_rows = None, NO_IDS
        if allowed is not None:
            masks, mask_rows = allowed.masks, allowed.mask_of_each(len(logits))
        return self._chooser.choose(np.ascontiguousarray(logits, np.float32), rows.slots, rows.places, masks, mask_rows)
