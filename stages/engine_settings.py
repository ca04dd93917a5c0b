"""The engine's settings: name, type, default, meaning and group of each. `config.py` checks their values.

Names follow vLLM where vLLM has the setting. What a description holds is in `setting.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .params import MAX_LOGPROBS
from .setting import SettingGroup

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
ModelImpl = Literal["millrace", "transformers"]

_MODEL = SettingGroup("model")
_DEVICE = SettingGroup("device")
_RAY = SettingGroup("Ray")
_BATCH = SettingGroup("batch")
_SPECULATION = SettingGroup("speculation")
_LORA = SettingGroup("LoRA")
_OWN_CODE = SettingGroup("code of your own")
_CACHE = SettingGroup("KV cache")
_ADMISSION = SettingGroup("admission")
_RECORDING = SettingGroup("recording")
_FAULTS = SettingGroup("fault injection")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """All settings of an engine. Start-up replaces a `None` by a value that fits the model and the machine."""

    model: str | None = _MODEL.setting(
        None, "folder, GGUF file, Hub id, or address of hf://, https://, s3://, gs:// or az://; none: the bundled model"
    )
    revision: str | None = _MODEL.setting(None, "branch, tag or commit of a Hub model")
    download_dir: str | None = _MODEL.setting(
        None, "folder for downloaded models; none: the Hub library's cache, and ~/.cache/millrace/downloads"
    )
    offline: bool = _MODEL.setting(False, "never access the network; the model must be on disk already")
    allow_links_outside: bool = _MODEL.setting(
        False,
        "follow links that lead out of the checkpoint's folder, as DVC makes them; only for a folder that you trust",
    )
    merge_adapter: tuple[str, ...] = _MODEL.setting(
        (),
        "LoRA adapter in PEFT's format to merge while loading: a folder or Hub id, perhaps with a scale, as "
        "folder=0.5; may be repeated",
    )
    model_impl: Literal["auto", "millrace", "transformers"] = _MODEL.setting(
        "auto",
        "whose modules compute the model; millrace: those of the families here; transformers: transformers' on the "
        "paged cache, slower; auto: transformers where no family here describes the model",
    )
    # a Source is a class like millrace.model.checkpoint.stored_tensors.StoredTensors
    load_format: str = _MODEL.setting(
        "auto",
        "auto, safetensors, gguf, stream: read by ranges and not stored, dummy: random weights, or "
        "package.module:Source",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "half"] = _MODEL.setting(
        "auto",
        "data type of weights and activations; auto: the checkpoint's",
        short_names={"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
    )
    quantization: Literal["auto", "int8", "int4", "none"] | None = _MODEL.setting(
        "auto",
        "what the weight matrices become while loading; int8, int4: quantized, on a CPU only, those of a packed file "
        "anew; none: numbers in dtype; auto: as the file packs them, where the native library computes",
    )
    max_model_len: int | Literal["auto"] | None = _MODEL.setting(
        None,
        "maximum tokens of prompt and answer together; none: the model's limit; auto: what fits into memory",
        unit="tokens",
    )
    logprobs_mode: LogprobsMode = _MODEL.setting(
        "raw_logprobs", "raw: of the model's logits; processed: after penalties, bias, temperature and truncation"
    )
    max_logprobs: int = _MODEL.setting(
        MAX_LOGPROBS, "likeliest tokens whose log-probability a request may ask for at each place, 0 to 20"
    )
    generation_config: Literal["auto", "off"] = _MODEL.setting(
        "auto",
        "source of sampling defaults; auto: the checkpoint; off: no checkpoint defaults",
        short_names={"vllm": "off"},
    )
    override_generation_config: str | None = _MODEL.setting(
        None, 'JSON object whose keys replace those of generation_config.json, as {"temperature": 0.2}', in_file="json"
    )
    tokenizer: str | None = _MODEL.setting(
        None, "folder or Hub id of another tokenizer, with its chat template; none: the model's"
    )
    chat_template: str | None = _MODEL.setting(
        None,
        "Jinja file of the chat template, its text, or the name of one of the checkpoint's; none: the checkpoint's "
        "default",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = _MODEL.setting(
        "auto",
        "form in which the chat template gets content: string, openai: a list of parts, auto: what the template shows",
    )
    default_chat_template_kwargs: str | None = _MODEL.setting(
        None,
        'JSON object of variables of the chat template, which requests may replace, as {"enable_thinking": false}',
        in_file="json",
    )
    pooling: Literal["auto", "last", "mean", "cls", "yes_no"] = _MODEL.setting(
        "auto",
        "pooling of embeddings; auto: from the checkpoint, or the last token of a decoder; yes_no: score pairs of "
        "texts as Qwen3-Reranker does, which auto chooses by the name",
    )
    seed: int = _MODEL.setting(0, "seed of requests without one, and of dummy weights")

    device: str = _DEVICE.setting(
        "auto", "device that runs the model: auto, cpu, cuda, or one of several GPUs, such as cuda:1"
    )
    attention_backend: Literal["auto", "native", "torch", "triton"] = _DEVICE.setting(
        "auto", "attention backend; auto: triton on cuda, native on cpu, or torch if native is missing"
    )
    deterministic: bool = _DEVICE.setting(
        False, "make log-probabilities independent of other requests in the batch; slower, triton only"
    )
    threads: int | None = _DEVICE.setting(
        None, "compute threads on a CPU; none: one per core, limited by the container's CPU quota", unit="threads"
    )
    tensor_parallel_size: int = _DEVICE.setting(
        1,
        "processes that share each layer of the model, on a GPU each or on CPUs; torch and triton only",
        unit="processes",
    )
    pipeline_parallel_size: int = _DEVICE.setting(
        1,
        "processes that hold some layers of the model each, for models larger than the memory of one; on CPUs, torch "
        "only",
        unit="processes",
    )
    executor: Literal["auto", "thread", "process", "ray"] = _DEVICE.setting(
        "auto",
        "what tensor_parallel_size and pipeline_parallel_size start: process, or thread for debugging; auto: process; "
        "ray: engines are actors of a Ray cluster, and their ranks processes beside them",
    )
    emulate_tp: int = _DEVICE.setting(
        1, "for debugging: add up products in the pieces of so many tensor-parallel processes, in one"
    )
    # with two, short prompts overtake a long one
    tokenizer_workers: int = _DEVICE.setting(2, "tokenizer threads; a long prompt occupies one of them", unit="threads")
    data_parallel_size: int = _DEVICE.setting(
        1,
        "engine processes, each with all of the model, and its share of the CPUs or its own GPU; each request goes to "
        "one of them, and to another one if that dies",
        unit="processes",
    )
    routing_policy: Literal["soonest", "least-work", "round-robin", "prefix-only"] = _DEVICE.setting(
        "soonest",
        "which engine process gets a request: soonest: the one that answers it first, by its load and cached prefixes; "
        "least-work: the fewest tokens; round-robin; prefix-only: the longest cached prefix",
    )

    ray_address: str | None = _RAY.setting(
        None,
        "Ray cluster that this machine belongs to: HOST:PORT, or auto; none: RAY_ADDRESS, or this machine's, or a new "
        "one on it",
    )
    ray_placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = _RAY.setting(
        "pack",
        "nodes of the engines: pack: few; spread: many; strict_pack: one; strict_spread: one each; all ranks of an "
        "engine are on one",
    )
    ray_resources: tuple[str, ...] = _RAY.setting(
        (), "NAME=AMOUNT of a Ray resource that each engine needs besides CPUs and GPUs; may be repeated"
    )
    ray_env: tuple[str, ...] = _RAY.setting(
        (),
        "variable of the environment for the actors: NAME=VALUE, or NAME to pass it on; may be repeated; HF_*, NCCL_* "
        "and GLOO_* are passed on",
        is_secret=True,
    )
    ray_timeout_s: float = _RAY.setting(120.0, "seconds for the cluster to have room, and for an actor to start")

    # the number of slots
    max_num_seqs: int = _BATCH.setting(256, "maximum sequences that run at once", unit="sequences")
    max_num_batched_tokens: int | None = _BATCH.setting(
        None,
        "maximum tokens per step: smaller keeps token gaps short, larger prefills faster; none: 512 with the native "
        "library, else 2048",
    )
    itl_target_ms: float | None = _BATCH.setting(
        None,
        "target time of a step in milliseconds while answers wait for their next token; prompts get the rest of the "
        "step; none: the time of 180 prompt tokens, within 50 to 100 ms, with the native library, else 0; 0: no "
        "target, plan each step as early as possible",
    )
    enable_chunked_prefill: bool = _BATCH.setting(True, "split long prompts over several steps")
    scheduler: str = _BATCH.setting(
        "priority",
        "scheduling policy: priority, fifo, or package.module:Class, a subclass of "
        "millrace.stages.schedule.policy.Policy",
    )
    priority_ageing_s: float | None = _BATCH.setting(
        None, "seconds of waiting that raise a request by one priority; none: priorities are strict"
    )
    steps_in_flight: int = _BATCH.setting(
        2,
        "maximum steps in flight, 1 to 16: 2 overlaps planning with execution, 1 is serial; at least "
        "pipeline_parallel_size + 1",
    )
    async_scheduling: bool = _BATCH.setting(
        True, "submit a step while the previous one runs (GPU, native model); otherwise wait for each"
    )
    # only asynchronous scheduling uses graphs
    enforce_eager: bool = _BATCH.setting(False, "launch each kernel separately on a GPU, without CUDA graphs")
    tilings: str = _BATCH.setting(
        "auto",
        "launch options of matrix products of few rows and of attention (triton only); auto: measured options where "
        "the card has some, else predicted ones; off: PyTorch's products, and attention's own defaults; or a file of "
        "measured options",
    )

    speculation: Literal["auto", "ngram", "off"] = _SPECULATION.setting(
        "auto", "draft tokens by n-gram lookup in prompt and answer; auto: ngram with the native library, else off"
    )
    # per sequence at most block_size - 1
    num_speculative_tokens: int = _SPECULATION.setting(
        7, "maximum draft tokens per step, shared by the running sequences"
    )
    prompt_lookup_max: int = _SPECULATION.setting(
        6, "length in tokens of the repeated n-gram that starts drafting", unit="tokens"
    )
    prompt_lookup_min: int = _SPECULATION.setting(
        2, "length in tokens of the repeated n-gram that continues drafting", unit="tokens"
    )

    enable_lora: bool = _LORA.setting(False, "serve LoRA adapters: a request names one as its model")
    lora_modules: tuple[str, ...] = _LORA.setting(
        (), "adapter to load at the start: name=path of a folder in PEFT's format; may be repeated"
    )
    lora_dir: str | None = _LORA.setting(
        None,
        "folder of adapters: each subfolder is one, loaded when a request first names it; POST /v1/load_lora_adapter "
        "loads from here only",
    )
    lora_hub_allow: tuple[str, ...] = _LORA.setting(
        (),
        "Hub id of an adapter, OWNER/NAME or OWNER/NAME@REVISION, which is downloaded when a request first names "
        "OWNER/NAME; may be repeated",
    )
    max_loras: int = _LORA.setting(1, "maximum adapters on the device at once, and so in one step", unit="adapters")
    max_lora_rank: int = _LORA.setting(16, "largest rank of an adapter")
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _LORA.setting(
        "auto", "dtype that the numbers of adapters are rounded to and kept in; auto: that of the weights"
    )
    lora_chat_templates: bool = _LORA.setting(
        False, "render chats that name an adapter by the chat template in its folder, if it has one"
    )
    max_cpu_loras: int | None = _LORA.setting(
        None, "maximum adapters in host memory, those on the device included; none: 4 * max_loras", unit="adapters"
    )
    lora_host_bytes: int | None = _LORA.setting(
        None,
        "memory in bytes for adapters on the host, which those in device slots may exceed; none: no limit but "
        "max_cpu_loras",
    )

    # see `plugins.py`
    stage: tuple[str, ...] = _OWN_CODE.setting(
        (),
        "stage of your own and its place: package.module:Class@after=STAGE, or @before=STAGE; arguments as "
        ",key=value, or in the --config file; may be repeated",
        in_file="mappings",
    )
    logits_processor: tuple[str, ...] = _OWN_CODE.setting(
        (),
        "logits processor: package.module:Class, a subclass of millrace.LogitsProcessor, which requests name; "
        "arguments as of a stage; may be repeated",
        in_file="mappings",
    )

    block_size: int = _CACHE.setting(
        16, "tokens per block, a power of two: smaller wastes less, larger loads faster", unit="tokens"
    )
    num_gpu_blocks: int | None = _CACHE.setting(
        None, "exact number of KV blocks, on any device; none: from memory", unit="blocks"
    )
    kv_cache_bytes: int | None = _CACHE.setting(
        None, "size of the KV cache in bytes; an idle engine on a CPU allocates all of it in advance; none: from memory"
    )
    # int8: native only; fp8: torch and triton
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = _CACHE.setting(
        "auto", "data type of keys and values; int8 (CPU) or fp8 (GPU) hold twice the tokens; auto: as dtype"
    )
    enable_prefix_caching: bool = _CACHE.setting(
        True, "reuse the KV blocks of earlier prompts and answers with the same prefix"
    )
    state_cache_bytes: int | None = _CACHE.setting(
        None,
        "memory for the recurrent states of cached prefixes in bytes; none: a fifth of the KV cache; 0: cache none",
    )
    swap_space: float | None = _CACHE.setting(
        None, "host memory for preempted sequences in GiB; none: 4, on a CPU 1; 0: recompute them", unit="GiB"
    )
    num_cpu_blocks: int | None = _CACHE.setting(
        None, "exact number of swap blocks in host memory; none: from swap_space", unit="blocks"
    )
    gpu_memory_utilization: float = _CACHE.setting(
        0.9, "share of the device's memory for weights, activations and KV cache together"
    )

    max_admitted_requests: int = _ADMISSION.setting(
        1024, "maximum admitted requests, running and waiting; further ones get 429", unit="requests"
    )
    max_waiting_requests: int = _ADMISSION.setting(
        512,
        "maximum requests without a first token, of several engines in each; further ones get 429",
        unit="requests",
    )
    max_queue_s: float | None = _ADMISSION.setting(
        None,
        "seconds in the queue before a request gets 408; in front of several engines, a request gets 429 if the "
        "predicted wait is over 75 % of it; none: no limit",
    )
    max_unread_tokens: int = _ADMISSION.setting(256, "unread tokens of an answer before it is parked")
    max_parked_s: float = _ADMISSION.setting(
        30.0, "seconds before a parked answer that its client does not read is ended"
    )

    record: str | None = _RECORDING.setting(
        None, "file for a recording of all scheduling decisions; see millrace replay and millrace simulate"
    )
    record_token_ids: bool = _RECORDING.setting(
        False, "record token ids of prompts and answers; otherwise only which parts repeat"
    )

    # see `runtime/fault_injection.py`
    inject: tuple[str, ...] = _FAULTS.setting(
        (), "inject a fault: stage=NAME,delay=200ms|error|freeze[,rate=0.01]; may be repeated"
    )
