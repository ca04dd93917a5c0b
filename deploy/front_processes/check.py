"""The settings that do not go with several front processes."""

from __future__ import annotations

from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ..config import ServerConfig

OF_ONE_FRONT = ("enable_lora", "logits_processor", "inject")


def check(engine_config: EngineConfig, server_config: ServerConfig, *, has_engines: bool) -> None:
    """Raises `ConfigError` for the first of them. `has_engines`: the engines run elsewhere already."""
    count = f"front_processes = {server_config.front_processes}"
    if server_config.uds is not None:
        raise ConfigError(f"uds = {server_config.uds}: {count} share a port, and not a Unix socket; set host and port")
    if server_config.mode == "inline":
        raise ConfigError(f"mode = inline: {count} have their engines in processes of their own; leave mode out")
    if has_engines:
        return
    if engine_config.executor == "ray":
        message = "start the engines there with `millrace engine`, and `millrace route --front-processes` before them"
        raise ConfigError(f"executor = ray: {count} are for engines of this machine; {message}")
    for name in OF_ONE_FRONT:
        if value := getattr(engine_config, name):
            raise ConfigError(
                f"{name} = {value}: an engine of several fronts does not have that; set front_processes 1"
            )
