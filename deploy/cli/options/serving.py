"""Options of `millrace serve`, `engine` and `route`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...config import ServerConfig
from .argument_parser import ArgumentParser
from .shared_options import LOGGING, add_all_flags, add_common, add_engine_flags, add_model, usage

FRONT = frozenset(  # settings of a front: the others are its engines'
    {"revision", "download_dir", "offline", "allow_links_outside", "tokenizer", "tokenizer_workers", "seed", "stage"}
    | {"chat_template", "chat_template_content_format", "default_chat_template_kwargs", "routing_policy"}
    | {"max_admitted_requests", "max_waiting_requests", "max_queue_s", "max_unread_tokens", "max_parked_s"}
)


def add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", usage=usage("serve [MODEL]"), help="serve a model over HTTP (OpenAI's API)")
    add_model(serve)
    add_common(serve)
    serve.set_defaults(listens=True)
    add_all_flags(serve)


def add_engine(commands: Any) -> None:
    text = "run a model's step loop for fronts on this and other machines"
    engine = commands.add_parser("engine", usage=usage("engine [MODEL] --listen HOST:PORT"), help=text)
    add_model(engine)
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
    add_common(engine)
    add_engine_flags(engine, LOGGING | {"shutdown_timeout_s", "link_timeout_s", "served_model_name"})


def add_route(commands: Any) -> None:
    text = "serve the models of engines elsewhere over HTTP (OpenAI's API)"
    route = commands.add_parser("route", usage=usage("route [MODEL] --engine HOST:PORT"), help=text)
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
    add_common(route)
    add_engine_flags(route, frozenset(ServerConfig.__dataclass_fields__) - {"mode"}, FRONT)


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
