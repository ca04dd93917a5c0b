"""What a native model does without arrays being gathered for it: decoding steps, and the choice of their tokens.

Knows which columns the library reads. No torch.
"""

from __future__ import annotations

import numpy as np

from ..kernels.native.cache import NativeCache
from ..kernels.native.model import NativeModel
from ..kernels.native.slots import NO_IDS, Chooser, Decoding
from ..model.native_decoder import NativeDecoder
from .arrays import Array
from .choosing import Choosing, Rows
from .columns import num_true
from .config import LogprobsMode
from .grammar.masks import Allowed
from .logits import Longs
from .messages import Bools, StepGrant
from .pooler import Pooler
from .prompt_logits import LogitsWithPrompts
from .runner import ModelRunner
from .sampling_table import SamplingTable


class NativeRunner(ModelRunner):
    """As any runner; but a step whose rows all read their newest token is one call, and the cache hears what is used of
    it, and when."""

    def __init__(
        self,
        model: NativeModel,
        cache: NativeCache,
        last_tokens: Longs,
        max_blocks_per_slot: int,
        num_host_blocks: int,
        pooler: Pooler,
    ) -> None:
        super().__init__(NativeDecoder(model), cache, last_tokens, max_blocks_per_slot, num_host_blocks, pooler)
        self._native_cache = cache
        self._decoding = Decoding(model, cache, last_tokens=last_tokens, num_known=self._num_known, tables=self.tables)

    def forward(self, grant: StepGrant) -> Array | LogitsWithPrompts:
        ahead = self._native_cache.ahead
        ahead.begin_step()
        try:
            return super().forward(grant)
        finally:
            ahead.end_step()

    def take_news(self, grant: StepGrant) -> None:
        super().take_news(grant)
        if len(grant.table_blocks):
            self._native_cache.note_used(int(grant.table_blocks.max()))

    def compute(self, grant: StepGrant) -> Array | LogitsWithPrompts:
        count = len(grant.slots)
        is_plain = grant.is_decode and grant.drafts is None and self.pooler is not None and not self.pooler.num_pooled
        if is_plain and count and num_true(grant.is_sampled) == count:
            logits = self._decoding.step(grant.slots, grant.starts)
            if logits is not None:
                return logits
        return super().compute(grant)


class NativeChoosing(Choosing):
    """As any choosing; what slots asked for is read in the table itself."""

    def __init__(self, table: SamplingTable, last_tokens: Array, mode: LogprobsMode, *, model: NativeModel) -> None:
        super().__init__(table, last_tokens, mode)
        self._chooser = Chooser(
            model,
            is_random=table.is_random,
            temperature=table.temperature,
            top_k=table.top_k,
            top_p=table.top_p,
            min_p=table.min_p,
            seeds=table.seeds,
            num_prompt=table.num_prompt,
        )

    def _choose(self, rows: Rows, logits: Array, allowed: Allowed | None) -> tuple[Longs, Bools]:
        masks, mask_rows = None, NO_IDS
        if allowed is not None:
            masks, mask_rows = allowed.masks, allowed.mask_of_each(len(logits))
        return self._chooser.choose(np.ascontiguousarray(logits, np.float32), rows.slots, rows.places, masks, mask_rows)
