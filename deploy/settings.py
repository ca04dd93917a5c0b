"""Settings from flags, environment, file and defaults, in this order of precedence, and where each came from.

One table says what each field of the two configurations is for; types and defaults are the fields' own.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..stages.config import EngineConfig
from ..stages.errors import ConfigError
from .config import ServerConfig

ENV_PREFIX = "MILLRACE_"
SECRET = frozenset({"api_key", "admin_key", "ssl_keyfile_password"})
NO_FLAG = frozenset({"ssl_keyfile_password"})  # flags are for all to see in the list of processes

Kind = type[EngineConfig] | type[ServerConfig]

# group -> field -> what it is for
ENGINE_HELP: dict[str, dict[str, str]] = {
    "model": {
        "model": "folder or Hub id of a model; none: the bundled one",
        "revision": "branch, tag or commit of a Hub model",
        "download_dir": "where Hub models are cached",
        "offline": "never open a socket; the model must be there already",
        "load_format": "dummy: random weights, for benchmarks",
        "dtype": "of weights and activations; auto: the checkpoint's",
        "quantization": "of the weights, as they are loaded, on a CPU: int8 or int4; none: they are kept as dtype",
        "max_model_len": "tokens of prompt and answer together; none: the model's; auto: what fits",
        "logprobs_mode": "raw: the model's own; processed: after penalties, bias, temperature and truncation",
        "generation_config": "whether sampling defaults come from the checkpoint",
        "chat_template": "text of a chat template that replaces the checkpoint's",
        "pooling": "positions that embeddings are made of; auto: as the checkpoint says, or the last of a decoder",
        "seed": "of requests that bring none, and of dummy weights",
    },
    "device": {
        "device": "where the model runs",
        "attention_backend": "auto: triton on cuda; on cpu native, or torch where that can not be had",
        "deterministic": "the same log-probabilities for a request alone and among others; slower, and by triton only",
        "threads": "compute threads on a CPU; none: one a core, and no more than a container's quota keeps running",
        "tokenizer_workers": "threads; a long prompt keeps one busy while others pass",
    },
    "batch": {
        "max_num_seqs": "sequences that run at once",
        "max_num_batched_tokens": "tokens of one step, at most: smaller keeps gaps short, larger prefills faster; "
        "none: 512 by the native library, else 2048",
        "itl_target_ms": "milliseconds that a step may take while answers wait for their next token, as steps of late "
        "have shown: prompts get what is left, and twice what answers take that alone miss it or take 50; up to three "
        "times that while prompts wait that take over half a second; none: what 180 tokens of a prompt take, as 64 do "
        "at the start, 50 to 100 by the native library, else 0; 0: whatever it takes, and each step is planned as soon "
        "as it may be, not shortly before the device is free",
        "enable_chunked_prefill": "let long prompts run over several steps",
        "scheduler": "priority, fifo, or package.module:Class, a millrace.stages.schedule.policy.Policy of your own",
        "priority_ageing_s": "seconds of waiting that are worth one priority; none: priorities are strict",
        "steps_in_flight": "2 overlaps planning with execution, 1 is the serial debug mode",
        "async_scheduling": "hand steps over while the one before runs (GPU, native model); else each is waited for",
        "enforce_eager": "on a GPU, launch each kernel by itself and capture no CUDA graphs",
    },
    "speculation": {
        "speculation": "draft tokens of small batches by n-grams of prompt and answer; auto: natively on a CPU",
        "num_speculative_tokens": "drafts in one step, at most; while several sequences run they share them",
        "prompt_lookup_max": "tokens that must have stood there before, for a sequence to begin drafting",
        "prompt_lookup_min": "the same, for each further draft",
    },
    "KV cache": {
        "block_size": "tokens of a block: smaller wastes less, larger loads faster",
        "num_gpu_blocks": "exact size of the pool, on any device; none: from memory",
        "kv_cache_bytes": "size of the pool; an idle engine on a CPU takes it ahead, all of it; none: from memory",
        "kv_cache_dtype": "of keys and values; int8, on a CPU, or fp8, on a GPU, for twice the tokens; auto: as dtype",
        "enable_prefix_caching": "do not compute again what an earlier prompt or answer began with",
        "swap_space": "GiB of host memory for preempted sequences; none: 4, on a CPU 1; 0: compute them again",
        "num_cpu_blocks": "exact size of that pool; none: from swap_space",
        "gpu_memory_utilization": "share of the device's memory for weights, activations and cache together",
    },
    "admission": {
        "max_admitted_requests": "requests under way at once, waiting ones included; more get 429",
        "max_waiting_requests": "requests without a first token; more get 429",
        "max_queue_s": "seconds that a request may wait to be served, before it gets 408; none: for ever",
        "max_unread_tokens": "tokens of an answer whose client does not read, before it is parked",
        "max_parked_s": "seconds that a client may leave a parked answer unread",
    },
    "recording": {
        "record": "file for all that schedule and allocate are told and decide; see millrace replay and simulate",
        "record_token_ids": "record prompts and answers as they are, not only what is alike in them",
    },
    "rehearsal": {
        "inject": "a fault on purpose, stage=NAME,delay=200ms|error|freeze[,rate=0.01]; may be repeated",
    },
}

SERVER_HELP: dict[str, dict[str, str]] = {
    "processes": {
        "mode": "inline: one process; split: HTTP and text in one, the step loop in another; auto: as the machine is",
    },
    "listening": {
        "host": "address; other than loopback it needs --api-key or --allow-no-key",
        "port": "0: any free one, printed in the ready line",
        "root_path": "prefix under which all routes answer too, such as /llm behind a proxy",
        "uds": "path of a Unix socket, instead of host and port",
        "max_connections": "more are turned away",
        "ssl_certfile": "PEM file of a certificate and its chain: HTTPS instead of HTTP, TLS 1.2 at least",
        "ssl_keyfile": "PEM file of its private key; none: it is in ssl_certfile",
        "ssl_keyfile_password": "of that key; MILLRACE_SSL_KEYFILE_PASSWORD or the --config file, there is no flag",
    },
    "API": {
        "served_model_name": "names that clients may send; answers carry the first; none: the model's",
        "enable_force_include_usage": "send usage in every stream, asked for or not",
        "enable_request_metrics": "send times of the request in every answer, asked for or not",
        "strict_fields": "refuse unknown fields instead of ignoring them",
        "response_store_bytes": "of memory for what /v1/responses may be asked for later; 0: nothing is kept",
        "tool_call_parser": "hermes, llama3_json, mistral, pythonic, none, or package.module:Class, a "
        "millrace.deploy.api.parsers.ToolParser of your own; auto: by the chat template",
        "enable_auto_tool_choice": "let the model choose whether to call a tool",
        "reasoning_parser": "deepseek_r1, qwen3, none, or package.module:Class, a "
        "millrace.deploy.api.parsers.ReasoningParser of your own; auto: by the chat template",
        "disable_docs": "serve neither /openapi.json nor /docs",
        "max_body_bytes": "of a request",
    },
    "security": {
        "api_key": "key that clients must send, but for /health; may be repeated",
        "admin_key": "key that opens /admin, and nothing else; none: there is no /admin; may be repeated",
        "api_key_file": "file with more of them, one a line",
        "admin_key_file": "file with more of them, one a line",
        "allow_no_key": "listen beyond loopback without a key",
        "cache_salt_per_key": "share no cached prefix between holders of different keys",
        "allowed_host": "name by which clients may call the server, besides loopback's; may be repeated; *: any",
        "allowed_origin": "page that may send requests, WebSockets too: scheme://host[:port]; may be repeated; *: any",
        "cors_allow_origin": "page that may send requests and read the answers; may be repeated; *: any",
    },
    "patience": {
        "header_timeout_s": "seconds from a request's first byte to the end of its headers",
        "body_timeout_s": "seconds to the end of its body",
        "keep_alive_s": "seconds for the next request on a connection",
        "stalled_reader_s": "seconds for a client that does not read its stream",
        "sse_ping_interval_s": "seconds of silence in a stream before a comment line is sent; 0: none",
        "shutdown_timeout_s": "seconds for requests under way when told to stop",
    },
    "WebSockets": {
        "ws_max_sockets": "more are turned away",
        "ws_max_streams": "requests under way on one socket; more get 429",
        "ws_ping_interval_s": "seconds of silence before a client is pinged; it has half as long to answer",
        "ws_resume_window_s": "seconds that a request which may be resumed outlives its socket",
    },
    "logging": {
        "log_format": "of the lines on stderr",
        "log_level": "least severity that is logged",
        "log_error_messages": "log what exceptions say, not only where they come from; it may quote prompts",
        "log_requests": "log when a request begins and how it ends",
        "log_prompts": "characters of each prompt to log with that; 0: none",
        "stats_interval_s": "seconds between two lines on what runs, while something does; 0: none",
        "otlp_traces_endpoint": "URL of an OpenTelemetry collector, like http://127.0.0.1:4318/v1/traces; none: nobody",
    },
    "trouble": {
        "stall_timeout_s": "seconds without progress, while there is work, before /health says stalled",
        "flight_recorder_dir": "folder for files on what led to a stall or a crash; none: nothing is written",
        "flight_recorder_s": "seconds of the trace in each of them",
        "profiler_dir": "folder for windows of torch's profiler, opened with the admin key; none: there are none",
    },
}

_HELP: dict[Kind, dict[str, dict[str, str]]] = {EngineConfig: ENGINE_HELP, ServerConfig: SERVER_HELP}


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value."""

    value: Any
    source: str  # "flag --port", "environment MILLRACE_PORT", "file x.yaml", "default"


