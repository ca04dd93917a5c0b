"""The application for Ray Serve: all routes of the server, under Serve's proxy, with its replicas and autoscaling.

    serve run millrace.deploy.ray.app:build_app model=Qwen/Qwen3-0.6B device=cuda max_replicas=4

Importing this module imports Ray Serve. Each streamed event passes Serve's proxy: `millrace serve --executor ray` has a
shorter way. A replica is on one node, with as many engines and ranks as its settings say.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.env.log import configure, get_logger
from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ..config import ServerConfig
from ..settings.near_miss import near_miss
from ..settings.sources import parse
from .asgi_bridge import AsgiBridge
from .placement import parse_resources
from .ray_library import ray_library
from .scaling import BUSY, WORK

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ..server.server import Server

POLICY = "millrace.deploy.ray.scaling:QueuedWorkPolicy"
OF_SERVE = frozenset({"host", "port", "uds", "mode", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"})
OF_THE_EXECUTOR = frozenset({"ray_address", "ray_placement", "ray_env", "ray_timeout_s"})
REPORT_S, LOOK_BACK_S = 2.0, 6.0  # between two reports of a replica, and over which Serve takes their mean
STOP_S = 10.0  # beyond `shutdown_timeout_s`, for a replica to end

log = get_logger("millrace.deploy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Settings of the application itself; all others are those of `millrace serve`, by their names."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_work_s: float = 10.0  # seconds of work that may wait in each replica before there are more
    downscale_delay_s: float = 300.0  # for which fewer replicas must suffice


def build_app(args: Mapping[str, Any]) -> Any:
    """The Serve application. `args` are settings by name, as text or values. Raises `ConfigError`."""
    options, engine, server = parse_args(args)
    serve = ray_library("ray.serve")
    deployment = serve.deployment(**deployment_options(options, engine, server))(serve.ingress()(MillraceReplica))
    return deployment.bind(dataclasses.asdict(engine), dataclasses.asdict(server))


def parse_args(args: Mapping[str, Any]) -> tuple[ServeOptions, EngineConfig, ServerConfig]:
    """The settings of an application. Raises `ConfigError` for one that is unknown, wrong, or Serve's own."""
    kinds: tuple[Any, ...] = (ServeOptions, EngineConfig, ServerConfig)
    names = {kind: {field.name for field in dataclasses.fields(kind)} for kind in kinds}
    known = set().union(*names.values()) - OF_SERVE - OF_THE_EXECUTOR
    found: dict[Any, dict[str, Any]] = {kind: {} for kind in kinds}
    for given, value in args.items():
        name = given.replace("-", "_")
        if name not in known:
            whose = "Ray Serve's, or of executor = ray" if name in OF_SERVE | OF_THE_EXECUTOR else "no setting"
            raise ConfigError(f"{given} = {value}: is {whose}{near_miss(name, known)}")
        kind = next(kind for kind in kinds if name in names[kind])
        found[kind][name] = _value(kind, name, value)
    engine = EngineConfig(**found[EngineConfig])
    if engine.executor == "ray":
        raise ConfigError("executor = ray: under Ray Serve a replica's engines are beside it; leave executor out")
    if ":" in engine.device:
        raise ConfigError(f"device = {engine.device}: Ray chooses the GPUs; set cuda or cpu")
    parse_resources(engine.ray_resources)
    return _checked(ServeOptions(**found[ServeOptions])), engine, _guarded(ServerConfig(**found[ServerConfig]))


