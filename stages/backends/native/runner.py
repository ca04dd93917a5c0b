"""The native runner: decode steps and token choice in C++, straight from the slots' columns.

No torch. Three threads take part. The event loop calls `run_ahead`. The device thread calls `forward`, `apply_updates`
and `compute`. The library's step thread, if it has one, runs the steps of a chain.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....kernels.native.cache import NativeCache
from ....kernels.native.model import NativeModel
from ....kernels.native.slot_step import NO_IDS, NativeChooser, SlotStep
from ....kernels.native.step_chain import StepChain
from ....model.decoder.growing_tables import GrowingTables
from ....model.decoder.native_decoder import NativeDecoder
from ....model.decoder.native_lora import NativeLoraTable
from ...array_checks import num_true
from ...config import LogprobsMode
from ...device.arrays import Array
from ...device.device import MOST_IN_FLIGHT
from ...device.pooler import Pooler
from ...execute.model_runner import ModelRunner
from ...grammar.masks import AllowedTokens
from ...messages import Bools, Started, StepGrant
from ...params import has_plain_choice
from ...sample.logits_processor import LogitsProcessor
from ...sample.sampling_math import Longs
from ...sample.slot_params import SlotParams
from ...sample.token_chooser import SampledRows, TokenChoice, TokenChooser

NEVER = -2  # a step; none follows it


class NativeRunner(ModelRunner):
    """As `ModelRunner`, but a step whose rows all read their newest token is one C++ call.

    The runner reports to the cache which blocks are used, and when a step starts and ends.

    After `use_chooser`, a step announced by `run_ahead` may have its tokens chosen with its forward pass. If all tokens
    are greedy, no logits are made. If every row is a decode row that needs nothing but logits, the step is a link of a
    chain. `run_ahead` then hands it to the library, which starts it as soon as the previous link ends: no Python runs
    between the two. With more than two steps in flight the loop is further ahead, and links are started one by one.

    The columns belong to the device thread. `run_ahead`, on the event loop, may still write block tables: a step is
    handed over only directly after a running link that has all of its slots. So its sequences were started before, and
    the entries it writes lie beyond those that the running link reads.
    """

    def __init__(
        self,
        model: NativeModel,
        cache: NativeCache,
        last_tokens: Longs,
        max_blocks_per_slot: int,
        num_host_blocks: int,
        pooler: Pooler,
        short_length: int = 0,
        adapters: NativeLoraTable | None = None,
        positions: GrowingTables | None = None,
    ) -> None:
        """`positions`: the model's rotary tables, which grow before the steps that need more; None: they are whole."""
        self._positions = positions
        self._native = NativeDecoder(model, adapters)
        sizes = (max_blocks_per_slot, num_host_blocks)
        super().__init__(self._native, cache, last_tokens, *sizes, pooler, short_length, adapters)
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
        self.num_handed_over = 0  # steps
        self._generation = -1  # the newest of any step
        self._chain: StepChain | None = None
        # written on the event loop
        self._is_plain = np.zeros(len(last_tokens), np.bool_)  # slots whose choice needs nothing but logits
        self._last_link = np.full(len(last_tokens), NEVER, np.int64)  # the last link that each slot was in
        self._links = [(NEVER, False)] * MOST_IN_FLIGHT  # ring by step: (step, whether it was handed over)
        self._is_greedy = np.zeros(len(last_tokens), np.bool_)  # plain slots that take the likeliest token
        self._greedy_steps = [NEVER] * MOST_IN_FLIGHT  # ring by step: steps of greedy slots only
        self._chooses = False

    def use_chooser(self, chooser: NativeChooser | None) -> None:
        """Lets the runner choose tokens that need nothing but logits, from the next step on.

        None turns this off.
        """
        self._chooses = chooser is not None
        has_line = self._native.model.step_thread_id > 0
        self._chain = StepChain(self._decoding, chooser) if chooser is not None and has_line else None

    def run_ahead(self, grant: StepGrant) -> None:
        """See `RunsAhead`. Called on the event loop."""
        for started in grant.started:
            self._is_plain[started.slot] = is_plain = _is_plain(started)
            self._is_greedy[started.slot] = is_plain and started.params.is_greedy
        step, slots = grant.step, grant.slots
        if self._chooses and self._is_greedy_step(grant):
            self._greedy_steps[step % MOST_IN_FLIGHT] = step
        if self._chain is None or not self._is_link(grant):
            return
        follows = num_true(self._last_link[slots] == step - 1) == len(slots)
        if follows and len(grant.table_slots):
            self._grow_positions(grant)
            self.tables[grant.table_slots, grant.table_places] = grant.table_blocks
        self._last_link[slots] = step
        is_handed_over = follows and self._chain.follow(step, slots, grant.starts)
        self.num_handed_over += is_handed_over
        self._links[step % MOST_IN_FLIGHT] = step, is_handed_over

    def _is_link(self, grant: StepGrant) -> bool:
        if not grant.is_decode or grant.drafts is not None or not len(grant.slots):
            return False
        if grant.started or grant.copies or grant.adapter_loads:
            return False
        return num_true(grant.is_sampled) == num_true(self._is_plain[grant.slots]) == len(grant.slots)

    def _is_greedy_step(self, grant: StepGrant) -> bool:
        slots = grant.slots[grant.is_sampled]
        return grant.drafts is None and 0 < len(slots) == num_true(self._is_greedy[slots])

    def forward(self, grant: StepGrant) -> Any:
        """As `ModelRunner.forward`, or a `TokenChoice` if all sampled rows need nothing else.

        On the device thread.
        """
        self._native_cache.begin_step()
        try:
            is_new, self._generation = grant.generation > self._generation, grant.generation
            if self._chain is not None and (is_new or grant.copies or grant.adapter_loads):
                # a step that is void with its predecessor may still read adapters, and read and write columns
                self._chain.drain()
            return super().forward(grant)
        finally:
            self._native_cache.end_step()

    def apply_updates(self, grant: StepGrant) -> None:
        self._grow_positions(grant)
        if self._links[grant.step % MOST_IN_FLIGHT] != (grant.step, True):
            super().apply_updates(grant)
        if len(grant.table_blocks):
            self._native_cache.note_used(int(grant.table_blocks.max()))

    def _grow_positions(self, grant: StepGrant) -> None:
        """A token is computed after its sequence has a block for it, so blocks bound the positions."""
        if self._positions is not None and len(grant.table_places):
            self._positions.grow((int(grant.table_places.max()) + 1) * self._native_cache.block_size)

    def compute(self, grant: StepGrant) -> Any:
        count = len(grant.slots)
        link, is_handed_over = self._links[grant.step % MOST_IN_FLIGHT]
        if link == grant.step and self._chain is not None:
            if not is_handed_over:
                self._chain.begin(grant.step, grant.slots, grant.starts)
            chosen = self._chain.wait(grant.step, count)
            if chosen is not None:
                return TokenChoice(*chosen)
        if self._greedy_steps[grant.step % MOST_IN_FLIGHT] == grant.step and not self.wants_more(grant):
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


def _is_plain(started: Started) -> bool:
    return started.pooling is None and started.params.logprobs is None and has_plain_choice(started.params)


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
            temperature=table.temperature,
            top_k=table.top_k,
            top_p=table.top_p,
            min_p=table.min_p,
            seeds=table.seeds,
            num_prompt=table.num_prompt,
        )
        if runner is not None:
            runner.use_chooser(self._chooser)

    def use(self, processor: LogitsProcessor) -> None:
        super().use(processor)
        if self._runner is not None:
            self._runner.use_chooser(None)

    def _choose(self, rows: SampledRows, logits: Array, allowed: AllowedTokens | None) -> tuple[Longs, Bools]:
        masks, mask_rows = None, NO_IDS
        if allowed is not None:
            masks, mask_rows = allowed.masks, allowed.mask_of_each(len(logits))
        return self._chooser.choose(np.ascontiguousarray(logits, np.float32), rows.slots, rows.places, masks, mask_rows)
