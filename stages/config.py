"""The engine's settings: names, defaults, meanings, and the checks that need no model.

Read once, checked once, passed in. Names are those of vLLM where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..runtime.fault_injection import parse_fault
from .errors import ConfigError

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
MAX_SPECULATIVE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine can be told at its start. A `None` is settled at start-up from the model and the machine."""

    # the model
    model: str | None = None  # a folder, a Hub id, or None for the bundled model
    revision: str | None = None  # of a Hub model: branch, tag or commit
    download_dir: str | None = None  # where Hub models are cached; None: the Hub library's own place
    offline: bool = False  # never open a socket; the model must be there already
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"  # dummy: random weights, for benchmarks
    dtype: Literal["auto", "float32", "bfloat16", "float16", "half"] = "auto"  # auto: the checkpoint's
    quantization: Literal["int8", "int4"] | None = (
        None  # of matrices, as they are loaded; None: they are kept as `dtype`
    )
    max_model_len: int | Literal["auto"] | None = None  # tokens, prompt and answer; None: the model's; auto: what fits
    logprobs_mode: LogprobsMode = "raw_logprobs"  # the model's own; processed: of what tokens are drawn from
    generation_config: Literal["auto", "off"] = "auto"  # sampling defaults from the checkpoint
    chat_template: str | None = None  # text of a template that replaces the checkpoint's
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"  # of embeddings; auto: as the checkpoint says
    seed: int = 0  # of random weights, and of requests that bring none

    # where it runs
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "native", "torch", "triton"] = "auto"  # auto: on cuda triton, on cpu native
    deterministic: bool = False  # a request gets the same bits whatever runs beside it; slower, and by triton only
    threads: int | None = None  # compute threads on a CPU; None: one a core, or what a quota keeps running
    tokenizer_workers: int = 2  # threads; a long prompt keeps one busy while others pass

    # the batch
    max_num_seqs: int = 256  # sequences that run at once
    max_num_batched_tokens: int | None = None  # of one step, at most; None: 2048, by the native library 512
    itl_target_ms: float | None = None  # that steps beside answers may take; None: natively as measured, else 0; 0: any
    enable_chunked_prefill: bool = True  # False: a prompt runs in one step, whole
    scheduler: str = (
        "priority"  # or "fifo", or package.module:Class, a subclass of millrace.stages.schedule.policy.Policy
    )
    priority_ageing_s: float | None = None  # waiting so long is worth one priority; None: however long, it stays behind
    steps_in_flight: int = 2  # K: 2 overlaps planning with execution, 1 is the serial debug mode
    async_scheduling: bool = True  # False: each step is waited for; of effect with triton and native
    enforce_eager: bool = False  # True: no CUDA graphs; of effect where steps are submitted and not waited for

    # drafts
    speculation: Literal["auto", "ngram", "off"] = "auto"  # ngram by native steps on a CPU, where rows are cheap
    num_speculative_tokens: int = 7  # drafts in one step, at most; of one sequence no more than a block less one
    prompt_lookup_max: int = 6  # tokens that must have stood there before, for a sequence to begin drafting
    prompt_lookup_min: int = 2  # the same, for each further draft

    # the cache
    block_size: int = 16  # tokens; smaller wastes less, larger loads faster
    num_gpu_blocks: int | None = None  # exact size of the pool, on any device; None: from memory
    kv_cache_bytes: int | None = None  # size of the pool; None: from memory
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"  # of keys and values; int8 natively, fp8 by torch, triton
    enable_prefix_caching: bool = True  # do not compute what an earlier prompt or answer began with
    swap_space: float | None = None  # GiB of host memory for preempted sequences; None: 4, on a CPU 1; 0: recompute
    num_cpu_blocks: int | None = None  # exact size of that pool; None: from swap_space
    gpu_memory_utilization: float = 0.9  # share of the device's memory for weights, activations and cache together

    # the door
    max_admitted_requests: int = 1024  # under way at once, waiting ones included
    max_waiting_requests: int = 512  # not yet running
    max_queue_s: float | None = None  # that a request may wait to be served, before it ends; None: for ever
    max_unread_tokens: int = 256  # of an answer whose client does not read, before it is parked
    max_parked_s: float = 30.0  # that a client may leave a parked answer unread, before the request ends

    # what is kept of it
    record: str | None = None  # file for a recording of all that schedule and allocate are told and decide
    record_token_ids: bool = False  # with prompts and answers as they are; else only what is alike in them can be seen

    # rehearsals
    inject: tuple[str, ...] = ()  # faults on purpose, as `runtime/fault_injection.py` has them

    def dtype_of(self, own: str) -> str:
        """The name of the dtype that weights are kept in; `own` is the checkpoint's."""
        return {"auto": own, "half": "float16"}.get(self.dtype, self.dtype)

    def for_whole_answers(self) -> EngineConfig:
        """For callers who read answers when they are done: nobody waits for a token, unless the target was set."""
        return self if self.itl_target_ms is not None else replace(self, itl_target_ms=0.0)

    @property
    def num_step_tokens(self) -> int:
        """`max_num_batched_tokens`, once it is settled."""
        assert self.max_num_batched_tokens is not None, "settle_step_size() comes before whoever asks for this"
        return self.max_num_batched_tokens

    def __post_init__(self) -> None:
        for text in self.inject:
            try:
                parse_fault(text)
            except ValueError as error:
                raise ConfigError(f"inject: {error}") from None
        _power_of_two("block_size", self.block_size)
        for name in (
            "max_num_seqs",
            "tokenizer_workers",
            "max_admitted_requests",
            "max_unread_tokens",
            "num_speculative_tokens",
            "prompt_lookup_min",
        ):
            _positive(name, getattr(self, name))
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks", "kv_cache_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and not (name == "max_model_len" and value == "auto"):
                _positive(name, value)
        if self.num_cpu_blocks is not None and self.num_cpu_blocks < 0:
            raise ConfigError(
                f"num_cpu_blocks = {self.num_cpu_blocks}: must be at least 0, which switches swapping off"
            )
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            asked = f"num_speculative_tokens = {self.num_speculative_tokens}"
            raise ConfigError(f"{asked}: must be at most {MAX_SPECULATIVE_TOKENS}; speculation = off has none")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            asked = f"prompt_lookup_max = {self.prompt_lookup_max}"
            raise ConfigError(f"{asked}: must be at least prompt_lookup_min, which is {self.prompt_lookup_min}")
        for name in ("priority_ageing_s", "max_parked_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0.0 < seconds < float("inf"):
                raise ConfigError(f"{name} = {seconds}: must be a number of seconds above 0")
        if self.swap_space is not None and not 0.0 <= self.swap_space < float("inf"):
            raise ConfigError(f"swap_space = {self.swap_space}: must be a number of GiB, 0 or more")
        if self.steps_in_flight not in (1, 2, 3, 4):
            raise ConfigError(f"steps_in_flight = {self.steps_in_flight}: must be 1 (serial) to 4; 2 overlaps")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization = {self.gpu_memory_utilization}: must be above 0 and at most 1")
        if self.itl_target_ms is not None and not 0.0 <= self.itl_target_ms < float("inf"):
            raise ConfigError(f"itl_target_ms = {self.itl_target_ms}: must be a number of milliseconds, or 0 for none")
        if self.itl_target_ms and not self.enable_chunked_prefill:
            raise ConfigError(
                f"itl_target_ms = {self.itl_target_ms:g}: steps keep to it by computing prompts in parts; "
                "enable_chunked_prefill, or set it to 0"
            )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is below max_num_seqs = {self.max_num_seqs}: "
                "a step could not even give each running sequence one token; raise the first or lower the second"
            )


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} = {value!r}: must be a whole number of at least 1")


def _power_of_two(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ConfigError(f"{name} = {value}: must be a power of two, as the kernels load whole blocks; try 16 or 32")


NATIVE_TOKENS, OTHER_TOKENS = 512, 2048  # of a step, at most


def settle_step_size(config: EngineConfig, *, is_native: bool) -> EngineConfig:
    """With the step size that the configuration leaves open. A prompt that runs whole is not cut for a target; where
    the native library computes it in parts, a target that nobody has set stays open: see `target_ms_for`."""
    is_cut = is_native and config.enable_chunked_prefill
    most, target_ms = config.max_num_batched_tokens, config.itl_target_ms
    if most is None:
        most = max(NATIVE_TOKENS if is_cut else OTHER_TOKENS, config.max_num_seqs)
    if target_ms is None and not is_cut:
        target_ms = 0.0
    return replace(config, max_num_batched_tokens=most, itl_target_ms=target_ms)
