"""What one may look at in an engine: its model, its stages, and the books that the stages keep.

Changes nothing but the one thing that is asked of the books: to forget the prefixes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...runtime.histogram import Histogram
from ...runtime.pipeline import Health, NotServing, Pipeline
from ..allocate.block_pool import BlockPool, BlockTables
from ..allocate.host_tier import HostTier
from ..allocate.prefix_cache import PrefixCache
from ..exit.outboxes import Outboxes
from ..grammar.compiled import Grammars
from ..grammar.gate import GrammarGate
from ..intake.admission import Admission
from ..outputs import ModelInfo
from ..schedule.scheduler import Scheduler
from .wiring import EncoderParts, EngineParts, TextParts

if TYPE_CHECKING:
    from ...model.text.tokenizer import Tokenizer
    from ..tokenize.prompt_encoder import ModelEncoder


class EngineBooks:
    """The parts of an engine while there are any, and what is in them. Raises `NotServing` while there are none.

    The engine that inherits it puts the parts in place when it starts, and takes them away when it stops.
    """

    def __init__(self) -> None:
        self._health = Health("new")
        self._parts: TextParts | EncoderParts | None = None
        self._info: ModelInfo | None = None

    @property
    def health(self) -> Health:
        """Whether requests are taken, and if not, why."""
        if self._health.is_ready and self._parts is not None:
            return self._parts.pipeline.health
        return self._health

    @property
    def info(self) -> ModelInfo:
        """What was loaded. There once the engine has started, and stays."""
        if self._info is None:
            raise NotServing(self.health)
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._require_parts().loaded.tokenizer

    @property
    def encoder(self) -> ModelEncoder:
        """Prompts and chats to token ids, as the tokenize stage does it."""
        return self._require_parts().loaded.encoder

    @property
    def pipeline(self) -> Pipeline:
        """The stages and the channels between them, running."""
        return self._require_parts().pipeline

    @property
    def exit(self) -> Outboxes:
        """Where requests end, to be told of them."""
        return self._require_parts().exit

    @property
    def scheduler(self) -> Scheduler:
        """The books of schedule, to look at."""
        return self._core().schedule.scheduler

    @property
    def pool(self) -> BlockPool:
        """The books of the KV cache's blocks, to look at."""
        return self._core().allocate.allocator.pool

    @property
    def host_tier(self) -> HostTier | None:
        """The books of what was moved to the host's memory, to look at; None if nothing is ever moved there."""
        return self._core().allocate.allocator.host

    @property
    def block_tables(self) -> BlockTables:
        """Where the running sequences' keys and values lie, to look at."""
        return self._core().allocate.allocator.tables

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """What is known of earlier prompts and answers, to look at; None if it is switched off."""
        return self._core().allocate.allocator.cache

    @property
    def step_tokens(self) -> Histogram:
        """Tokens computed in a step, of all steps so far."""
        return self._core().allocate.step_tokens

    @property
    def token_gaps_us(self) -> Histogram:
        """Microseconds between two tokens of an answer, of all answers so far."""
        return self._text().detokenize.gaps.histogram

    @property
    def idle_gaps_us(self) -> Histogram | None:
        """Microseconds that the device stood idle between two steps although there was work, of all steps so far; None
        where the steps are computed by the thread that is told to."""
        return self._core().device.idle_gaps_us

    @property
    def admission(self) -> Admission:
        """The counts at the door, to look at."""
        return self._require_parts().intake.admission

    @property
    def grammars(self) -> Grammars:
        """The books of the compiled grammars, to look at."""
        return self._text().grammars

    @property
    def grammar_gate(self) -> GrammarGate:
        """Where grammars are looked at, to look at."""
        return self._text().gate

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix, so that nothing is found that was computed before. Returns the blocks freed."""
        if not self.has_core:
            return 0
        return self._core().allocate.reset_prefix_cache()

    async def forget_prefixes(self) -> int:
        """The same, wherever the blocks are."""
        return self.reset_prefix_cache()

    async def refresh(self, *, with_blocks: bool = False, with_stacks: bool = False) -> None:
        """Before one looks at books that may be in another process (`scheduler`, `pool`, stages and channels): what
        they show then is not older than this call. Which block is whose, and where tasks wait, is told if asked for.
        Here they are at hand."""

    @property
    def has_core(self) -> bool:
        """Whether there are a scheduler and blocks: not where the model reads texts at once."""
        return isinstance(self._require_parts(), TextParts)

    def _require_parts(self) -> TextParts | EncoderParts:
        if self._parts is None:
            raise NotServing(self.health)
        return self._parts

    def _text(self) -> TextParts:
        parts = self._require_parts()
        if not isinstance(parts, TextParts):
            raise AttributeError("a model that generates nothing has no scheduler, no blocks and no prefix cache")
        return parts

    def _core(self) -> EngineParts:
        parts = self._text()
        assert isinstance(parts, EngineParts), "the books of another process are its own"
        return parts
