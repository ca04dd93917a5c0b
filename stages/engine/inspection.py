"""Inspection of an engine: its model, its stages, and their state.

Read-only, except `reset_prefix_cache` and `forget_prefixes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...runtime.histogram import Histogram, LatencyHistogram
from ...runtime.pipeline import Health, NotServing, Pipeline
from ..allocate.block_pool import BlockPool, BlockTables
from ..allocate.host_tier import HostTier
from ..allocate.prefix_cache import PrefixCache
from ..allocate.prefix_tree import read_prefix_tree
from ..exit.outboxes import Outboxes
from ..grammar.compiled import Grammars
from ..grammar.gate import GrammarGate
from ..intake.admission import Admission
from ..outputs import ModelInfo
from ..schedule.scheduler import Scheduler
from .engine_status import EngineStatus
from .read_status import read_core, read_owners
from .wiring import EncoderStages, EngineStages, TextStages

if TYPE_CHECKING:
    from ...model.text.tokenizer import Tokenizer
    from ..tokenize.prompt_encoder import ModelEncoder


class EngineParts:
    """Access to the parts of a running engine. Raises `NotServing` while it is not running.

    `Engine` inherits it, sets the parts when it starts, and removes them when it stops. Call it on the event loop. The
    objects returned are owned by their stages: read them only.
    """

    def __init__(self) -> None:
        self._health = Health("new")
        self._parts: TextStages | EncoderStages | None = None
        self._info: ModelInfo | None = None

    @property
    def health(self) -> Health:
        """Whether requests are admitted, and if not, why."""
        if self._health.is_ready and self._parts is not None:
            return self._parts.pipeline.health
        return self._health

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Available from the start of the engine on, also after its stop."""
        if self._info is None:
            raise NotServing(self.health)
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._require_parts().loaded.tokenizer

    @property
    def encoder(self) -> ModelEncoder:
        """Encodes prompts and chats to token ids, as the tokenize stage does."""
        return self._require_parts().loaded.encoder

    @property
    def pipeline(self) -> Pipeline:
        """The running stages, and the channels between them."""
        return self._require_parts().pipeline

    @property
    def exit(self) -> Outboxes:
        """The exit, whose `on_start` and `on_end` report each request."""
        return self._require_parts().exit

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler's state: sequences, slots, counters."""
        return self._core().schedule.scheduler

    @property
    def pool(self) -> BlockPool:
        """The state of the KV blocks."""
        return self._core().allocate.allocator.pool

    @property
    def host_tier(self) -> HostTier | None:
        """The state of the host tier; None if the engine has none."""
        return self._core().allocate.allocator.host

    @property
    def block_tables(self) -> BlockTables:
        """The block tables of the running sequences."""
        return self._core().allocate.allocator.tables

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """The state of the prefix cache; None if it is disabled."""
        return self._core().allocate.allocator.cache

    @property
    def step_tokens(self) -> Histogram:
        """Tokens computed per step, over all steps so far."""
        return self._core().allocate.step_tokens

    @property
    def token_gaps_us(self) -> LatencyHistogram:
        """Microseconds between two tokens of an answer, over all answers so far."""
        return self._text().detokenize.gaps.histogram

    @property
    def idle_gaps_us(self) -> Histogram | None:
        """Idle microseconds of the device between two steps while there was work, of all steps.

        None if the device is not asynchronous.
        """
        return self._core().device.idle_gaps_us

    @property
    def admission(self) -> Admission:
        """The counts of admitted and waiting requests."""
        return self._require_parts().intake.admission

    @property
    def grammars(self) -> Grammars:
        """The compiled grammars."""
        return self._text().grammars

    @property
    def grammar_gate(self) -> GrammarGate:
        """The gate that tries and compiles grammars."""
        return self._text().gate

    def status(self, *, with_sequences: bool = False, with_blocks: bool = False) -> EngineStatus:
        """What the engine does and has done, now.

        Of a step loop in another process, as it was last reported: `refresh` first for a report of now.
        """
        pipeline = self.pipeline.status()
        if not self.has_core:
            return EngineStatus(pipeline, None, {})
        core = self._core().core
        owners = read_owners(core.schedule.scheduler) if with_sequences or with_blocks else {}
        read = read_core(core, with_sequences=with_sequences, with_blocks=with_blocks)
        return EngineStatus(pipeline, read, owners)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache. Returns the number of blocks freed."""
        if not self.has_core:
            return 0
        return self._core().allocate.reset_prefix_cache()

    async def forget_prefixes(self) -> int:
        """As `reset_prefix_cache`, also if the blocks are in the engine process."""
        return self.reset_prefix_cache()

    async def prefix_tree(self) -> dict[str, Any] | None:
        """The tree of the prefix cache: see `allocate/prefix_tree.py`. None without a cache."""
        return read_prefix_tree(self._core().allocate.allocator) if self.has_core else None

    async def refresh(self, *, with_blocks: bool = False, with_stacks: bool = False) -> None:
        """Updates the part of `status` that is in another process.

        Afterwards it is not older than this call. `with_blocks` includes the owner of each block, `with_stacks` the
        stacks of tasks. Here all state is in this process, and only the trace is brought up to now.
        """
        if self.pipeline.watch is not None:
            self.pipeline.watch.write_stage_times()

    @property
    def has_core(self) -> bool:
        """Whether the engine has a scheduler and blocks. An encoder model has neither."""
        return isinstance(self._require_parts(), TextStages)

    def _require_parts(self) -> TextStages | EncoderStages:
        if self._parts is None:
            raise NotServing(self.health)
        return self._parts

    def _text(self) -> TextStages:
        parts = self._require_parts()
        if not isinstance(parts, TextStages):
            raise AttributeError("a model that generates nothing has no scheduler, no blocks and no prefix cache")
        return parts

    def _core(self) -> EngineStages:
        parts = self._text()
        assert isinstance(parts, EngineStages), "the step loop is in another process"
        return parts
