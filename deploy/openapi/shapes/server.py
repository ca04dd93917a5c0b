"""Models of answers about the server: its health, models and settings, what it holds, and its administration."""

from __future__ import annotations

from typing import Any, Literal

from ....runtime.startup.load_progress import LoadPhase
from ...api.schema.shapes import Count, EngineOfFleet, Shape


class Model(Shape):
    """A served model name."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count
    permission: list[dict[str, Any]]


class Models(Shape):
    """All served model names."""

    object: Literal["list"]
    data: list[Model]


class Load(Shape):
    """The load: `server_load` in requests, other counts in sequences, `kv_usage` in [0, 1], times in seconds."""

    server_load: Count
    waiting: Count
    running: Count
    swapped: Count
    kv_usage: float
    estimated_wait_s: float


class Version(Shape):
    """The version of millrace."""

    version: str


class Alive(Shape):
    """The process responds."""

    status: Literal["alive"]


class MissingEngine(Shape):
    """An engine of several that takes no requests."""

    index: Count
    state: Literal["loading", "draining", "dead"]
    reason: str | None


class FrontProcess(Shape):
    """A front of several, and why it takes no requests."""

    number: Count
    pid: Count  # 0: there is none now
    state: Literal["loading", "ready", "stopped"]
    reason: str | None
    num_restarts: Count
    models: list[str]  # where fronts have different ones


class ModelHealth(Shape):
    """Whether a server of several models takes requests for one of them."""

    status: Literal["ready", "degraded", "loading", "draining", "stalled", "dead"]
    reason: str | None


class Ready(Shape):
    """The server accepts requests; `degraded`: engines, fronts or models are missing, and others serve."""

    status: Literal["ready", "degraded"]
    reason: str | None = None
    missing_engines: list[MissingEngine] | None = None
    models: dict[str, ModelHealth] | None = None  # of a server that has several
    missing_models: list[str] | None = None  # those of which requests are refused
    front: Count | None = None  # that answers, of several; the next has all
    fronts: list[FrontProcess] | None = None


class FileProgress(Shape):
    """How much of a file is downloaded or read."""

    num_bytes: Count
    total_bytes: Count


class LoadingProgress(Shape):
    """How far the model is loaded. Bytes are those of the phase."""

    phase: LoadPhase
    num_bytes: Count
    total_bytes: Count  # 0 while it is not known
    percent: float | None
    mb_per_s: float
    seconds_left: float | None
    files: dict[str, FileProgress]


class NotReady(Shape):
    """The server accepts no requests, for this reason."""

    status: str
    stage: str | None
    reason: str | None
    progress: LoadingProgress | None = None  # while the model is loading
    models: dict[str, ModelHealth] | None = None  # as of Ready
    front: Count | None = None
    fronts: list[FrontProcess] | None = None


class Weights(Shape):
    """The weights in memory."""

    num_weights: Count
    bits_per_weight: float
    bytes_per_token: Count  # that a step of one token reads, without keys and values


class ServedModel(Shape):
    """The running model."""

    id: str
    served_names: list[str]
    max_model_len: Count
    vocab_size: Count
    dtype: str
    merged_adapters: list[str]  # folders or Hub ids, each perhaps with a scale: PATH=scale
    quantization: str | None  # format of the weight matrices, as set or as the file packs them; null: dtype
    weights: Weights | None  # null for an encoder, and for a model that runs through transformers
    kv_cache_dtype: str | None  # of keys and values; null: no KV cache
    device: str
    model_impl: Literal["millrace", "transformers"]
    attention_backend: str
    is_batch_invariant: bool  # the numbers of a request do not depend on other requests
    eos_token_ids: list[Count]
    has_chat_template: bool
    tasks: list[str]  # supported tasks
    embeddings: dict[str, Any] | None  # pooling settings; null for a model without embeddings


class Configuration(Shape):
    """The effective settings, with secrets masked."""

    engine: dict[str, Any]
    server: dict[str, Any]


class MemoryRow(Shape):
    """One use of memory."""

    name: str
    bytes: Count
    place: Literal["device", "host"]
    what: str


class CacheKind(Shape):
    """Layers whose keys and values are kept equally long."""

    name: Literal["full", "window", "chunk", "latent"]
    window: Count | None  # tokens that they keep at most; null: all
    num_layers: Count
    bytes_per_block: Count
    blocks_per_slab: Count


class CacheSize(Shape):
    """The size of the KV cache. The last three are of a cache in which windows free memory."""

    block_size: Count
    bytes_per_block: Count
    num_blocks: Count
    num_tokens: Count
    num_longest_sequences: Count
    slab_bytes: Count | None = None
    num_slabs: Count | None = None
    kinds: list[CacheKind] | None = None


class Memory(Shape):
    """Memory by use."""

    device: str
    device_bytes: Count
    budget_bytes: Count
    total_bytes: Count
    host_bytes: Count
    rows: list[MemoryRow]
    kv_cache: CacheSize


class BlocksOfKind(Shape):
    """The blocks of one kind of memory, of which `num_slabs` slabs are lent to it."""

    name: Literal["full", "window", "chunk", "latent"]
    window: Count | None
    num_layers: Count
    block_bytes: Count
    blocks_per_slab: Count
    num_slabs: Count
    num_blocks: Count
    free: Count
    used: Count
    shared: Count
    cached: Count
    quarantined: Count


class Blocks(Shape):
    """KV blocks by state; `shared` is a part of `used`. With several kinds of memory, those of the first."""

    num_blocks: Count
    block_size: Count
    free: Count
    used: Count
    shared: Count
    cached: Count
    quarantined: Count
    num_slabs: Count | None = None  # this and the next: with several kinds of memory
    slab_bytes: Count | None = None
    kinds: list[BlocksOfKind] | None = None


class Process(Shape):
    """The process of the step loop, or the first of several."""

    mode: Literal["inline", "split"]
    engine_pid: Count | None
    engines: list[EngineOfFleet]  # empty unless there are several
    front: Count | None = None  # that answers, of several
    fronts: list[FrontProcess] | None = None


class Graphs(Shape):
    """Captured CUDA graphs: row counts of decode steps, token counts of mixed steps, and the cost."""

    decode_rows: list[Count]
    mixed_tokens: list[Count]
    seconds: float
    bytes: Count


class Cache(Shape):
    """A cache that fills while the server runs; null: not known, or not bounded by that."""

    name: str
    entries: Count | None
    max_entries: Count | None
    bytes: Count | None
    max_bytes: Count | None


class ServerInfo(Shape):
    """The running model, its settings and its memory."""

    version: str
    model: ServedModel
    config: Configuration
    memory: Memory | None
    graphs: Graphs | None
    startup_s: dict[str, float]
    process: Process
    blocks: Blocks | None
    caches: list[Cache]


class DocumentInfo(Shape):
    """Title and version of the API."""

    title: str
    version: str
    description: str


class Document(Shape):
    """An OpenAPI document."""

    openapi: str
    info: DocumentInfo
    paths: dict[str, dict[str, Any]]
    components: dict[str, dict[str, Any]]


class Aborted(Shape):
    """An aborted request."""

    id: str
    aborted: Literal[True]
