"""`millrace bench latency | throughput | serve | lora`: benchmarks with the report format of `vllm bench`.

Owns: nothing after a run.
In: the options of the command; a model, or the URL of a server.
Out: a report on stdout, and with `--save-result` a JSON file.
Imports: the root of `deploy`, `stages`, `runtime`.
Start with: `latency.py`, the shortest; `measures.py` defines the figures.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from ....runtime.env.log import configure
from ....stages.config import EngineConfig
from ...config import ServerConfig


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 1 if a request failed."""
    configure(server_config.log_format, server_config.log_level)
    code: int = import_module(f".{options.bench}", __package__).run(options, engine_config, server_config)
    return code