def add_flags(parser: argparse.ArgumentParser, kinds: Iterable[Kind], *, omit: frozenset[str] = frozenset()) -> None:
    """A flag for each field, grouped. A flag that is not given leaves nothing in the namespace."""
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
            settings[name] = _settle(name, hint, default, flags, environment, in_file, file)
    known = {name for kind in (EngineConfig, ServerConfig) for name in _fields(kind)}
    for name in in_file:
        if name not in known:
            raise ConfigError(f"{file}: there is no setting {name}; --help lists them")
    return settings


def build(kind: type[Any], settings: Mapping[str, Setting]) -> Any:
    """The configuration of that kind. `ConfigError` if values do not go together."""
    return kind(**{field.name: settings[field.name].value for field in dataclasses.fields(kind)})


def parse(kind: Kind, name: str, text: str) -> Any:
    """A value of the field `name`, from text. `ConfigError` says what it must be; "none" is no value."""
    hint, default = _fields(kind)[name]
    if text.lower() == "none" and default is None:
        return None
    return _from_text(name, hint, text)


def show(settings: Mapping[str, Setting]) -> str:
    """One line a setting, as YAML that can be read back, with the source as its comment. Keys are not shown."""
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
    """`int | Literal["auto"]` is (int, ("auto",)); any other type is itself, and no words."""
    if typing.get_origin(hint) is not typing.Union:
        return hint, ()
    number, words = typing.get_args(hint)
    return number, typing.get_args(words)


