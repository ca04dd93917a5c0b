"""`millrace`: the command line. Each command is a file of its own, imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ..config import ServerConfig
from ..settings import Setting, add_flags, build, resolve, show

CAN_NOT_START = 3  # a setting or a checkpoint is wrong; one line on stderr says which
LOGGING = frozenset({"log_format", "log_level"})
BATCH = frozenset(
    {"api_key", "served_model_name", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser"}
    | {"strict_fields", "enable_request_metrics", "max_body_bytes"}
)

Run = Callable[[argparse.Namespace, EngineConfig, ServerConfig], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code. 0 well, 1 a failed request, 2 wrong usage, 3 can not start, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        settings = resolve((EngineConfig, ServerConfig), vars(options), os.environ, options.config)
        if options.command != "serve" and settings["log_level"].source == "default":
            settings["log_level"] = Setting("warning", "default")  # a terminal is for the answer
        engine_config, server_config = build(EngineConfig, settings), build(ServerConfig, settings)
        if options.print_config:
            print(show(settings))
            return 0
        options.sources = {name: setting.source for name, setting in settings.items()}
        run: Run = import_module(f".{options.command.replace('-', '_')}", __package__).run
        return run(options, engine_config, server_config)
    except ConfigError as error:
        return _complain(error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from ...model.errors import ModelError  # not needed by --help

        if not isinstance(error, ModelError):
            raise
        return _complain(error)


def _complain(error: Exception) -> int:
    print(f"millrace: {error}", file=sys.stderr)
    return CAN_NOT_START


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace", description="An LLM serving engine made of seven stages.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_complete(commands)
    _add_chat(commands)
    _add_run_batch(commands)
    _add_bench(commands)
    _add_replay(commands)
    _add_simulate(commands)
    _add_top(commands)
    _add_trace(commands)
    _add_collect_env(commands)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"millrace {version('millrace')}")
        parser.exit()


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", usage=_usage("serve [MODEL]"), help="serve a model over HTTP (OpenAI's API)")
    _add_model(serve)
    _add_common(serve)
    add_flags(serve, (EngineConfig, ServerConfig), omit=frozenset({"model"}))


def _add_complete(commands: Any) -> None:
    complete = commands.add_parser("complete", usage=_usage("complete PROMPT"), help="go on with a text")
    complete.add_argument("prompt", metavar="PROMPT", help="text to go on with")
    _add_client(complete)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", usage=_usage("chat"), help="talk with a model")
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the first turn")
    _add_client(chat)


def _add_run_batch(commands: Any) -> None:
    batch = commands.add_parser(
        "run-batch", usage=_usage("run-batch -i IN.jsonl -o OUT.jsonl"), help="answer a file of requests, a line each"
    )
    files = batch.add_argument_group("the batch")
    files.add_argument("-i", "--input-file", required=True, metavar="FILE", help="OpenAI's batch format; - is stdin")
    text = "answers in the order in which they come, over what was there; - is stdout"
    files.add_argument("-o", "--output-file", required=True, metavar="FILE", help=text)
    files.add_argument("--url", help="ask this server instead of loading a model, e.g. http://127.0.0.1:8000")
    text = "requests under way at once, and so lines in memory (default: 128)"
    files.add_argument("--max-concurrency", type=int, metavar="N", default=128, help=text)
    _add_common(batch)
    batch.add_argument("--model", default=argparse.SUPPRESS, help="folder or Hub id; none: the bundled one")
    _add_engine_flags(batch, LOGGING | BATCH)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", usage=_usage("bench latency|throughput|serve"), help="measure how fast it is")
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)

    latency = kinds.add_parser("latency", usage=_usage("bench latency"), help="one batch, in this process")
    load = _add_load(latency, input_len=32, output_len=128)
    load.add_argument("--batch-size", type=int, metavar="N", default=8, help="prompts at once (default: 8)")
    load.add_argument("--num-iters", type=int, metavar="N", default=30, help="batches to measure (default: 30)")
    load.add_argument("--num-iters-warmup", type=int, metavar="N", default=10, help="batches before (default: 10)")
    latency.set_defaults(dataset_path=None, random_range_ratio=0.0)

    throughput = kinds.add_parser("throughput", usage=_usage("bench throughput"), help="many, in this process")
    _add_many(_add_load(throughput, input_len=128, output_len=128))
    for command in (latency, throughput):
        command.add_argument("--model", default=argparse.SUPPRESS, help="folder or Hub id; none: the bundled one")
        _add_engine_flags(command, LOGGING)

    serve = kinds.add_parser("serve", usage=_usage("bench serve"), help="a running server, as its clients see it")
    load = _add_load(serve, input_len=128, output_len=128)
    _add_many(load)
    _add_clients(load)
    serve.add_argument("--model", default=argparse.SUPPRESS, help="name at the server; none: the first it tells")
    _add_engine_flags(serve, LOGGING | {"api_key"}, of_engine=frozenset({"seed"}))


def _add_load(command: argparse.ArgumentParser, *, input_len: int, output_len: int) -> Any:
    load = command.add_argument_group("load")
    text = f"tokens of a random prompt (default: {input_len})"
    load.add_argument("--input-len", "--random-input-len", type=int, metavar="N", default=input_len, help=text)
    text = f"tokens of an answer (default: {output_len})"
    load.add_argument("--output-len", "--random-output-len", type=int, metavar="N", default=output_len, help=text)
    result = command.add_argument_group("result")
    result.add_argument("--save-result", action="store_true", help="write the figures to a file of JSON, too")
    result.add_argument("--result-dir", metavar="FOLDER", help="for it (default: this one)")
    result.add_argument("--result-filename", metavar="FILE", help="its name (default: with the date)")
    _add_common(command)
    return load


def _add_many(load: Any) -> None:
    load.add_argument("--num-prompts", type=int, metavar="N", default=1000, help="requests (default: 1000)")
    text = "lengths vary by this share, up and down (default: 0)"
    load.add_argument("--random-range-ratio", type=float, metavar="X", default=0.0, help=text)
    text = 'JSON lines like {"prompt": "...", "output_tokens": 20} instead of random prompts'
    load.add_argument("--dataset-path", type=Path, metavar="FILE", help=text)


def _add_clients(load: Any) -> None:
    text = "of the server (default: http://127.0.0.1:8000)"
    load.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000", help=text)
    text = "/v1/completions (default) or /v1/chat/completions, which needs a dataset"
    load.add_argument("--endpoint", metavar="PATH", default="/v1/completions", help=text)
    text = "requests a second, as a Poisson process (default: inf, all at once)"
    load.add_argument("--request-rate", type=float, metavar="X", default=float("inf"), help=text)
    load.add_argument("--max-concurrency", type=int, metavar="N", help="requests under way at once (default: no limit)")
    text = "limits in ms that a good request keeps to, like ttft:500 tpot:50 e2el:5000"
    load.add_argument("--goodput", nargs="+", metavar="NAME:MS", help=text)
    text = "answers go on to their full length (default: with random prompts)"
    load.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help=text)


def _add_replay(commands: Any) -> None:
    text = "run a recording again and compare each decision"
    replay = commands.add_parser("replay", usage=_usage("replay FILE"), help=text)
    replay.add_argument("recording", type=Path, metavar="FILE", help="made by millrace serve --record FILE")
    replay.add_argument("--repeat", type=int, metavar="N", default=1, help="run it so many times (default: 1)")
    text = "package.module:Class of the policy it was made with, if that is none of ours"
    replay.add_argument("--policy", metavar="TEXT", help=text)
    text = "show it in the browser, moment by moment, at http://127.0.0.1:PORT/dashboard"
    replay.add_argument("--dashboard", action="store_true", help=text)
    _add_common(replay)
    _add_engine_flags(replay, LOGGING | {"port"}, of_engine=frozenset())


def _add_simulate(commands: Any) -> None:
    text = "what a trace would have come to with other settings, without the device"
    simulate = commands.add_parser("simulate", usage=_usage("simulate --trace FILE --cost-model FILE"), help=text)
    files = "a recording, or a trace like Azure's (CSV) or Mooncake's (JSON lines)"
    simulate.add_argument("--trace", type=Path, required=True, metavar="FILE", help=files)
    text = "a cost model, a recording to fit one to, or fit-from-recording: to the trace, which then is one"
    simulate.add_argument("--cost-model", required=True, metavar="FILE", help=text)
    text = "setting of the engine, in place of that of the recording; may be repeated"
    simulate.add_argument("--set", action="append", metavar="NAME=VALUE", help=text)
    text = "settings to try one after another; may be repeated, and then all go with all"
    simulate.add_argument("--sweep", action="append", metavar="NAME=A,B,C", help=text)
    simulate.add_argument("--max-requests", type=int, metavar="N", help="the first so many of the trace")
    text = "arrivals so many times as far apart (default: 1)"
    simulate.add_argument("--scale-times", type=float, metavar="X", default=1.0, help=text)
    text = "prompts and answers so many times as long (default: 1)"
    simulate.add_argument("--scale-lengths", type=float, metavar="X", default=1.0, help=text)
    simulate.add_argument("--save-cost-model", type=Path, metavar="FILE", help="write the cost model, as JSON")
    simulate.add_argument("--save-result", type=Path, metavar="FILE", help="write the figures, as JSON")
    text = "draw them, as PNG, SVG or PDF; needs pip install 'millrace[plots]'"
    simulate.add_argument("--plot", type=Path, metavar="FILE", help=text)
    _add_common(simulate)


def _add_top(commands: Any) -> None:
    top = commands.add_parser("top", usage=_usage("top"), help="what a running server does, live, in this terminal")
    default = "http://127.0.0.1:8000"
    top.add_argument("--url", metavar="URL", default=default, help=f"of the server (default: {default})")
    top.add_argument("--once", action="store_true", help="print it once, and leave")
    _add_common(top)
    _add_engine_flags(top, LOGGING | {"api_key"}, of_engine=frozenset())


def _add_trace(commands: Any) -> None:
    text = "fetch the last seconds of a server's trace, for ui.perfetto.dev"
    trace = commands.add_parser("trace", usage=_usage("trace -o FILE.json"), help=text)
    what = trace.add_argument_group("the trace")
    what.add_argument("-o", "--output-file", required=True, metavar="FILE", help="where it goes; - is stdout")
    text = "of the server (default: http://127.0.0.1:8000)"
    what.add_argument("--url", metavar="URL", default="http://127.0.0.1:8000", help=text)
    what.add_argument("--seconds", type=float, metavar="X", default=30.0, help="how far back it goes (default: 30)")
    _add_common(trace)
    _add_engine_flags(trace, LOGGING | {"admin_key"}, of_engine=frozenset())


def _add_collect_env(commands: Any) -> None:
    text = "print versions and hardware, to paste into a report"
    _add_common(commands.add_parser("collect-env", usage=_usage("collect-env"), help=text))


def _add_client(command: argparse.ArgumentParser) -> None:
    asking = command.add_argument_group("asking")
    asking.add_argument("--url", help="ask this server instead of loading a model, e.g. http://127.0.0.1:8000")
    asking.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: 256)", default=256)
    asking.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the model's)")
    asking.add_argument("--top-p", type=float, metavar="X", help="share of the probability to choose from")
    asking.add_argument("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be repeated")
    asking.add_argument("--sampling-seed", type=int, metavar="N", help="the same seed gives the same answer")
    asking.add_argument("--stats", action="store_true", help="print time to first token and tokens/s to stderr")
    _add_common(command)
    command.add_argument("--model", default=argparse.SUPPRESS, help="folder, Hub id, or name at the server")
    _add_engine_flags(command, LOGGING | {"api_key"})


ALL_OF_ENGINE = frozenset(EngineConfig.__dataclass_fields__)


def _add_engine_flags(
    command: argparse.ArgumentParser, of_server: frozenset[str], of_engine: frozenset[str] = ALL_OF_ENGINE
) -> None:
    """The engine's settings, and these of the server's."""
    not_needed = (ALL_OF_ENGINE - of_engine) | (frozenset(ServerConfig.__dataclass_fields__) - of_server)
    add_flags(command, (EngineConfig, ServerConfig), omit=not_needed | {"model"})


def _usage(command: str) -> str:
    return f"millrace {command} [options]"


def _add_model(command: argparse.ArgumentParser) -> None:
    text = "folder or Hub id of a model; none: the bundled one"
    command.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=text)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the flags' names as keys")
    command.add_argument("--print-config", action="store_true", help="print each setting and where it comes from")
