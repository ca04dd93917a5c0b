"""Options that several commands have: settings as flags, a model, a configuration file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ....stages.config import EngineConfig
from ...config import ServerConfig
from ...settings.flags import add_flags
from .argument_parser import ArgumentParser

LOGGING = frozenset({"log_format", "log_level"})
ALL_OF_ENGINE = frozenset(EngineConfig.__dataclass_fields__)


def add_engine_flags(
    command: ArgumentParser, of_server: frozenset[str], of_engine: frozenset[str] = ALL_OF_ENGINE
) -> None:
    """Adds flags for the settings `of_engine` and `of_server`."""
    command.takes_vllm_flags = of_engine == ALL_OF_ENGINE
    command.set_defaults(listens="host" in of_server)
    not_needed = (ALL_OF_ENGINE - of_engine) | (frozenset(ServerConfig.__dataclass_fields__) - of_server)
    add_flags(command, (EngineConfig, ServerConfig), omit=not_needed | {"model"})


def add_all_flags(command: ArgumentParser) -> None:
    """Adds flags for all settings but the model."""
    add_flags(command, (EngineConfig, ServerConfig), omit=frozenset({"model"}))
    command.takes_vllm_flags = True


def usage(command: str) -> str:
    return f"millrace {command} [options]"


def add_model(command: argparse.ArgumentParser) -> None:
    text = "folder or Hub id of a model; none: the bundled model"
    command.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=text)
    command.add_argument("--model", dest="model_flag", metavar="MODEL", default=argparse.SUPPRESS, help="as MODEL")


def add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings; keys are flag names")
    command.add_argument("--print-config", action="store_true", help="print each setting with its source and exit")
