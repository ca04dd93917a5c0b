"""`millrace`: the parsers of all commands, and the entry point that imports and runs one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...runtime.env.limits import resource_problem
from ...stages.config import EngineConfig
from ...stages.errors import ConfigError, NotStartedError
from ..config import ServerConfig
from ..settings.flags import add_flags
from ..settings.sources import Setting, build, resolve, show
from . import standard_streams
from .argument_parser import ArgumentParser

STARTUP_ERROR_EXIT_CODE = 3  # exit code for a wrong setting or checkpoint; one line on stderr names it
MODULES = {
    "engine": "machines.engine",
    "route": "machines.route",
    "chaos": "chaos.chaos_run",
}  # of commands not in a module of their name
FRONTED = ("serve", "route")  # they may have several front processes
SERVERS = ("serve", "engine", "route")  # they log to the terminal, which no answer needs
LOGGING = frozenset({"log_format", "log_level"})
EVALUATION = frozenset(  # settings that may change a model's predictions, or are needed to load it
    {"revision", "download_dir", "offline", "allow_links_outside", "model_impl", "load_format", "dtype", "seed"}
    | {
        "merge_adapter",
        "quantization",
        "device",
        "attention_backend",
        "deterministic",
        "threads",
        "enforce_eager",
        "tilings",
    }
    | {"block_size", "kv_cache_dtype", "gpu_memory_utilization"}
)
FRONT = frozenset(  # settings of a front: the others are its engines'
    {"revision", "download_dir", "offline", "allow_links_outside", "tokenizer", "tokenizer_workers", "seed", "stage"}
    | {"chat_template", "chat_template_content_format", "default_chat_template_kwargs", "routing_policy"}
    | {"max_admitted_requests", "max_waiting_requests", "max_queue_s", "max_unread_tokens", "max_parked_s"}
)
BATCH = frozenset(
    {"api_key", "served_model_name", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser"}
    | {"strict_fields", "enable_request_metrics", "max_body_bytes"}
)

Run = Callable[[argparse.Namespace, EngineConfig, ServerConfig], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0 success, 1 a failed request, 2 wrong usage, 3 a wrong setting or checkpoint, or too little memory or too few
    threads, processes or files, 130 interrupted, 141 the reader of the output has left.
    """
    # numpy's BLAS has nothing to do here; with too few threads for it, it sends this process a SIGINT
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    standard_streams.prepare()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except OSError as error:
        code = standard_streams.exit_code_of_broken_output(error)
        if code is None:
            raise
        return code


