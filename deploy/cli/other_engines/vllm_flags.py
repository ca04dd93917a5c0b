"""The flags of `vllm serve` that millrace does not have under the same name, and values that are named differently.

By vLLM's documentation of its engine and server arguments, its older names included. A flag of millrace wins.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import json_values
from .rows import ANY, Read, Renamed, Row, SoAnyway, Switch, Unsupported

_OBSOLETE = "vLLM itself has removed it"
_NO_MEDIA = "images, audio and video are not supported; leave it out"
_CONFIG_JSON = "config.json is read as it is: change it in a copy of the checkpoint's folder, and serve that"
_ONE_MACHINE = (
    "a server starts its own processes, on one machine; for several machines use millrace engine and millrace route, "
    "--executor ray, or a load balancer before several servers"
)
_NO_WEIGHTS_ELSEWHERE = "all weights stay on the device: choose --quantization, a smaller model or more GPUs"
_BATCH_MIX = "long prompts are split by --max-num-batched-tokens and --itl-target-ms; leave it out"

MODEL: Mapping[str, Row] = {
    "--tokenizer-mode": SoAnyway(
        "fast tokenizers alone are read", ("auto", "hf"), "only auto is supported; leave it out"
    ),
    "--tokenizer-revision": Unsupported("write it into --tokenizer OWNER/NAME@REVISION"),
    "--skip-tokenizer-init": Unsupported("the tokenizer is always read; send prompts as token ids all the same"),
    "--trust-remote-code": Unsupported(
        "code of a checkpoint never runs; leave it out: most architectures need none, and --model-impl transformers "
        "runs those that transformers has"
    ),
    "--code-revision": Unsupported("code of a checkpoint never runs; leave it out"),
    "--hf-config-path": Unsupported(_CONFIG_JSON),
    "--hf-overrides": Unsupported(_CONFIG_JSON),
    "--rope-scaling": Unsupported(_CONFIG_JSON),
    "--rope-theta": Unsupported(_CONFIG_JSON),
    "--hf-token": Unsupported("set it in the environment, as HF_TOKEN; flags are visible to all users of a machine"),
    "--config-format": SoAnyway("the format is found by the files", ("auto", "hf", "mistral")),
    "--task": SoAnyway(
        "a model generates and embeds by the route that is called",
        ("auto", "generate", "embedding", "embed", "score", "rerank"),
        "there is no such task here; leave it out",
    ),
    "--runner": SoAnyway(
        "a model generates and embeds by the route that is called",
        ("auto", "generate", "pooling"),
        "there is no such runner here; leave it out",
    ),
    "--convert": SoAnyway(
        "embeddings of a decoder need no conversion", ("auto", "none", "embed"), "not supported; leave it out"
    ),
    "--override-pooler-config": Read(json_values.pooler_config),
    "--pooler-config": Read(json_values.pooler_config),
    "--disable-sliding-window": Unsupported("set --max-model-len to the window, which has the same effect"),
    "--enable-sleep-mode": Unsupported("weights cannot be put aside; stop the server, and start it when it is needed"),
    "--logits-processors": Unsupported(
        "vLLM's classes do not fit; --logits-processor package.module:Class serves one of millrace's kind"
    ),
    "--logits-processor-pattern": Unsupported("requests name those of --logits-processor only"),
    "--ignore-patterns": SoAnyway("only safetensors, GGUF and small files are downloaded", (ANY,)),
    "--use-tqdm-on-load": SoAnyway("a bar is shown on a terminal only"),
    "--model-loader-extra-config": Read(json_values.empty),
    "--allowed-local-media-path": Unsupported(_NO_MEDIA),
    "--allowed-media-domains": Unsupported(_NO_MEDIA),
    "--language-model-only": SoAnyway("text is all that is served"),
    "--enable-prompt-embeds": Unsupported("prompts are text or token ids; leave it out"),
    "--limit-mm-per-prompt": Read(json_values.no_items, "text is all that is served"),
    "--mm-processor-kwargs": Unsupported(_NO_MEDIA),
    "--mm-processor-cache-gb": SoAnyway("text is all that is served", (ANY,)),
    "--disable-mm-preprocessor-cache": SoAnyway("text is all that is served"),
    "--mm-encoder-tp-mode": SoAnyway("text is all that is served", (ANY,)),
    "--media-io-kwargs": Unsupported(_NO_MEDIA),
    "--enable-mm-embeds": Unsupported(_NO_MEDIA),
    "--skip-mm-profiling": SoAnyway("text is all that is served"),
    "--mm-processor-cache-type": SoAnyway("text is all that is served", (ANY,)),
}

DEVICE: Mapping[str, Row] = {
    "-tp": Renamed("--tensor-parallel-size"),
    "-dp": Renamed("--data-parallel-size"),
    "-pp": Renamed("--pipeline-parallel-size"),
    "--distributed-executor-backend": Renamed("--executor", {"mp": "process", "uni": "auto"}),
    "--worker-use-ray": Switch(("--executor", "ray")),
    "--enable-expert-parallel": Unsupported("experts are computed on one device; leave it out"),
    **dict.fromkeys(
        ("--enable-eplb", "--eplb-config", "--all2all-backend", "--expert-placement-strategy"),
        Unsupported("experts are computed on one device; leave it out"),
    ),
    "--enable-dbo": Unsupported("a step is one batch; leave it out"),
    "--disable-cascade-attn": Unsupported(
        "attention may read a prefix that requests share once for all of them; leave it out"
    ),
    "--decode-context-parallel-size": SoAnyway(
        "each rank has all tokens of a sequence", ("1",), "not supported; use --tensor-parallel-size"
    ),
    "--data-parallel-start-rank": Unsupported(_ONE_MACHINE),
    "--optimization-level": Read(json_values.compilation_config, "kernels are compiled ahead, and steps captured"),
    "--disable-custom-all-reduce": SoAnyway("sums between ranks never use one"),
    "--max-parallel-loading-workers": SoAnyway("ranks read their own shares at once", (ANY,)),
    "--data-parallel-backend": Renamed("--executor", {"mp": "auto"}),
    "--data-parallel-size-local": Unsupported("all engines are on this machine: write --data-parallel-size N alone"),
    "--data-parallel-rank": Unsupported(_ONE_MACHINE),
    "--data-parallel-address": Unsupported(_ONE_MACHINE),
    "--data-parallel-rpc-port": Unsupported(_ONE_MACHINE),
    "--data-parallel-hybrid-lb": Unsupported(_ONE_MACHINE),
    "--data-parallel-external-lb": Unsupported(_ONE_MACHINE),
    "--nnodes": SoAnyway("there is one machine", ("1",), _ONE_MACHINE),
    "--node-rank": SoAnyway("there is one machine", ("0",), _ONE_MACHINE),
    "--master-addr": Unsupported(_ONE_MACHINE),
    "--master-port": Unsupported(_ONE_MACHINE),
    "--headless": Unsupported(_ONE_MACHINE),
    "--cpu-offload-gb": SoAnyway("nothing is offloaded", ("0", "0.0"), _NO_WEIGHTS_ELSEWHERE),
    "--worker-cls": Unsupported("a device of your own is a back-end: see stages/backends/backend.py"),
    "--worker-extension-cls": Unsupported(
        "--stage package.module:Class@after=STAGE puts code of your own into the pipeline"
    ),
    "--compilation-config": Read(json_values.compilation_config, "kernels are compiled ahead, and steps captured"),
    **{f"-O{level}": SoAnyway("kernels are compiled ahead, and steps captured as CUDA graphs") for level in "123"},
    "-O0": Switch(("--enforce-eager",)),
    "--cudagraph-capture-sizes": SoAnyway("sizes are chosen from --max-num-seqs", (ANY,)),
    "--cuda-graph-sizes": SoAnyway("sizes are chosen from --max-num-seqs", (ANY,)),
    "--max-cudagraph-capture-size": SoAnyway("sizes are chosen from --max-num-seqs", (ANY,)),
    "--max-seq-len-to-capture": SoAnyway("steps of any length are captured", (ANY,)),
    "--additional-config": Read(json_values.empty),
}

CACHE: Mapping[str, Row] = {
    "--num-gpu-blocks-override": Renamed("--num-gpu-blocks"),
    "--kv-cache-memory-bytes": Renamed("--kv-cache-bytes"),
    "--kv-cache-memory": Renamed("--kv-cache-bytes"),
    "--prefix-caching-hash-algo": SoAnyway(
        "blocks are named by SHA-256", ("sha256", "sha256_cbor", "builtin"), "not supported; leave it out"
    ),
    "--calculate-kv-scales": Unsupported("the cache has scales of its own; leave it out"),
    "--preemption-mode": Read(json_values.preemption_mode),
    "--kv-transfer-config": Unsupported(
        "blocks do not travel between servers, so prefill and decode cannot be apart; --data-parallel-size shares "
        "requests among engines"
    ),
    "--kv-events-config": Unsupported("blocks are not published; see /v1/stages and /metrics for what is cached"),
    "--kv-offloading-size": Unsupported("the host holds preempted sequences only: see --swap-space"),
    "--kv-offloading-backend": Unsupported("the host holds preempted sequences only: see --swap-space"),
    "--disable-hybrid-kv-cache-manager": SoAnyway("windows and full attention share one pool"),
    "--use-v2-block-manager": SoAnyway(_OBSOLETE),
    **dict.fromkeys(
        ("--mamba-cache-dtype", "--mamba-ssm-cache-dtype", "--mamba-block-size"),
        SoAnyway("layers with a state are not served", (ANY,)),
    ),
}

BATCH: Mapping[str, Row] = {
    "--scheduling-policy": Renamed("--scheduler", {"fcfs": "fifo"}),
    "--scheduler-cls": Unsupported("--scheduler package.module:Class takes a subclass of millrace's Policy instead"),
    "--max-num-partial-prefills": SoAnyway("prompts share a step as they fit", ("1",), _BATCH_MIX),
    "--max-long-partial-prefills": SoAnyway("prompts share a step as they fit", ("1",), _BATCH_MIX),
    "--long-prefill-token-threshold": SoAnyway("prompts share a step as they fit", ("0",), _BATCH_MIX),
    "--disable-chunked-mm-input": SoAnyway("text is all that is served"),
    "--stream-interval": SoAnyway(
        "each token is sent as it comes", ("1",), "each token is sent as it comes; leave it out"
    ),
    "--num-scheduler-steps": SoAnyway(_OBSOLETE, (ANY,)),
    "--multi-step-stream-outputs": SoAnyway(_OBSOLETE),
    "--scheduler-delay-factor": SoAnyway(_OBSOLETE, ("0", "0.0"), "not supported; leave it out"),
    "--num-lookahead-slots": SoAnyway(_OBSOLETE, (ANY,)),
    "--disable-async-output-proc": SoAnyway(_OBSOLETE),
    "--max-num-queued-reqs": Renamed("--max-waiting-requests"),
    "--speculative-config": Read(json_values.speculative_config),
    "--speculative-model": Unsupported("only n-gram drafts are supported: --speculation ngram"),
    "--ngram-prompt-lookup-max": Renamed("--prompt-lookup-max"),
    "--ngram-prompt-lookup-min": Renamed("--prompt-lookup-min"),
    "--spec-method": Renamed("--speculation"),
    "--spec-tokens": Renamed("--num-speculative-tokens"),
    "--structured-outputs-config": Read(json_values.structured_outputs_config, "llguidance computes all constraints"),
    "--guided-decoding-backend": SoAnyway("llguidance computes all constraints", (ANY,)),
    "--guided-decoding-disable-fallback": SoAnyway("there is one back-end"),
    "--guided-decoding-disable-any-whitespace": Unsupported(
        'send "structured_outputs": {"disable_any_whitespace": true} with each request instead'
    ),
    "--reasoning-parser-plugin": Unsupported("name the class: --reasoning-parser package.module:Class"),
    "--enable-reasoning": SoAnyway("the reasoning parser is found by the chat template"),
    "--fully-sharded-loras": Unsupported("each rank has whole adapters; leave it out"),
    "--lora-extra-vocab-size": SoAnyway(_OBSOLETE, (ANY,)),
    "--enable-prompt-adapter": Unsupported("prompt adapters are not supported; use LoRA adapters"),
    "--default-mm-loras": Unsupported(_NO_MEDIA),
}

SERVER: Mapping[str, Row] = {
    "--allowed-origins": Read(json_values.allowed_origins),
    "--allowed-methods": Read(json_values.everything, "each route fixes its methods"),
    "--allowed-headers": Read(json_values.everything, "pages may send the headers that the API knows"),
    "--allow-credentials": Unsupported("no route reads cookies; let pages send the key in Authorization"),
    "--ssl-ca-certs": Unsupported("clients' certificates are not checked; let a proxy check them"),
    "--ssl-cert-reqs": SoAnyway("clients' certificates are not checked", ("0",), "let a proxy check them"),
    "--ssl-ciphers": Unsupported("Python's default ciphers are used; let a proxy choose others"),
    "--profiler-config": Unsupported("write --profiler-dir FOLDER"),
    "--enable-ssl-refresh": Unsupported("the certificate is read at the start; restart the server, or use a proxy"),
    "--middleware": Unsupported("--stage package.module:Class@after=STAGE serves a stage of your own; or use a proxy"),
    "--uvicorn-log-level": Renamed("--log-level", {"critical": "error", "trace": "debug"}),
    "--disable-uvicorn-access-log": Switch(("--no-log-requests",), ()),
    "--disable-access-log-for-endpoints": SoAnyway("only requests to the model are logged", (ANY,)),
    "--disable-log-requests": Switch(("--no-log-requests",), ("--log-requests",)),
    "--enable-log-requests": Switch(("--log-requests",), ("--no-log-requests",)),
    "--max-log-len": Renamed("--log-prompts", {}, "characters of each prompt in the log"),
    "--enable-log-outputs": Unsupported("answers are never logged; read them from the clients"),
    "--enable-log-deltas": SoAnyway("answers are never logged"),
    "--log-config-file": Unsupported("choose --log-format json and --log-level; standard error has the log"),
    "--log-error-stack": Switch(("--log-error-messages",), ("--no-log-error-messages",)),
    "--disable-log-stats": Switch(("--stats-interval-s", "0"), ()),
    "--disable-fastapi-docs": Switch(("--disable-docs",), ("--no-disable-docs",)),
    "--enable-offline-docs": SoAnyway("/docs needs no network"),
    "--disable-frontend-multiprocessing": Switch(("--mode", "inline"), ("--mode", "split")),
    "--api-server-count": Renamed("--front-processes"),
    "--response-role": SoAnyway("answers have the role assistant", ("assistant",), "only assistant is supported"),
    "--return-tokens-as-token-ids": Unsupported("send return_tokens_as_token_ids with each request instead"),
    "--tool-parser-plugin": Unsupported("name the class: --tool-call-parser package.module:Class"),
    "--exclude-tools-when-tool-choice-none": Unsupported("leave tools out of requests that set tool_choice to none"),
    "--tool-server": Unsupported("tools run at the client; leave it out"),
    "--trust-request-chat-template": Unsupported("templates of requests are never run; use --chat-template"),
    "--enable-prompt-tokens-details": SoAnyway("usage always has prompt_tokens_details"),
    "--enable-server-load-tracking": SoAnyway("/load always answers"),
    "--enable-request-id-headers": SoAnyway("answers always have X-Request-Id"),
    "--enable-tokenizer-info-endpoint": Unsupported("the tokenizer's files are not served; see /tokenize"),
    "--enable-per-request-metrics": Switch(("--enable-request-metrics",), ("--no-enable-request-metrics",)),
    "--collect-detailed-traces": SoAnyway("each stage has a span already", (ANY,)),
    "--show-hidden-metrics-for-version": SoAnyway("no metric is hidden", (ANY,)),
    "--h11-max-incomplete-event-size": SoAnyway("header sizes are limited by aiohttp", (ANY,)),
    "--h11-max-header-count": SoAnyway("header sizes are limited by aiohttp", (ANY,)),
}

ALIASES = {  # other names of flags, ours among them
    "-asc": "--api-server-count",
    "-sc": "--speculative-config",
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
    "-q": "--quantization",
    "-ep": "--enable-expert-parallel",
}

VLLM: Mapping[str, Row] = {**MODEL, **DEVICE, **CACHE, **BATCH, **SERVER}

_AS_PACKED = "the checkpoint says how it is quantized; weights that are not stay so"
VALUES: Mapping[str, Renamed] = {  # our flag -> vLLM's values, by our names
    "--quantization": Renamed(
        "--quantization",
        dict.fromkeys(
            [
                "awq",
                "awq_marlin",
                "gptq",
                "gptq_marlin",
                "fp8",
                "bitsandbytes",
                "gguf",
                "compressed-tensors",
                "compressed-tensors",
                "modelopt",
                "modelopt_fp4",
            ],
            "auto",
        ),
        _AS_PACKED,
    ),
    "--load-format": Renamed(
        "--load-format",
        {"hf": "auto", "bitsandbytes": "auto", "fastsafetensors": "safetensors", "runai_streamer": "stream"},
    ),
    "--kv-cache-dtype": Renamed("--kv-cache-dtype", {"fp8_e4m3": "fp8", "fp8_inc": "fp8"}),
    "--attention-backend": Renamed(
        "--attention-backend", {"TRITON_ATTN": "triton", "TRITON_ATTN_VLLM_V1": "triton", "TORCH_SDPA": "torch"}
    ),
    "--max-model-len": Renamed("--max-model-len", {"-1": "auto"}),
    "--model-impl": Renamed("--model-impl", {"vllm": "millrace"}),
    "--generation-config": Renamed("--generation-config", {"vllm": "off"}),
}
JSON_OBJECTS = ("--override-generation-config", "--default-chat-template-kwargs")  # flags of ours that take one
JSON_FORMS: Mapping[str, Read] = {"--lora-modules": Read(json_values.lora_module)}  # our flag -> its JSON form
