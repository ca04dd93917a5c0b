"""`millrace`: the entry point that imports the module of a command and runs it; `options/` has their parsers."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from ...runtime.env.limits import resource_problem
from ...stages.config import EngineConfig
from ...stages.errors import ConfigError, NotStartedError
from ..config import ServerConfig
from ..settings.sources import Setting, build, resolve, show
from . import standard_streams
from .options.parser import make_parser as make_parser

STARTUP_ERROR_EXIT_CODE = 3  # exit code for a wrong setting or checkpoint; one line on stderr names it
MODULES = {
    "engine": "machines.engine",
    "route": "machines.route",
    "chaos": "chaos.chaos_run",
}  # of commands not in a module of their name
FRONTED = ("serve", "route")  # they may have several front processes
SERVERS = ("serve", "engine", "route")  # they log to the terminal, which no answer needs

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
    if options.command not in SERVERS:
        return _run_command(options)
    with _ends_on_sigterm():
        return _run_command(options)


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Until a server handles SIGTERM itself, it ends by it with 0: it has nothing yet that it could lose.

    Without a handler, the first process of a container would ignore it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_command(options: argparse.Namespace) -> int:
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