def _run(arguments: Sequence[str] | None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        _join_models(options)
        settings = resolve((EngineConfig, ServerConfig), vars(options), os.environ, options.config)
        if options.command not in SERVERS and settings["log_level"].source == "default":
            settings["log_level"] = Setting("warning", "default")  # keep the terminal for the answer
        if not getattr(options, "listens", False):  # at `host`, which may be that of a container's servers
            settings["host"] = Setting(ServerConfig.__dataclass_fields__["host"].default, "default")
        engine_config, server_config = build(EngineConfig, settings), build(ServerConfig, settings)
        if options.print_config:
            print(show(settings))
            return 0
        options.sources = {name: setting.source for name, setting in settings.items()}
        options.trimmed = [name for name, setting in settings.items() if setting.is_trimmed]
        module = MODULES.get(options.command, options.command.replace("-", "_"))
        if options.command in FRONTED and (server_config.front_processes > 1 or _has_several_models(options)):
            module = "fronts.supervise"
        run: Run = import_module(f".{module}", __package__).run
        return run(options, engine_config, server_config)
    except ConfigError as error:
        return _print_error(error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from ...model.errors import ModelError  # slow to import; --help does not need it
        from ...runtime.workers.thread_start import is_thread_shortage

        if isinstance(error, (ModelError, NotStartedError)) or is_thread_shortage(error):
            return _print_error(error)
        if (problem := resource_problem(error) or _missing_package(error)) is None:
            raise
        return _print_error(problem)


def _has_several_models(options: argparse.Namespace) -> bool:
    """Whether the engines of a front serve different models, which then have fronts of their own."""
    if not (engines := getattr(options, "engine", None)):
        return False
    models: dict[str, list[str]] = import_module(".machines.addresses", __package__).engines_by_model(engines)
    return len(models) > 1


def _missing_package(error: Exception) -> str | None:
    """What an installation without all dependencies lacks, if that is what `error` says; else None."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name not in ("torch", "transformers", "triton"):
        return None
    return f"{name} is not installed, which this model or its settings need: pip install {name}"


def _join_models(options: argparse.Namespace) -> None:
    """`serve MODEL` and `serve --model MODEL` are one setting."""
    flag = vars(options).pop("model_flag", None)
    if flag is None:
        return
    if getattr(options, "model", flag) != flag:
        raise ConfigError(f"two models: {options.model} and --model {flag}; name one of them")
    options.model = flag


def _print_error(error: Exception | str) -> int:
    standard_streams.print_error(f"millrace: {error}")
    return STARTUP_ERROR_EXIT_CODE


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = ArgumentParser(prog="millrace", description="An LLM serving engine made of seven stages.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_engine(commands)
    _add_route(commands)
    _add_complete(commands)
    _add_chat(commands)
    _add_run_batch(commands)
    _add_bench(commands)
    _add_eval_perplexity(commands)
    _add_replay(commands)
    _add_simulate(commands)
    _add_chaos(commands)
    _add_top(commands)
    _add_health(commands)
    _add_trace(commands)
    _add_doctor(commands)
    _add_collect_env(commands)
    _add_completion(commands)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ..http.package_version import package_version

        print(f"millrace {package_version()}")
        parser.exit()


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", usage=_usage("serve [MODEL]"), help="serve a model over HTTP (OpenAI's API)")
    _add_model(serve)
    _add_common(serve)
    serve.set_defaults(listens=True)
    add_flags(serve, (EngineConfig, ServerConfig), omit=frozenset({"model"}))
    serve.takes_vllm_flags = True


def _add_engine(commands: Any) -> None:
    text = "run a model's step loop for fronts on this and other machines"
    engine = commands.add_parser("engine", usage=_usage("engine [MODEL] --listen HOST:PORT"), help=text)
    _add_model(engine)
    fleet = _add_fleet(engine)
    text = "address for fronts; beyond this machine it needs the key"
    fleet.add_argument("--listen", required=True, metavar="HOST:PORT", help=text)
    text = "port for /health and /metrics, on the same host (default: none)"
    fleet.add_argument("--metrics-port", type=int, metavar="PORT", help=text)
    text = (
        "what becomes of requests when the engine is to stop: finish: they end here; migrate: fronts send them to "
        "other engines at once, where they go on (default: finish)"
    )
    fleet.add_argument("--drain-by", choices=("finish", "migrate"), default="finish", help=text)
    text = "what fronts are told of the engine, such as version=v2; may be repeated"
    fleet.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help=text)
    _add_common(engine)
    _add_engine_flags(engine, LOGGING | {"shutdown_timeout_s", "link_timeout_s", "served_model_name"})


def _add_route(commands: Any) -> None:
    text = "serve the models of engines elsewhere over HTTP (OpenAI's API)"
    route = commands.add_parser("route", usage=_usage("route [MODEL] --engine HOST:PORT"), help=text)
    text = "folder or Hub id of the engines' model, for its text files; none: as the engines name it"
    route.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=text)
    route.add_argument("--model", dest="model_flag", metavar="MODEL", default=argparse.SUPPRESS, help="as MODEL")
    fleet = _add_fleet(route)
    text = (
        "address of a `millrace engine`; dns:NAME:PORT: all addresses of a name, looked up every 5 s; file:PATH: the "
        "addresses in a file, one a line, which may change; may be repeated; MODEL= before each, if they serve several "
        "models: each model then has front processes of its own"
    )
    fleet.add_argument("--engine", action="append", required=True, metavar="HOST:PORT", help=text)
    text = (
        "share of the requests for the engines with this label; the others go to the other engines; a session stays on "
        "its side; changed at run time by POST /admin/traffic"
    )
    fleet.add_argument("--split", metavar="NAME=VALUE:PERCENT", help=text)
    text = (
        "share of the requests of which copies go to the engines with this label, which serve nothing else; their "
        "answers are compared with the real ones, and dropped"
    )
    fleet.add_argument("--shadow", metavar="NAME=VALUE:PERCENT", help=text)
    text = "as --front-processes, by vLLM's name"
    fleet.add_argument(
        "--api-server-count", type=int, metavar="N", dest="front_processes", default=argparse.SUPPRESS, help=text
    )
    _add_common(route)
    _add_engine_flags(route, frozenset(ServerConfig.__dataclass_fields__) - {"mode"}, FRONT)


def _add_fleet(command: ArgumentParser) -> Any:
    fleet = command.add_argument_group("fleet")
    text = "file of the secret that all engines and fronts of a fleet share, 32 bytes or more"
    fleet.add_argument("--fleet-key-file", type=Path, metavar="FILE", help=text)
    text = "encrypt links: this process's certificate in PEM; it and the next two files are read again once replaced"
    fleet.add_argument("--fleet-tls-cert", type=Path, metavar="FILE", help=text)
    text = "the private key of that certificate, without a password"
    fleet.add_argument("--fleet-tls-key", type=Path, metavar="FILE", help=text)
    text = "the authorities of all certificates of the fleet; both ends of a link check those of the other"
    fleet.add_argument("--fleet-tls-ca", type=Path, metavar="FILE", help=text)
    return fleet


def _add_complete(commands: Any) -> None:
    complete = commands.add_parser("complete", usage=_usage("complete PROMPT"), help="complete a text")
    complete.add_argument("prompt", metavar="PROMPT", help="text to complete")
    _add_client(complete)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", usage=_usage("chat"), help="chat with a model")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_client(chat)


def _add_run_batch(commands: Any) -> None:
    batch = commands.add_parser(
        "run-batch", usage=_usage("run-batch -i IN.jsonl -o OUT.jsonl"), help="answer a file of requests, one per line"
    )
    files = batch.add_argument_group("batch")
    files.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests in OpenAI's batch format; -: stdin"
    )
    text = "answers in order of completion; an existing file is overwritten; -: stdout"
    files.add_argument("-o", "--output-file", required=True, metavar="FILE", help=text)
    files.add_argument(
        "--url", "--base-url", help="use this server instead of loading a model, e.g. http://127.0.0.1:8000"
    )
    text = "maximum concurrent requests, which also bounds the lines in memory (default: 128)"
    files.add_argument("--max-concurrency", type=int, metavar="N", default=128, help=text)
    _add_common(batch)
    batch.add_argument("--model", default=argparse.SUPPRESS, help="folder or Hub id; none: the bundled model")
    _add_engine_flags(batch, LOGGING | BATCH)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", usage=_usage("bench latency|throughput|serve|lora"), help="run a benchmark")
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)

    latency = kinds.add_parser("latency", usage=_usage("bench latency"), help="latency of one batch, in this process")
    load = _add_load(latency, input_len=32, output_len=128)
    load.add_argument("--batch-size", type=int, metavar="N", default=8, help="prompts per batch (default: 8)")
    load.add_argument("--num-iters", type=int, metavar="N", default=30, help="measured batches (default: 30)")
    load.add_argument("--num-iters-warmup", type=int, metavar="N", default=10, help="warm-up (default: 10)")
    latency.set_defaults(dataset_path=None, random_range_ratio=0.0)

    throughput = kinds.add_parser("throughput", usage=_usage("bench throughput"), help="throughput, in this process")
    _add_many(_add_load(throughput, input_len=128, output_len=128))
    for command in (latency, throughput):
        command.add_argument("--model", default=argparse.SUPPRESS, help="folder or Hub id; none: the bundled model")
        _add_engine_flags(command, LOGGING)

    serve = kinds.add_parser("serve", usage=_usage("bench serve"), help="latency and throughput of a running server")
    load = _add_load(serve, input_len=128, output_len=128)
    _add_many(load)
    _add_clients(load)
    serve.add_argument("--model", default=argparse.SUPPRESS, help="model name; none: the server's first")
    _add_engine_flags(serve, LOGGING | {"api_key"}, of_engine=frozenset({"seed"}))

    text = "what LoRA adapters add to a step, in this process"
    lora = kinds.add_parser("lora", usage=_usage("bench lora"), help=text)
    load = _add_load(lora, input_len=16, output_len=64)
    text = "rows of a step and adapters among them; may be repeated (default: 1/1 8/8 32/1 32/8 32/32)"
    load.add_argument("--mix", action="append", metavar="ROWS/ADAPTERS", help=text)
    load.add_argument("--rank", type=int, metavar="N", default=16, help="of the adapters (default: 16)")
    text = "measured batches of each mix, with and without adapters in turns (default: 8)"
    load.add_argument("--num-iters", type=int, metavar="N", default=8, help=text)
    lora.add_argument("--model", default=argparse.SUPPRESS, help="folder or Hub id; none: the bundled model")
    _add_engine_flags(lora, LOGGING)


def _add_load(command: argparse.ArgumentParser, *, input_len: int, output_len: int) -> Any:
    load = command.add_argument_group("load")
    text = f"tokens per random prompt (default: {input_len})"
    load.add_argument("--input-len", "--random-input-len", type=int, metavar="N", default=input_len, help=text)
    text = f"tokens per answer (default: {output_len})"
    load.add_argument("--output-len", "--random-output-len", type=int, metavar="N", default=output_len, help=text)
    result = command.add_argument_group("result")
    result.add_argument("--save-result", action="store_true", help="also write the results to a JSON file")
    result.add_argument("--result-dir", metavar="FOLDER", help="folder of this file (default: the current one)")
    result.add_argument("--result-filename", metavar="FILE", help="name of this file (default: includes the date)")
    _add_common(command)
    return load


def _add_many(load: Any) -> None:
    load.add_argument("--num-prompts", type=int, metavar="N", default=1000, help="number of requests (default: 1000)")
    text = "lengths vary by this share in both directions, 0 to 1 (default: 0)"
    load.add_argument("--random-range-ratio", type=float, metavar="X", default=0.0, help=text)
    text = 'file of JSON lines like {"prompt": "...", "output_tokens": 20}, used instead of random prompts'
    load.add_argument("--dataset-path", type=Path, metavar="FILE", help=text)


def _add_clients(load: Any) -> None:
    text = "URL of the server (default: http://127.0.0.1:8000)"
    load.add_argument("--base-url", "--url", metavar="URL", default="http://127.0.0.1:8000", help=text)
    text = "/v1/completions (default), or /v1/chat/completions with --dataset-path"
    load.add_argument("--endpoint", metavar="PATH", default="/v1/completions", help=text)
    text = "requests per second, a Poisson process (default: inf, all at once)"
    load.add_argument("--request-rate", type=float, metavar="X", default=float("inf"), help=text)
    load.add_argument("--max-concurrency", type=int, metavar="N", help="concurrent requests (default: no limit)")
    text = "goodput limits in ms, such as ttft:500 tpot:50 e2el:5000"
    load.add_argument("--goodput", nargs="+", metavar="NAME:MS", help=text)
    text = "generate answers to their full length (default: only with random prompts)"
    load.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help=text)


def _add_eval_perplexity(commands: Any) -> None:
    text = "perplexity of a text, and how far a model's predictions are from another's"
    evaluate = commands.add_parser("eval-perplexity", usage=_usage("eval-perplexity MODEL TEXT"), help=text)
    evaluate.add_argument("model", metavar="MODEL", help="folder, GGUF file or Hub id of a model; demo: the bundled")
    evaluate.add_argument("text", metavar="TEXT", help="file of UTF-8 text; -: stdin")
    how = evaluate.add_argument_group("evaluation")
    text = "tokens of a window (default: 2048, or the model's most if that is less)"
    how.add_argument("--context-length", type=int, metavar="N", help=text)
    text = "tokens between windows, so that all but the first have N less than a window before them (default: half)"
    how.add_argument("--stride", type=int, metavar="N", help=text)
    how.add_argument("--num-tokens", type=int, metavar="N", help="use only the first N tokens of the text")
    text = "reference with the same tokens: print KL(MODEL2 || MODEL) and how often both find the same token likeliest"
    how.add_argument("--against", metavar="MODEL2", help=text)
    text = "engine setting of MODEL2, in place of MODEL's, such as dtype=float32; may be repeated"
    how.add_argument("--against-set", action="append", metavar="NAME=VALUE", help=text)
    how.add_argument("--json", action="store_true", help="print one JSON object")
    _add_common(evaluate)
    _add_engine_flags(evaluate, LOGGING, of_engine=EVALUATION)


def _add_replay(commands: Any) -> None:
    text = "replay a recording and compare each decision"
    replay = commands.add_parser("replay", usage=_usage("replay FILE"), help=text)
    replay.add_argument("recording", type=Path, metavar="FILE", help="recording made by millrace serve --record FILE")
    replay.add_argument("--repeat", type=int, metavar="N", default=1, help="number of replays (default: 1)")
    text = "package.module:Class of the recording's scheduling policy, if it is not built in"
    replay.add_argument("--policy", metavar="TEXT", help=text)
    text = "play the recording in the dashboard at http://127.0.0.1:PORT/dashboard"
    replay.add_argument("--dashboard", action="store_true", help=text)
    _add_common(replay)
    _add_engine_flags(replay, LOGGING | {"port"}, of_engine=frozenset())


def _add_simulate(commands: Any) -> None:
    text = "simulate a trace with other settings, without the device"
    simulate = commands.add_parser("simulate", usage=_usage("simulate --trace FILE --cost-model FILE"), help=text)
    files = "recording, or trace in the format of Azure (CSV) or Mooncake (JSON lines)"
    simulate.add_argument("--trace", type=Path, required=True, metavar="FILE", help=files)
    text = "cost model, recording to fit one to, or fit-from-recording: fit to --trace, which must be a recording"
    simulate.add_argument("--cost-model", required=True, metavar="FILE", help=text)
    text = "engine setting that replaces the recording's; may be repeated"
    simulate.add_argument("--set", action="append", metavar="NAME=VALUE", help=text)
    text = "values to try for a setting; may be repeated, to try all combinations"
    simulate.add_argument("--sweep", action="append", metavar="NAME=A,B,C", help=text)
    text = "simulate so many engines behind a router, with a row for each --policy"
    simulate.add_argument("--fleet", type=int, metavar="N", help=text)
    text = "rules of the router: soonest, least-work, round-robin, prefix-only; several with commas, or all"
    simulate.add_argument("--policy", metavar="LIST", default="soonest", help=text)
    text = "lose an engine of the fleet at that time; may be repeated"
    simulate.add_argument("--kill", action="append", metavar="ENGINE@SECONDS", help=text)
    text = "seconds until a lost engine takes requests again (default: 30)"
    simulate.add_argument("--restart-s", type=float, metavar="X", default=30.0, help=text)
    text = "rules for the number of engines, at most --fleet: fixed, queued-work, hpa; several with commas, or all"
    simulate.add_argument("--autoscale", metavar="LIST", default="fixed", help=text)
    text = "engines at the beginning, and at least (default: 1)"
    simulate.add_argument("--least-engines", type=int, metavar="N", default=1, help=text)
    text = "seconds until an engine that --autoscale adds takes requests (default: 60)"
    simulate.add_argument("--start-s", type=float, metavar="X", default=60.0, help=text)
    text = "seconds of work that may wait for each engine (default: 10)"
    simulate.add_argument("--target-work-s", type=float, metavar="X", default=10.0, help=text)
    text = "sequences that may run in each engine, for hpa (default: 0.8 of max_num_seqs)"
    simulate.add_argument("--target-running", type=float, metavar="X", help=text)
    text = "processes that simulate a fleet (default: one for each core, with 4 engines or more in each)"
    simulate.add_argument("--processes", type=int, metavar="N", help=text)
    simulate.add_argument("--max-requests", type=int, metavar="N", help="simulate only the first N requests")
    text = "factor for the time between arrivals (default: 1)"
    simulate.add_argument("--scale-times", type=float, metavar="X", default=1.0, help=text)
    text = "factor for the lengths of prompts and answers (default: 1)"
    simulate.add_argument("--scale-lengths", type=float, metavar="X", default=1.0, help=text)
    simulate.add_argument("--save-cost-model", type=Path, metavar="FILE", help="write the cost model to this JSON file")
    simulate.add_argument("--save-result", type=Path, metavar="FILE", help="write the results to this JSON file")
    text = "plot the results as PNG, SVG or PDF; needs pip install -e '.[plots]'"
    simulate.add_argument("--plot", type=Path, metavar="FILE", help=text)
    _add_common(simulate)


def _add_chaos(commands: Any) -> None:
    text = "run fronts and engines on this machine under faults, and check each answer: exit code 0 or 1"
    chaos = commands.add_parser("chaos", usage=_usage("chaos --fleet FRONTSxENGINES"), help=text)
    chaos.add_argument("--fleet", metavar="FxE", default="2x3", help="fronts and engines to start (default: 2x3)")
    text = "what is asked and, without --plan, struck (default: 0)"
    chaos.add_argument("--seed", type=int, metavar="N", default=0, help=text)
    chaos.add_argument("--minutes", type=float, metavar="X", default=1.0, help="time of the faults (default: 1)")
    text = "YAML or JSON file of strikes, or one of upgrade, partition, clocks, versions (default: drawn)"
    chaos.add_argument("--plan", metavar="FILE", help=text)
    chaos.add_argument("--clients", type=int, metavar="N", default=32, help="clients (default: 32)")
    text = "requests a second of all clients, at most (default: 8)"
    chaos.add_argument("--rate", type=float, metavar="X", default=8.0, help=text)
    text = "folder for the logs of all processes (default: a temporary one, kept after a violation)"
    chaos.add_argument("--log-dir", type=Path, metavar="DIR", help=text)
    text = "write each request with the times of its pieces to this file, as JSON lines"
    chaos.add_argument("--save-history", type=Path, metavar="FILE", help=text)
    _add_common(chaos)


def _add_top(commands: Any) -> None:
    top = commands.add_parser("top", usage=_usage("top"), help="show a running server live in the terminal")
    text = "URL of the server (default: http://127.0.0.1:8000)"
    top.add_argument("--url", "--base-url", metavar="URL", default="http://127.0.0.1:8000", help=text)
    top.add_argument("--once", action="store_true", help="print once and exit")
    _add_common(top)
    _add_engine_flags(top, LOGGING | {"api_key"}, of_engine=frozenset())


def _add_health(commands: Any) -> None:
    text = "ask a running server whether it takes requests: exit code 0 or 1"
    health = commands.add_parser("health", usage=_usage("health"), help=text)
    text = "URL of the server (default: http://127.0.0.1:PORT, or --uds)"
    health.add_argument("--url", "--base-url", metavar="URL", help=text)
    text = "ask only whether it need not be restarted: 0 while it loads, drains or is stalled, too"
    health.add_argument("--live", action="store_true", help=text)
    health.add_argument("--wait-s", type=float, metavar="X", default=5.0, help="seconds for the answer (default: 5)")
    _add_common(health)
    _add_engine_flags(health, LOGGING | {"host", "port", "uds", "root_path", "ssl_certfile"}, of_engine=frozenset())


def _add_trace(commands: Any) -> None:
    text = "save the last seconds of a server's trace, for ui.perfetto.dev"
    trace = commands.add_parser("trace", usage=_usage("trace -o FILE.json"), help=text)
    what = trace.add_argument_group("trace")
    what.add_argument("-o", "--output-file", required=True, metavar="FILE", help="output file; -: stdout")
    text = "URL of the server (default: http://127.0.0.1:8000)"
    what.add_argument("--url", "--base-url", metavar="URL", default="http://127.0.0.1:8000", help=text)
    what.add_argument("--seconds", type=float, metavar="X", default=30.0, help="seconds of the trace (default: 30)")
    _add_common(trace)
    _add_engine_flags(trace, LOGGING | {"admin_key"}, of_engine=frozenset())


def _add_doctor(commands: Any) -> None:
    text = "check the machine, the installation, and whether a model would be served: exit code 0 or 1"
    doctor = commands.add_parser("doctor", usage=_usage("doctor [MODEL]"), help=text)
    _add_model(doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    _add_common(doctor)
    doctor.set_defaults(listens=True)
    add_flags(doctor, (EngineConfig, ServerConfig), omit=frozenset({"model"}))
    doctor.takes_vllm_flags = True


def _add_collect_env(commands: Any) -> None:
    text = "print versions and hardware for a bug report"
    _add_common(commands.add_parser("collect-env", usage=_usage("collect-env"), help=text))


def _add_completion(commands: Any) -> None:
    text = "print a script that completes commands and flags in a shell"
    completion = commands.add_parser("completion", usage=_usage("completion bash|zsh|fish"), help=text)
    text = "shell; to use it: source <(millrace completion bash)"
    completion.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help=text)
    _add_common(completion)


def _add_client(command: ArgumentParser) -> None:
    group = command.add_argument_group("request")
    group.add_argument(
        "--url", "--base-url", help="use this server instead of loading a model, e.g. http://127.0.0.1:8000"
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="maximum tokens (default: 256)", default=256)
    group.add_argument("--temperature", type=float, metavar="X", help="0: greedy (default: the model's)")
    group.add_argument("--top-p", type=float, metavar="X", help="nucleus sampling (default: the model's)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be repeated")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="seed for a reproducible answer")
    group.add_argument("--stats", action="store_true", help="print time to first token and tokens/s to stderr")
    _add_common(command)
    command.add_argument("--model", default=argparse.SUPPRESS, help="folder, Hub id, or model name with --url")
    _add_engine_flags(command, LOGGING | {"api_key"})


ALL_OF_ENGINE = frozenset(EngineConfig.__dataclass_fields__)


def _add_engine_flags(
    command: ArgumentParser, of_server: frozenset[str], of_engine: frozenset[str] = ALL_OF_ENGINE
) -> None:
    """Adds flags for the settings `of_engine` and `of_server`."""
    command.takes_vllm_flags = of_engine == ALL_OF_ENGINE
    command.set_defaults(listens="host" in of_server)
    not_needed = (ALL_OF_ENGINE - of_engine) | (frozenset(ServerConfig.__dataclass_fields__) - of_server)
    add_flags(command, (EngineConfig, ServerConfig), omit=not_needed | {"model"})


def _usage(command: str) -> str:
    return f"millrace {command} [options]"


def _add_model(command: argparse.ArgumentParser) -> None:
    text = "folder or Hub id of a model; none: the bundled model"
    command.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=text)
    command.add_argument("--model", dest="model_flag", metavar="MODEL", default=argparse.SUPPRESS, help="as MODEL")


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings; keys are flag names")
    command.add_argument("--print-config", action="store_true", help="print each setting with its source and exit")
