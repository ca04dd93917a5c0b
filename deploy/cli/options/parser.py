"""The parser of `millrace` and all of its commands."""

from __future__ import annotations

import argparse
from typing import Any

from .argument_parser import ArgumentParser
from .asking import add_chat, add_complete, add_run_batch
from .measuring import add_bench, add_eval_perplexity
from .observing import add_collect_env, add_completion, add_doctor, add_health, add_top, add_trace
from .serving import add_engine, add_route, add_serve
from .simulating import add_chaos, add_replay, add_simulate


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = ArgumentParser(prog="millrace", description="An LLM serving engine made of seven stages.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_serve(commands)
    add_engine(commands)
    add_route(commands)
    add_complete(commands)
    add_chat(commands)
    add_run_batch(commands)
    add_bench(commands)
    add_eval_perplexity(commands)
    add_replay(commands)
    add_simulate(commands)
    add_chaos(commands)
    add_top(commands)
    add_health(commands)
    add_trace(commands)
    add_doctor(commands)
    add_collect_env(commands)
    add_completion(commands)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ...http.package_version import package_version

        print(f"millrace {package_version()}")
        parser.exit()
