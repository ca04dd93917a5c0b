"""Settings from flags, environment, file and defaults, in this order of precedence, with their sources.

The help texts of all fields of the two configurations are here; types and defaults come from the fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..stages.config import EngineConfig
from ..stages.errors import ConfigError
from .config import ServerConfig

_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])(i?)", re.ASCII)
ENV_PREFIX = "MILLRACE_"
KEYS = frozenset({"api_key", "admin_key"})
SECRET = frozenset({"api_key", "admin_key", "ssl_keyfile_password", "ray_env"})
NO_FLAG = frozenset({"ssl_keyfile_password"})  # every user can read flags in the process list

PLUGINS = frozenset({"stage", "logits_processor"})  # a value may be a mapping in the file
NO_SETTINGS = frozenset({"cache"})  # variables of other parts, and of the tests
OBJECTS = frozenset({"override_generation_config", "default_chat_template_kwargs"})  # JSON, in YAML also a mapping
SHORT_NAMES = {  # setting -> short name -> value
    "generation_config": {"vllm": "off"},
    "dtype": {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
}

Kind = type[EngineConfig] | type[ServerConfig]

# group -> field -> help text
ENGINE_HELP: dict[str, dict[str, str]] = {
    "model": {
        "model": "folder, GGUF file, Hub id, or address of hf://, https://, s3://, gs:// or az://; none: the bundled "
        "model",
        "revision": "branch, tag or commit of a Hub model",
        "download_dir": "folder for downloaded models; none: the Hub library's cache, and ~/.cache/millrace/downloads",
        "offline": "never access the network; the model must be on disk already",
        "allow_links_outside": "follow links that lead out of the checkpoint's folder, as DVC makes them; "
        "only for a folder that you trust",
        "merge_adapter": "LoRA adapter in PEFT's format to merge while loading: a folder or Hub id, perhaps with a "
        "scale, as folder=0.5; may be repeated",
        "model_impl": "whose modules compute the model; millrace: those of the families here; transformers: "
        "transformers' on the paged cache, slower; auto: transformers where no family here describes the model",
        "load_format": "auto, safetensors, gguf, stream: read by ranges and not stored, dummy: random weights, or "
        "package.module:Source",
        "dtype": "data type of weights and activations; auto: the checkpoint's",
        "quantization": "what the weight matrices become while loading; int8, int4: quantized, on a CPU only, those of "
        "a packed file anew; none: numbers in dtype; auto: as the file packs them, where the native library computes",
        "max_model_len": "maximum tokens of prompt and answer together; none: the model's limit; auto: what fits into "
        "memory",
        "logprobs_mode": "raw: of the model's logits; processed: after penalties, bias, temperature and truncation",
        "max_logprobs": "likeliest tokens whose log-probability a request may ask for at each place, 0 to 20",
        "generation_config": "source of sampling defaults; auto: the checkpoint; off: no checkpoint defaults",
        "override_generation_config": "JSON object whose keys replace those of generation_config.json, as "
        '{"temperature": 0.2}',
        "tokenizer": "folder or Hub id of another tokenizer, with its chat template; none: the model's",
        "chat_template": "Jinja file of the chat template, its text, or the name of one of the checkpoint's; "
        "none: the checkpoint's default",
        "chat_template_content_format": "form in which the chat template gets content: string, openai: a list of "
        "parts, auto: what the template shows",
        "default_chat_template_kwargs": "JSON object of variables of the chat template, which requests may replace, as "
        '{"enable_thinking": false}',
        "pooling": "pooling of embeddings; auto: from the checkpoint, or the last token of a decoder; "
        "yes_no: score pairs of texts as Qwen3-Reranker does, which auto chooses by the name",
        "seed": "seed of requests without one, and of dummy weights",
    },
    "device": {
        "device": "device that runs the model: auto, cpu, cuda, or one of several GPUs, such as cuda:1",
        "attention_backend": "attention backend; auto: triton on cuda, native on cpu, or torch if native is missing",
        "deterministic": "make log-probabilities independent of other requests in the batch; slower, triton only",
        "threads": "compute threads on a CPU; none: one per core, limited by the container's CPU quota",
        "tensor_parallel_size": "processes that share each layer of the model, on a GPU each or on CPUs; torch and "
        "triton only",
        "executor": "what tensor_parallel_size starts: process, or thread for debugging; auto: process; ray: engines "
        "are actors of a Ray cluster, and their ranks processes beside them",
        "emulate_tp": "for debugging: add up products in the pieces of so many tensor-parallel processes, in one",
        "tokenizer_workers": "tokenizer threads; a long prompt occupies one of them",
        "data_parallel_size": "engine processes, each with all of the model, and its share of the CPUs or its own GPU; "
        "each request goes to the one with the least work, and to another one if that dies",
    },
    "Ray": {
        "ray_address": "Ray cluster that this machine belongs to: HOST:PORT, or auto; none: RAY_ADDRESS, or this "
        "machine's, or a new one on it",
        "ray_placement": "nodes of the engines: pack: few; spread: many; strict_pack: one; strict_spread: one each; "
        "all ranks of an engine are on one",
        "ray_resources": "NAME=AMOUNT of a Ray resource that each engine needs besides CPUs and GPUs; may be repeated",
        "ray_env": "variable of the environment for the actors: NAME=VALUE, or NAME to pass it on; may be repeated; "
        "HF_*, NCCL_* and GLOO_* are passed on",
        "ray_timeout_s": "seconds for the cluster to have room, and for an actor to start",
    },
    "batch": {
        "max_num_seqs": "maximum sequences that run at once",
        "max_num_batched_tokens": "maximum tokens per step: smaller keeps token gaps short, larger prefills faster; "
        "none: 512 with the native library, else 2048",
        "itl_target_ms": "target time of a step in milliseconds while answers wait for their next token; prompts get "
        "the rest of the step; none: the time of 180 prompt tokens, within 50 to 100 ms, with the native library, "
        "else 0; 0: no target, plan each step as early as possible",
        "enable_chunked_prefill": "split long prompts over several steps",
        "scheduler": "scheduling policy: priority, fifo, or package.module:Class, a subclass of "
        "millrace.stages.schedule.policy.Policy",
        "priority_ageing_s": "seconds of waiting that raise a request by one priority; none: priorities are strict",
        "steps_in_flight": "maximum steps in flight, 1 to 4: 2 overlaps planning with execution, 1 is serial",
        "async_scheduling": "submit a step while the previous one runs (GPU, native model); otherwise wait for each",
        "enforce_eager": "launch each kernel separately on a GPU, without CUDA graphs",
        "tilings": "launch options of matrix products of few rows and of attention (triton only); auto: measured "
        "options where the card has some, else predicted ones; off: PyTorch's products, and attention's own defaults; "
        "or a file of measured options",
    },
    "speculation": {
        "speculation": "draft tokens by n-gram lookup in prompt and answer; auto: ngram with the native library, else "
        "off",
        "num_speculative_tokens": "maximum draft tokens per step, shared by the running sequences",
        "prompt_lookup_max": "length in tokens of the repeated n-gram that starts drafting",
        "prompt_lookup_min": "length in tokens of the repeated n-gram that continues drafting",
    },
    "LoRA": {
        "enable_lora": "serve LoRA adapters: a request names one as its model",
        "lora_modules": "adapter to load at the start: name=path of a folder in PEFT's format; may be repeated",
        "lora_dir": "folder of adapters: each subfolder is one, loaded when a request first names it; "
        "POST /v1/load_lora_adapter loads from here only",
        "lora_hub_allow": "Hub id of an adapter, OWNER/NAME or OWNER/NAME@REVISION, which is downloaded when a request "
        "first names OWNER/NAME; may be repeated",
        "max_loras": "maximum adapters on the device at once, and so in one step",
        "max_lora_rank": "largest rank of an adapter",
        "lora_dtype": "dtype that the numbers of adapters are rounded to and kept in; auto: that of the weights",
        "lora_chat_templates": "render chats that name an adapter by the chat template in its folder, if it has one",
        "max_cpu_loras": "maximum adapters in host memory, those on the device included; none: 4 * max_loras",
        "lora_host_bytes": "memory in bytes for adapters on the host, which those in device slots may exceed; none: "
        "no limit but max_cpu_loras",
    },
    "code of your own": {
        "stage": "stage of your own and its place: package.module:Class@after=STAGE, or @before=STAGE; arguments as "
        ",key=value, or in the --config file; may be repeated",
        "logits_processor": "logits processor: package.module:Class, a subclass of millrace.LogitsProcessor, which "
        "requests name; arguments as of a stage; may be repeated",
    },
    "KV cache": {
        "block_size": "tokens per block, a power of two: smaller wastes less, larger loads faster",
        "num_gpu_blocks": "exact number of KV blocks, on any device; none: from memory",
        "kv_cache_bytes": "size of the KV cache in bytes; an idle engine on a CPU allocates all of it in advance; "
        "none: from memory",
        "kv_cache_dtype": "data type of keys and values; int8 (CPU) or fp8 (GPU) hold twice the tokens; auto: as dtype",
        "enable_prefix_caching": "reuse the KV blocks of earlier prompts and answers with the same prefix",
        "swap_space": "host memory for preempted sequences in GiB; none: 4, on a CPU 1; 0: recompute them",
        "num_cpu_blocks": "exact number of swap blocks in host memory; none: from swap_space",
        "gpu_memory_utilization": "share of the device's memory for weights, activations and KV cache together",
    },
    "admission": {
        "max_admitted_requests": "maximum admitted requests, running and waiting; further ones get 429",
        "max_waiting_requests": "maximum requests without a first token; further ones get 429",
        "max_queue_s": "seconds in the queue before a request gets 408; none: no limit",
        "max_unread_tokens": "unread tokens of an answer before it is parked",
        "max_parked_s": "seconds before a parked answer that its client does not read is ended",
    },
    "recording": {
        "record": "file for a recording of all scheduling decisions; see millrace replay and millrace simulate",
        "record_token_ids": "record token ids of prompts and answers; otherwise only which parts repeat",
    },
    "fault injection": {
        "inject": "inject a fault: stage=NAME,delay=200ms|error|freeze[,rate=0.01]; may be repeated",
    },
}

SERVER_HELP: dict[str, dict[str, str]] = {
    "processes": {
        "mode": "inline: one process; split: HTTP and text in one process, the step loop in another; auto: inline",
    },
    "listening": {
        "host": "address to listen on; any but loopback needs --api-key or --allow-no-key",
        "port": "port to listen on; 0: a free port, printed in the ready line",
        "root_path": "additional prefix of all routes, such as /llm behind a proxy",
        "uds": "path of a Unix socket to listen on instead of host and port",
        "max_connections": "maximum open connections; further ones are refused",
        "ssl_certfile": "PEM file with the certificate and its chain; serves HTTPS (TLS 1.2 or later) instead of HTTP",
        "ssl_keyfile": "PEM file with the private key; none: it is in ssl_certfile",
        "ssl_keyfile_password": "password of the private key; only in MILLRACE_SSL_KEYFILE_PASSWORD or the --config "
        "file, not a flag",
    },
    "API": {
        "served_model_name": "model name that clients may send; answers carry the first; may be repeated; none: the "
        "Hub id, or the folder's name",
        "enable_force_include_usage": "include usage in every stream, requested or not",
        "enable_request_metrics": "include request times in every answer, requested or not",
        "strict_fields": "reject unknown fields with 400 instead of ignoring them",
        "response_store_bytes": "memory in bytes for stored answers of /v1/responses; 0: store none",
        "tool_call_parser": "tool call format: hermes, llama3_json, mistral, pythonic, none, or package.module:Class, "
        "a subclass of millrace.deploy.api.parsers.ToolParser; auto: by the chat template",
        "enable_auto_tool_choice": "let the model choose whether to call a tool",
        "reasoning_parser": "reasoning format: deepseek_r1, qwen3, none, or package.module:Class, a subclass of "
        "millrace.deploy.api.parsers.ReasoningParser; auto: by the chat template",
        "disable_docs": "do not serve /openapi.json and /docs",
        "max_body_bytes": "maximum size of a request body in bytes",
    },
    "security": {
        "api_key": "API key that clients must send, except for /health; may be repeated",
        "admin_key": "key for the /admin routes only; none: no /admin routes; may be repeated",
        "api_key_file": "file with more API keys, one per line",
        "admin_key_file": "file with more admin keys, one per line",
        "enable_runtime_lora": "let API keys load and unload LoRA adapters at /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter, not the admin key alone; clients then decide what a name computes for others",
        "allow_no_key": "listen beyond loopback without a key",
        "cache_salt_per_key": "do not share cached prefixes between API keys",
        "allowed_host": "accepted Host name besides loopback's; may be repeated; *: any",
        "allowed_origin": "origin that may send requests and open WebSockets: scheme://host[:port]; may be repeated; "
        "*: any",
        "cors_allow_origin": "origin that may send requests and read the answers; may be repeated; *: any",
    },
    "timeouts": {
        "header_timeout_s": "seconds from a request's first byte to the end of its headers",
        "body_timeout_s": "seconds to receive the body of a request",
        "keep_alive_s": "seconds to keep an idle connection open",
        "stalled_reader_s": "seconds before a stream that its client does not read is ended",
        "sse_ping_interval_s": "seconds of silence in a stream before a comment line is sent; 0: never",
        "shutdown_timeout_s": "seconds for running requests to end at shutdown",
    },
    "WebSockets": {
        "ws_max_sockets": "maximum open WebSockets; further ones are refused",
        "ws_max_streams": "maximum concurrent requests per WebSocket; further ones get 429",
        "ws_ping_interval_s": "seconds of silence before a ping; the client must answer within half of it",
        "ws_resume_window_s": "seconds in which a resumable request can be resumed after its connection is lost",
    },
    "logging": {
        "log_format": "format of the log on stderr",
        "log_level": "minimum severity to log",
        "log_error_messages": "log exception messages, not only their place in the code; they may quote prompts",
        "log_requests": "log the start and the end of each request",
        "log_prompts": "characters of each prompt to log with log_requests; 0: none",
        "stats_interval_s": "seconds between two status lines while requests run; 0: none",
        "otlp_traces_endpoint": "URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces; none: no "
        "export",
    },
    "diagnostics": {
        "stall_timeout_s": "seconds without progress, while there is work, before /health reports a stall",
        "flight_recorder_dir": "folder for the traces of stalls and crashes; none: write none",
        "flight_recorder_s": "length of the trace in each flight file in seconds",
        "profiler_dir": "folder for files of torch's profiler, started with the admin key; none: profiler off",
    },
}

_HELP: dict[Kind, dict[str, dict[str, str]]] = {EngineConfig: ENGINE_HELP, ServerConfig: SERVER_HELP}


@dataclass(frozen=True, slots=True)
class Setting:
    """The effective value of one setting, and its source."""

    value: Any
    source: str  # "flag --port", "environment MILLRACE_PORT", "file x.yaml", "default"
    is_trimmed: bool = False  # white space around a key was removed


@dataclass(frozen=True, slots=True)
class _YamlEntry:
    """A value of the YAML file."""

    value: Any
    line: int  # of its name, from 1


def add_flags(parser: argparse.ArgumentParser, kinds: Iterable[Kind], *, omit: frozenset[str] = frozenset()) -> None:
    """Adds a flag for each field, in groups. A flag that is not given sets nothing in the namespace."""
    for kind in kinds:
        fields = _fields(kind)
        for title, helps in _HELP[kind].items():
            group = parser.add_argument_group(title)
            for name, text in helps.items():
                if name not in omit | NO_FLAG:
                    _add_flag(group, name, text, *fields[name])


def resolve(
    kinds: Iterable[Kind], flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> dict[str, Setting]:
    """The effective value of each field. `ConfigError` names the file or variable that is wrong."""
    in_file = _read_file(file) if file is not None else {}
    settings: dict[str, Setting] = {}
    for kind in kinds:
        for name, (hint, default) in _fields(kind).items():
            settings[name] = _resolve(name, hint, default, flags, environment, in_file, file)
    for name in KEYS & settings.keys():
        settings[name] = _without_space(settings[name])
    _check_names(environment, in_file, file)
    return settings


def _without_space(setting: Setting) -> Setting:
    """Keys without the white space around them: secrets in files and variables often end with a line break."""
    keys = tuple(key.strip() if isinstance(key, str) else key for key in setting.value or ())
    return setting if keys == setting.value else dataclasses.replace(setting, value=keys, is_trimmed=True)


def near_miss(name: str, known: Iterable[str], *, shortest: int = 4) -> str:
    """` (did you mean X?)` with the known name that is most like `name`, or the empty string.

    One letter of four may be wrong, if `shortest` is not above four.
    """
    cutoff = 0.75 if shortest <= len(name) <= 4 else 0.8
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" (did you mean {found[0]}?)" if found else ""


def build(kind: type[Any], settings: Mapping[str, Setting]) -> Any:
    """The configuration of that kind. `ConfigError` if values contradict each other."""
    return kind(**{field.name: settings[field.name].value for field in dataclasses.fields(kind)})


def parse(kind: Kind, name: str, text: str) -> Any:
    """Parses `text` as a value of the field `name`. "none" is None if that is the default.

    `ConfigError` says what the value must be."""
    hint, default = _fields(kind)[name]
    if text.lower() == "none" and default is None:
        return None
    return _from_text(name, hint, text)


def whole_number(text: str) -> int:
    """A number, perhaps with a unit as vLLM reads them: 8k is 8000, 8K is 8192, 1.5m, 1G, 2Ti. Else `ValueError`."""
    if (match := _WITH_UNIT.fullmatch(text.strip())) is None:
        return int(text)
    digits, unit, binary = match.groups()
    power = "kmgt".index(unit.lower()) + 1
    factor = 1024**power if binary or unit.isupper() else 1000**power
    number = Decimal(digits) * factor
    if number != int(number):
        raise ValueError(f"{text} is no whole number")
    return int(number)


def show(settings: Mapping[str, Setting]) -> str:
    """One YAML line per setting, with its source as a comment. `--config` can read it back. Secrets are masked."""
    lines = []
    for name, setting in settings.items():
        value = "'***'" if name in SECRET and setting.value else _as_yaml(setting.value)
        lines.append(f"{name}: {value}  # {setting.source}")
    return "\n".join(lines)


# -- one field


def _fields(kind: Kind) -> dict[str, tuple[Any, Any]]:
    """Name -> (type, default)."""
    hints = typing.get_type_hints(kind)
    return {field.name: (_without_none(hints[field.name]), field.default) for field in dataclasses.fields(kind)}


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.Union[tuple(part for part in typing.get_args(hint) if part is not types.NoneType)]  # noqa: UP007
    return hint


def _number_and_words(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """`int | Literal["auto"]` gives (int, ("auto",)); any other type gives (type, ())."""
    if typing.get_origin(hint) is not typing.Union:
        return hint, ()
    number, words = typing.get_args(hint)
    return number, typing.get_args(words)


def _parser(number: Any, words: tuple[str, ...]) -> Callable[[str], Any]:
    """A function from text to a value; `ValueError` for neither number nor word. argparse prints its name."""

    def parse(text: str) -> Any:
        return text if text in words else whole_number(text) if number is int else number(text)

    parse.__name__ = " or ".join([number.__name__, *words])
    return parse


def _add_flag(group: argparse._ArgumentGroup, name: str, text: str, hint: Any, default: Any) -> None:
    flag = "--" + name.replace("_", "-")
    text = text.replace("%", "%%") + (f" (default: {default})" if default not in (None, ()) else "")
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is Literal:
        options.update(choices=typing.get_args(hint), type=partial(_full_name, name))
    elif typing.get_origin(hint) is tuple:
        options.update(action="append", metavar="TEXT")
    else:
        number, words = _number_and_words(hint)
        options.update(
            type=_parser(number, words), metavar="|".join([{int: "N", float: "X"}.get(number, "TEXT"), *words])
        )
    group.add_argument(flag, **options)


def _resolve(
    name: str,
    hint: Any,
    default: Any,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    in_file: Mapping[str, _YamlEntry],
    file: Path | None,
) -> Setting:
    if name in flags:
        source = "command line" if name == "model" else f"flag --{name.replace('_', '-')}"
        return Setting(_as_tuple(flags[name]), source)
    variable = ENV_PREFIX + name.upper()
    text = environment.get(variable, "")  # a variable that is set but empty counts as not set
    if text and not text.startswith("tcp://"):  # of Kubernetes, see _check_names
        value = _from_text(variable, hint, _full_name(name, text))
        return Setting(value, f"environment {variable}")
    if name in in_file:
        entry = in_file[name]
        value = _as_objects(entry.value) if name in PLUGINS else _full_name(name, entry.value)
        value = json.dumps(value) if name in OBJECTS and isinstance(value, dict) else value
        value = _from_yaml(f"{file}:{entry.line}: {name}", hint, value)
        return Setting(value, f"file {file}")
    return Setting(default, "default")


def _as_objects(value: Any) -> Any:
    """The mappings of a list as JSON, the text that the setting has for one."""
    values = value if isinstance(value, list) else [value]
    return [json.dumps(one, default=str) if isinstance(one, dict) else one for one in values if one is not None]


def _from_text(where: str, hint: Any, text: str) -> Any:
    """Parses a value from an environment variable."""
    if typing.get_origin(hint) is tuple:
        return tuple(part for part in text.split(",") if part)
    if hint is bool:
        if text.lower() not in ("true", "1", "false", "0"):
            raise ConfigError(f"{where} = {text!r}: must be true or false")
        return text.lower() in ("true", "1")
    number, words = _number_and_words(hint)
    if number in (int, float):
        try:
            return _parser(number, words)(text)
        except ValueError:
            kind = " or ".join(["whole number" if number is int else "number", *words])
            raise ConfigError(f"{where} = {text!r}: must be a {kind}") from None
    return _checked(where, hint, text)


def _from_yaml(where: str, hint: Any, value: Any) -> Any:
    """Checks a value from a YAML file, which is typed already."""
    if value is None:
        return None
    if typing.get_origin(hint) is tuple:
        values = value if isinstance(value, list) else [value]
        return tuple(_from_yaml(where, str, part) for part in values)
    if hint is float and type(value) is int:
        return float(value)
    hint, words = _number_and_words(hint)
    if hint is int and isinstance(value, str) and _WITH_UNIT.fullmatch(value):
        return whole_number(value)
    if hint in (bool, int, float, str) and type(value) is not hint and value not in words:
        raise ConfigError(f"{where} = {value!r}: must be {' or '.join([f'of type {hint.__name__}', *words])}")
    return _checked(where, hint, value)


def _checked(where: str, hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
        raise ConfigError(f"{where} = {value!r}: must be one of {', '.join(typing.get_args(hint))}")
    return value


def _full_name(name: str, value: Any) -> Any:
    """`value` of the setting `name`, where it has a short name."""
    return SHORT_NAMES.get(name, {}).get(value, value) if isinstance(value, str) else value


def _check_names(environment: Mapping[str, str], in_file: Mapping[str, _YamlEntry], file: Path | None) -> None:
    """`ConfigError` for an unknown setting of the file, and for a variable that is almost a setting's.

    Other variables with the prefix are not settings: for a service called millrace, Kubernetes sets
    MILLRACE_SERVICE_HOST, MILLRACE_PORT=tcp://... and more of the kind.
    """
    known = {name for kind in (EngineConfig, ServerConfig) for name in _fields(kind)}
    for name, entry in in_file.items():
        if name not in known:
            hint = near_miss(name, known)
            raise ConfigError(f"{file}:{entry.line}: unknown setting {name}{hint}; --help lists all settings")
    for variable in environment:
        name = variable.removeprefix(ENV_PREFIX).lower()
        is_ours = variable.startswith(ENV_PREFIX) and name not in known | NO_SETTINGS
        if is_ours and near_miss(name, known, shortest=5):  # MILLRACE_POST may be another program's
            hint = near_miss(variable, (ENV_PREFIX + each.upper() for each in known))
            raise ConfigError(f"{variable}: no such setting{hint}; unset it or correct its name")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_file(file: Path) -> dict[str, _YamlEntry]:
    import yaml  # slow to import, and needed only with --config

    try:
        text = file.read_text("utf-8")
        data, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
        entries = list(_entries(root)) if isinstance(root, yaml.MappingNode) else []
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: --config must name a YAML file") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{file}{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {str(error).splitlines()[0]}") from None
    if data is None or root is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: must be a mapping, with one line `name: value` per setting")
    construct = yaml.SafeLoader("").construct_object
    found: dict[str, _YamlEntry] = {}
    lines: dict[str, int] = {}  # of the file's own settings
    for key, value, is_own in entries:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if is_own and name in lines:
            raise ConfigError(f"{file}:{line}: {name} is in line {lines[name]} already; remove one of them")
        if is_own:
            lines[name] = line
        found[name] = _YamlEntry(construct(value, deep=True), line)
    return found


def _entries(mapping: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Name and value of each setting of a YAML mapping, and whether it is not merged by `<<`; a later one counts.

    NOTE: of several merged mappings the first counts, by YAML's rules; PyYAML 6.0.4 lets the last one count.
    """
    for key, value in mapping.value:
        if key.tag == "tag:yaml.org,2002:merge":
            parts = value.value if value.id == "sequence" else [value]
            yield from ((name, each, False) for part in reversed(parts) for name, each, _ in _entries(part))
    yield from ((key, value, True) for key, value in mapping.value if key.tag != "tag:yaml.org,2002:merge")


def _as_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return "[" + ", ".join(repr(part) for part in value) + "]"
    return repr(value) if isinstance(value, str) else str(value)