def _parser(number: Any, words: tuple[str, ...]) -> Callable[[str], Any]:
    """From text to a value; ValueError for neither number nor word. argparse tells its name."""

    def parse(text: str) -> Any:
        return text if text in words else number(text)

    parse.__name__ = " or ".join([number.__name__, *words])
    return parse


def _add_flag(group: argparse._ArgumentGroup, name: str, text: str, hint: Any, default: Any) -> None:
    flag = "--" + name.replace("_", "-")
    text = text.replace("%", "%%") + (f" (default: {default})" if default not in (None, ()) else "")
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is Literal:
        options["choices"] = typing.get_args(hint)
    elif typing.get_origin(hint) is tuple:
        options.update(action="append", metavar="TEXT")
    else:
        number, words = _number_and_words(hint)
        options.update(
            type=_parser(number, words), metavar="|".join([{int: "N", float: "X"}.get(number, "TEXT"), *words])
        )
    group.add_argument(flag, **options)


def _settle(
    name: str,
    hint: Any,
    default: Any,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    in_file: Mapping[str, Any],
    file: Path | None,
) -> Setting:
    if name in flags:
        source = "command line" if name == "model" else f"flag --{name.replace('_', '-')}"
        return Setting(_as_tuple(flags[name]), source)
    variable = ENV_PREFIX + name.upper()
    if variable in environment:
        return Setting(_from_text(variable, hint, environment[variable]), f"environment {variable}")
    if name in in_file:
        return Setting(_from_yaml(f"{file}: {name}", hint, in_file[name]), f"file {file}")
    return Setting(default, "default")


def _from_text(where: str, hint: Any, text: str) -> Any:
    """A value of an environment variable."""
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
    """A value of a file, which has a type of its own."""
    if value is None:
        return None
    if typing.get_origin(hint) is tuple:
        values = value if isinstance(value, list) else [value]
        return tuple(_from_yaml(where, str, part) for part in values)
    if hint is float and type(value) is int:
        return float(value)
    hint, words = _number_and_words(hint)
    if hint in (bool, int, float, str) and type(value) is not hint and value not in words:
        raise ConfigError(f"{where} = {value!r}: must be {' or '.join([f'of type {hint.__name__}', *words])}")
    return _checked(where, hint, value)


def _checked(where: str, hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
        raise ConfigError(f"{where} = {value!r}: must be one of {', '.join(typing.get_args(hint))}")
    return value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_file(file: Path) -> dict[str, Any]:
    import yaml  # not needed by who brings no file

    try:
        data = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: --config must name a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: this is no YAML: {str(error).splitlines()[0]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: must hold a mapping, one line `name: value` a setting")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


def _as_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return "[" + ", ".join(repr(part) for part in value) + "]"
    return repr(value) if isinstance(value, str) else str(value)