def deployment_options(options: ServeOptions, engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """The options of the Serve deployment: what a replica takes of a node, how many there are, and their end."""
    num_engines = engine.data_parallel_size
    resources = parse_resources(engine.ray_resources)
    actor: dict[str, Any] = {"num_cpus": resources.pop("CPU", num_engines * float(engine.threads or 1))}
    if engine.device == "cuda":
        actor["num_gpus"] = num_engines * engine.tensor_parallel_size
    if (memory := resources.pop("memory", None)) is not None:
        actor["memory"] = memory
    actor["resources"] = resources
    limit_s = server.shutdown_timeout_s + STOP_S
    found: dict[str, Any] = {
        "name": "Millrace",
        "ray_actor_options": actor,
        "max_ongoing_requests": engine.max_admitted_requests,  # more get 429 with Retry-After from the replica itself
        "graceful_shutdown_timeout_s": limit_s,
        "health_check_timeout_s": 30.0,
    }
    if options.max_replicas == options.min_replicas:
        return found | {"num_replicas": options.min_replicas}
    scaling = {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": options.downscale_delay_s,
        "metrics_interval_s": REPORT_S,
        "look_back_period_s": LOOK_BACK_S,
        "policy": {"policy_function": POLICY, "policy_kwargs": {"target_s": options.target_work_s}},
    }
    return found | {"autoscaling_config": scaling}


class MillraceReplica:
    """A replica: an engine in processes of its own, our server on a Unix socket, and the bridge to it.

    Serve sends it no more requests, waits for those under way, and then calls `__del__`.
    """

    async def __init__(self, engine: dict[str, Any], server: dict[str, Any]) -> None:  # type: ignore[misc]
        from ..server.server import Server

        self._folder = tempfile.TemporaryDirectory(prefix="millrace-")
        config = ServerConfig(**server | {"uds": str(Path(self._folder.name) / "server")})
        configure(config.log_format, config.log_level, with_error_messages=config.log_error_messages)
        self._config = EngineConfig(**engine)
        if self._config.threads is None and self._config.device != "cuda":
            self._config = replace(self._config, threads=1)  # as many CPUs as it takes of its node
        self._bridge = AsgiBridge(str(config.uds))
        self._server: Server = Server(config)
        self._engine: Engine = _make_engine(self._config)
        await self._server.start()
        try:
            await self._engine.start()
        except BaseException:
            await self._server.stop()
            raise
        self._server.attach(self._engine)
        self._engine.give_way()

    def __serve_build_asgi_app__(self) -> AsgiBridge:
        return self._bridge

    async def check_health(self) -> None:
        """Raises if the engine does not come back: then Serve replaces the replica. A death that is mended is none."""
        if self._engine.health.state == "dead" or self._server.service.is_stuck:
            raise RuntimeError(f"the engine is dead: {self._engine.health.reason}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy goes by."""
        status = self._engine.status()
        running = 0 if status.core is None else status.core.scheduler.num_running
        slots = self._config.max_num_seqs * self._config.data_parallel_size
        return {WORK: status.front.admission.work_waiting_s, BUSY: running / slots}

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):
            await self._server.drain()
            await self._bridge.aclose()
            await self._server.stop()
            await self._engine.stop()
            self._folder.cleanup()


def _make_engine(config: EngineConfig) -> Engine:
    if config.data_parallel_size > 1:
        from ...stages.fleet.fleet_engine import FleetEngine

        return FleetEngine(config)
    from ...stages.split.split_engine import SplitEngine

    return SplitEngine(config)


def _value(kind: Any, name: str, value: Any) -> Any:
    """A value from the command line, where all is text, or from a YAML file."""
    if kind is ServeOptions:
        try:
            return float(value) if name.endswith("_s") else int(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{name} = {value}: must be a number") from None
    if isinstance(value, list):
        return tuple(value)
    try:
        return parse(kind, name, value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{name} = {value}: {error}") from None


def _guarded(config: ServerConfig) -> ServerConfig:
    """Without a key only loopback's names are answered, so that no foreign page uses Serve's proxy.

    NOTE: another machine may send such a name; by itself Serve's proxy listens on loopback only.
    """
    has_key = config.api_key or config.api_key_file is not None or config.allow_no_key
    return config if has_key or config.allowed_host else replace(config, allowed_host=("localhost",))


def _checked(options: ServeOptions) -> ServeOptions:
    if not 0 <= options.min_replicas <= options.max_replicas or options.max_replicas < 1:
        bounds = f"min_replicas = {options.min_replicas}, max_replicas = {options.max_replicas}"
        raise ConfigError(f"{bounds}: must be at least 0 and 1, and the first at most the second")
    if not options.target_work_s > 0 or options.downscale_delay_s < 0:
        raise ConfigError(f"target_work_s = {options.target_work_s}: must be above 0 seconds, and no delay below 0")
    return options


def __getattr__(name: str) -> Any:
    """`app` is the application with all defaults, for `serve build` and `serve run` without arguments."""
    if name == "app":
        return build_app({})
    raise AttributeError(f"module {__name__} has no attribute {name}")
