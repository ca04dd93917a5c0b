"""What callers of the engine get: pieces of answers, whole answers, and facts about the model. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..model.pooling import PoolingConfig
from .memory_table import MemoryTable
from .messages import FinishReason, PromptLogprobs, Rates, Task, TokenLogprobs
from .params import SamplingParams
from .pooling_params import Floats

OutputKind = Literal["delta", "cumulative", "final"]
FinishName = Literal["stop", "length", "error", "abort"]

FINISH_NAMES: Mapping[FinishReason, FinishName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ERROR: "error",
    FinishReason.ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt has come."""

    total: int  # tokens
    cached: int  # of them found, not computed
    processed: int  # of them there, the cached ones included
    time_s: float  # since the device began with it


@dataclass(slots=True)
class Delta:
    """What one choice gained since its client last looked. The last one of a choice has a `finish_reason`."""

    index: int  # of the choice: prompt p, choice j is p * n + j
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # their texts, joined over all deltas, are the text
    finish_reason: FinishName | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id
    score: float | None = None  # of an answer that a beam search found
    vector: Floats | None = None  # of a pooled sequence, which has one delta
    progress: Progress | None = None  # of its prompt, if that was asked for; such a delta may hold nothing else


@dataclass(slots=True)
class CompletionOutput:
    """One choice. With output kind "delta" only what is new since the output before."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # if asked for
    finish_reason: FinishName | None = None
    stop_reason: str | int | None = None
    score: float | None = None  # of an answer that a beam search found, see `BeamParams`; higher is better


@dataclass(slots=True)
class RequestOutput:
    """An answer, or a part of one, to one request. `outputs` of kind "delta" hold only the choices that gained."""

    request_id: str
    prompt: str | None  # if it was given as text
    prompt_token_ids: list[int] | None  # if it was given as ids, one list until the end; there of any prompt
    outputs: list[CompletionOutput]
    finished: bool
    num_prompt_tokens: int  # 0 until the first token
    num_generated_tokens: int  # of all choices, so far
    num_cached_tokens: int = 0  # prompt tokens that were not computed
    metrics: Mapping[str, Any] | None = None  # times in ms, when it is finished: see `timing.metrics`
    prompt_logprobs: PromptLogprobs | None = None  # if asked for, in the output with which the request is finished


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    embedding: Floats  # [E]
    num_prompt_tokens: int
    num_cached_tokens: int = 0  # prompt tokens that were not computed


@dataclass(slots=True)
class ScoringRequestOutput:
    """How well a document answers a query; higher is better."""

    request_id: str
    score: float
    num_prompt_tokens: int  # of both texts


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded, and how long each phase of the start took."""

    model_id: str
    max_model_len: int  # tokens of prompt and answer together
    vocab_size: int
    dtype: str
    device: str
    attention_backend: str
    eos_token_ids: tuple[int, ...]
    num_blocks: int  # of the KV cache; 0: an encoder has none
    block_size: int  # tokens
    has_chat_template: bool
    default_params: SamplingParams  # what a request gets that says nothing
    num_host_blocks: int = 0  # for swapped sequences
    max_num_batched_tokens: int = 2048  # of a step, at most
    itl_target_ms: float = 0.0  # that a step may take while answers wait; 0: any
    rates: Rates | None = None  # of copying and computing, as measured; None: not measured
    startup_s: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds
    memory: MemoryTable | None = None  # where it goes; None without a model
    tasks: frozenset[Task] = frozenset({"generate", "embed"})  # what it can be asked for
    pooling: PoolingConfig | None = None  # what its embeddings are; None: it has none
    quantization: str | None = None  # how matrices are kept; None: as dtype
    kv_cache_dtype: str | None = None  # of keys and values; None: an encoder has none
    captured: CaptureReport | None = None  # CUDA graphs; None: each kernel is launched by itself


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """The captured sizes, and the time and memory that capturing took."""

    batches: tuple[Batch, ...]  # in the order of capture
    seconds: float
    num_bytes: int

    def to_event(self) -> dict[str, object]:
        """The fields of the log event."""
        return {
            "decode_rows": [batch.num_rows for batch in reversed(self.batches) if batch.is_decode],
            "mixed_tokens": [batch.num_tokens for batch in reversed(self.batches) if not batch.is_decode],
            "seconds": round(self.seconds, 3),
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True)
class Batch:
    """The size of a step, padding included."""

    num_rows: int
    num_tokens: int
    is_decode: bool  # each row has one token
