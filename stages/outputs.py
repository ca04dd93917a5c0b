"""What callers of the engine receive: deltas, whole answers, and facts about the model.

Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..kernels.layout.kv_layout import KVLayout
from ..kernels.layout.state_layout import StateLayout
from ..model.pooling import PoolingConfig
from .engine_settings import ModelImpl
from .memory_table import MemoryTable
from .messages import FinishReason, PromptLogprobs, Rates, TokenLogprobs
from .params import SamplingParams
from .pooling_params import Floats
from .tasks import Task

OutputKind = Literal["delta", "cumulative", "final"]
FinishName = Literal["stop", "length", "abort"]

FINISH_NAMES: Mapping[FinishReason, FinishName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How much of a prompt has been computed."""

    total: int  # tokens
    cached: int  # found in the prefix cache, not computed
    processed: int  # computed so far, cached ones included
    time_s: float  # since the device began with the prompt


@dataclass(slots=True)
class ChoiceDelta:
    """What one choice gained since the previous read.

    The last delta of a choice has a `finish_reason`.
    """

    index: int  # of the choice: prompt p, choice j is p * n + j
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # their texts, joined over all deltas, equal the text
    finish_reason: FinishName | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id
    score: float | None = None  # of a beam search's answer
    vector: Floats | None = None  # of a pooled sequence, which has exactly one delta
    progress: PrefillProgress | None = None  # of its prompt, with return_progress; such a delta may have no tokens


@dataclass(slots=True)
class CompletionOutput:
    """One choice. With output kind "delta", only what is new since the previous output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # if requested
    finish_reason: FinishName | None = None
    stop_reason: str | int | None = None
    score: float | None = None  # of a beam search's answer, see `BeamParams`; higher is better


@dataclass(slots=True)
class RequestOutput:
    """The answer to one request, or a part of it.

    With output kind "delta", `outputs` has only changed choices.
    """

    request_id: str
    prompt: str | None  # if the prompt was given as text
    prompt_token_ids: list[int] | None  # if given as ids, the same list in each output; in the last output always
    outputs: list[CompletionOutput]
    finished: bool
    num_prompt_tokens: int  # 0 until the first token of the answer
    num_generated_tokens: int  # of all choices, so far
    num_cached_tokens: int = 0  # prompt tokens that were not computed
    metrics: Mapping[str, Any] | None = None  # in the last output, times in ms: see `exit/request_times.py`
    prompt_logprobs: PromptLogprobs | None = None  # if requested, in the last output


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    embedding: Floats  # [E]
    num_prompt_tokens: int
    num_cached_tokens: int = 0  # prompt tokens that were not computed


@dataclass(slots=True)
class ScoringRequestOutput:
    """How well a document answers a query. Higher is better."""

    request_id: str
    score: float
    num_prompt_tokens: int  # of both texts together


@dataclass(frozen=True, slots=True)
class WeightUse:
    """The size of the weights in memory."""

    num_weights: int
    num_bytes: int  # without copies that some steps read instead
    bytes_per_token: int  # that a step of one token reads, without keys and values

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights

    def to_json(self) -> dict[str, float]:
        """The fields of `/server_info`."""
        return {
            "num_weights": self.num_weights,
            "bits_per_weight": round(self.bits_per_weight, 3),
            "bytes_per_token": self.bytes_per_token,
        }


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded model, and the time of each start-up phase."""

    model_id: str
    max_model_len: int  # tokens, prompt plus answer
    vocab_size: int
    dtype: str
    device: str
    attention_backend: str
    eos_token_ids: tuple[int, ...]
    num_blocks: int  # of the KV cache; 0 for an encoder
    block_size: int  # tokens
    has_chat_template: bool
    default_params: SamplingParams  # of a request that sets nothing
    default_max_tokens: int | None = None  # of a request whose answer may fill the context; None: it may
    num_host_blocks: int = 0  # for swapped sequences and evicted prefixes
    max_num_batched_tokens: int = 2048  # upper bound per step
    itl_target_ms: float = 0.0  # target time of a step with decodes; 0: none
    rates: Rates | None = None  # measured speed of copying and computing; None: not measured
    startup_s: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds
    memory: MemoryTable | None = None  # memory by use; None without a model
    tasks: frozenset[Task] = frozenset({"generate", "embed"})  # that the model supports
    pooling: PoolingConfig | None = None  # of its embeddings; None: it has none
    has_trained_pooling: bool = True  # the checkpoint, or a setting, says how to pool; False: no more than a guess
    quantization: str | None = None  # of weight matrices, as set or as the file packs them; None: they have `dtype`
    weights: WeightUse | None = None  # None: not known, as of an encoder
    kv_cache_dtype: str | None = None  # of keys and values; None for an encoder
    captured: CaptureReport | None = None  # CUDA graphs; None: kernels are launched one by one
    model_impl: ModelImpl = "millrace"  # whose modules compute a step
    family: str | None = None  # the checkpoint's model_type; None: not known
    short_length: int = 0  # tokens; longer sequences have other rotary factors (LongRoPE). 0: all have the same
    kv_layout: KVLayout | None = None  # of a cache of several kinds; `num_blocks` is then kind 0's. None: it has one
    num_more_host_blocks: tuple[int, ...] = ()  # as `num_host_blocks`, of each kind from 1 on: `KVLayout.host_blocks`
    # Of recurrent layers, with as many slots as the memory has room for; None: sequences have keys and values only.
    states: StateLayout | None = None


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """The captured sizes, and the time and memory that capturing took."""

    batches: tuple[GraphBatch, ...]  # in the order of capture
    seconds: float
    num_bytes: int

    def to_event(self) -> dict[str, object]:
        """The fields of the log event."""
        return {
            "decode_rows": [batch.num_rows for batch in reversed(self.batches) if batch.is_decode],
            "mixed_tokens": sorted({batch.num_tokens for batch in self.batches if not batch.is_decode}),
            "seconds": round(self.seconds, 3),
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True)
class GraphBatch:
    """The size of a step, padding included."""

    num_rows: int
    num_tokens: int
    is_decode: bool  # each row has one token
    has_adapters: bool = False  # its products add LoRA adapters
