"""Loads a model to score texts, and computes the logits of a window's tokens by the runner that serves requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.kv_layout import KVLayout
from ...runtime.env.env import Env
from ...runtime.startup.phases import Phases
from ..config import EngineConfig
from ..device.arrays import arrays_of
from ..device.scored_prompts import LogitsWithPrompts, rows_of_a_piece
from ..errors import ConfigError
from ..execute.model_runner import ModelRunner
from ..loading.model import LoadedModel, load_model
from ..messages import Indices, Ints, Started, StepGrant, TableEntries
from ..params import SamplingParams
from .windows import TextWindow

SCORED = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0.0)
NUM_ROWS = 64  # of logits at once, for which the backends reserve memory
DEFAULT_CONTEXT = 2048  # tokens of a window, or the model's most if it has fewer

Floats = NDArray[np.float32]


class WindowScorer:
    """A loaded model with a KV cache for one window.

    It computes as an engine does: in chunks of max_num_batched_tokens, with the same kernels, weights and cache.
    """

    def __init__(self, loaded: LoadedModel, max_length: int) -> None:
        """`max_length`: tokens of a window at most, for which the cache has blocks."""
        assert isinstance(loaded.runner, ModelRunner), "loaded without asynchronous scheduling"
        self.info = loaded.info
        self.tokenizer = loaded.tokenizer
        self.max_length = min(max_length, loaded.info.max_model_len)  # with kinds of memory, the cache holds more
        self._layout = None if loaded.info.memory is None else loaded.info.memory.layout
        self._runner = loaded.runner
        self._num_steps = 0

    @classmethod
    def load(cls, config: EngineConfig, env: Env, context_length: int | None = None) -> WindowScorer:
        """Loads a model for windows of `context_length` tokens; None: `DEFAULT_CONTEXT`, or the model's most.

        Blocks until done. Raises `ConfigError` and `ModelError` as `load_model` does.
        """
        wanted = context_length or DEFAULT_CONTEXT
        num_blocks = -(-wanted // config.block_size)
        config = replace(
            config,
            max_model_len="auto",  # at most what the blocks hold
            num_gpu_blocks=num_blocks,
            kv_cache_bytes=None,
            num_cpu_blocks=0,
            max_num_seqs=NUM_ROWS,
            itl_target_ms=0.0,
            async_scheduling=False,
            speculation="off",
            enable_chunked_prefill=True,
        )
        loaded = load_model(config, Phases(env.now), env)
        if not isinstance(loaded, LoadedModel) or "generate" not in loaded.info.tasks:
            raise ConfigError(f"model = {config.model}: must be a model that generates; this one predicts no tokens")
        most = loaded.info.max_model_len
        if context_length is not None and context_length > most:
            raise ConfigError(f"context_length = {context_length}: must be at most {most}, the model's maximum")
        return cls(loaded, num_blocks * config.block_size)

    @property
    def num_step_tokens(self) -> int:
        """The most tokens of a step; less than those of the engine if blocks of several kinds would not hold them."""
        most, layout = self.info.max_num_batched_tokens, self._layout
        if layout is None:
            return most
        chunks = range(min(most, self.max_length), 1, -1)
        return next((each for each in chunks if layout.slabs_of_one(self.max_length, each) <= layout.num_slabs), 1)

    def logits(self, window: TextWindow, num_step_tokens: int) -> Iterator[tuple[Ints, Floats]]:
        """Yields the scored tokens of a window by piece: their ids [n], and the logits [n, V] that predict them.

        The pieces of models with the same vocabulary and `num_step_tokens` are the same. The logits may be changed by
        the next piece.
        """
        prompt, num_rows = window.token_ids, rows_of_a_piece(NUM_ROWS, self.info.vocab_size)
        first = len(prompt) - window.num_scored
        for start in range(0, len(prompt), num_step_tokens):
            end = min(start + num_step_tokens, len(prompt))
            result = self._runner.forward(self._grant(prompt, start, end))
            if not isinstance(result, LogitsWithPrompts):
                continue  # one token, behind which nothing is predicted
            (chunk,) = result.runs
            for row in range(max(0, first - chunk.start), len(chunk), num_rows):
                rows = slice(row, min(row + num_rows, len(chunk)))
                arrays = arrays_of(result.hidden)
                with arrays.inference():
                    piece = result.to_logits(result.hidden[rows])
                    yield chunk.token_ids[rows], arrays_of(piece).on_host(arrays_of(piece).floats(piece))

    def _grant(self, prompt: Ints, start: int, end: int) -> StepGrant:
        """The step that computes [start, end) of the prompt, which begins in block 0 of slot 0."""
        is_first, num_blocks = start == 0, -(-len(prompt) // self.info.block_size)
        places = np.arange(num_blocks if is_first else 0)
        is_long = 0 < self.info.short_length < len(prompt)
        started = Started(0, 0, "window", prompt, len(prompt), SCORED, seed=0, is_long=is_long)
        self._num_steps += 1
        return StepGrant(
            step=self._num_steps,
            generation=0,
            slots=np.zeros(1, np.intp),
            starts=np.array([start], np.int32),
            num_tokens=np.array([end - start], np.int32),
            is_sampled=np.array([end == len(prompt)]),
            table_slots=np.zeros(len(places), np.intp),
            table_places=places,
            table_blocks=places.astype(np.int32),
            started=(started,) if is_first else (),
            more_tables=_more_tables(self._layout, places, self.num_step_tokens) if self._layout and is_first else (),
        )


def _more_tables(layout: KVLayout, places: Indices, chunk: int) -> tuple[TableEntries, ...]:
    """The blocks of the kinds after the first, in the slabs after its own, for a window in blocks at `places`.

    A kind whose queries see few blocks has as many, and uses them in turns.
    """
    made, length = [], len(places) * layout.block_size
    slab = -(-len(places) // layout.blocks_per_slab[0])
    for kind in range(1, len(layout.kinds)):
        count, size = layout.most_blocks(kind, length, chunk), layout.blocks_per_slab[kind]
        blocks = (slab * size + places % count).astype(np.int32)
        made.append(TableEntries(kind, np.zeros(len(places), np.intp), places, blocks))
        slab += -(-count // size)
    return tuple(made)
