"""Options of the commands that look at a running server or at this machine."""

from __future__ import annotations

from typing import Any

from .shared_options import LOGGING, add_all_flags, add_common, add_engine_flags, add_model, usage


def add_top(commands: Any) -> None:
    top = commands.add_parser("top", usage=usage("top"), help="show a running server live in the terminal")
    text = "URL of the server (default: http://127.0.0.1:8000)"
    top.add_argument("--url", "--base-url", metavar="URL", default="http://127.0.0.1:8000", help=text)
    top.add_argument("--once", action="store_true", help="print once and exit")
    add_common(top)
    add_engine_flags(top, LOGGING | {"api_key"}, of_engine=frozenset())


def add_health(commands: Any) -> None:
    text = "ask a running server whether it takes requests: exit code 0 or 1"
    health = commands.add_parser("health", usage=usage("health"), help=text)
    text = "URL of the server (default: http://127.0.0.1:PORT, or --uds)"
    health.add_argument("--url", "--base-url", metavar="URL", help=text)
    text = "ask only whether it need not be restarted: 0 while it loads, drains or is stalled, too"
    health.add_argument("--live", action="store_true", help=text)
    health.add_argument("--wait-s", type=float, metavar="X", default=5.0, help="seconds for the answer (default: 5)")
    add_common(health)
    add_engine_flags(health, LOGGING | {"host", "port", "uds", "root_path", "ssl_certfile"}, of_engine=frozenset())


def add_trace(commands: Any) -> None:
    text = "save the last seconds of a server's trace, for ui.perfetto.dev"
    trace = commands.add_parser("trace", usage=usage("trace -o FILE.json"), help=text)
    what = trace.add_argument_group("trace")
    what.add_argument("-o", "--output-file", required=True, metavar="FILE", help="output file; -: stdout")
    text = "URL of the server (default: http://127.0.0.1:8000)"
    what.add_argument("--url", "--base-url", metavar="URL", default="http://127.0.0.1:8000", help=text)
    what.add_argument("--seconds", type=float, metavar="X", default=30.0, help="seconds of the trace (default: 30)")
    add_common(trace)
    add_engine_flags(trace, LOGGING | {"admin_key"}, of_engine=frozenset())


def add_doctor(commands: Any) -> None:
    text = "check the machine, the installation, and whether a model would be served: exit code 0 or 1"
    doctor = commands.add_parser("doctor", usage=usage("doctor [MODEL]"), help=text)
    add_model(doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    add_common(doctor)
    doctor.set_defaults(listens=True)
    add_all_flags(doctor)


def add_collect_env(commands: Any) -> None:
    text = "print versions and hardware for a bug report"
    add_common(commands.add_parser("collect-env", usage=usage("collect-env"), help=text))


def add_completion(commands: Any) -> None:
    text = "print a script that completes commands and flags in a shell"
    completion = commands.add_parser("completion", usage=usage("completion bash|zsh|fish"), help=text)
    text = "shell; to use it: source <(millrace completion bash)"
    completion.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help=text)
    add_common(completion)
