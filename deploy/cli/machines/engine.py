"""`millrace engine`: runs a model's step loop for fronts on this and other machines, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from ....runtime.env.env import LiveEnv
from ....runtime.env.log import configure, get_logger
from ....runtime.env.loops import loop_factory
from ....runtime.env.service_manager import ServiceManager
from ....runtime.processes.auth import FleetKey
from ....runtime.processes.tcp import TcpListener
from ....runtime.processes.tls import FleetTls
from ....stages.config import EngineConfig
from ....stages.engine.warm_up import warm_up
from ....stages.errors import ConfigError
from ....stages.machines.engine_server import DrainBy, EngineServer
from ....stages.machines.route_engine import warm_up_own
from ....stages.traffic.labels import Labels, parse_labels
from ...config import ServerConfig
from ...http.port_holder import port_problem
from .. import standard_streams
from ..serve import STOP_S, StopSignals
from .addresses import parse_address, prefix_key, read_key, read_tls, tls_files
from .engine_pages import EnginePages

ASKED: Mapping[str, DrainBy] = {"finish": "finish", "migrate": "migrate"}

log = get_logger("millrace.deploy")


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 0 after a stop by signal, even if requests were cut short; 1 if the step loop died."""
    configure(server_config.log_format, server_config.log_level)
    address, key = parse_address("--listen", options.listen), read_key(options.fleet_key_file)
    _check_ports(address, options.metrics_port)
    tls = read_tls(tls_files(options.fleet_tls_cert, options.fleet_tls_key, options.fleet_tls_ca), "listener")
    labels = parse_labels("--label", options.label)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code, is_device_lost = runner.run(
            _live(engine_config, server_config, address, key, tls, options.metrics_port, options.drain_by, labels)
        )
    if is_device_lost:
        os._exit(code)  # at once: the driver's own end may wait for the device
    return code


async def _live(
    config: EngineConfig,
    server_config: ServerConfig,
    address: tuple[str, int],
    key: FleetKey | None,
    tls: FleetTls | None,
    metrics_port: int | None,
    drain_by: DrainBy,
    labels: Labels,
) -> tuple[int, bool]:
    manager = ServiceManager.take(os.environ)
    env = LiveEnv(config.seed)
    engine = EngineServer(
        config,
        env,
        prefix_key=prefix_key(key),
        labels=labels,
        served_names=server_config.served_model_name,
        link_timeout_s=server_config.link_timeout_s,
    )
    listener = _listener(address, key, tls, engine)
    config.check_files()
    await _check_free(listener)
    stop = StopSignals(server_config.shutdown_timeout_s + STOP_S)
    main = asyncio.current_task()
    assert main is not None
    stop.on_early = main.cancel
    try:
        async with _pages(engine, address[0], metrics_port) as pages:
            await engine.start()
            await warm_up_own(engine, warm_up)
            gc.collect()
            gc.freeze()
            await _listen(listener)
            if pages is not None:
                pages.takes_fronts = True
            stop.on_early = None
            _print_ready(listener, pages)
            manager.ready(f"listening on {_text(listener.address)}")
            code = await _run(engine, listener, stop, server_config.shutdown_timeout_s, drain_by, manager)
    except asyncio.CancelledError:
        if not stop.event.is_set():
            raise
        main.uncancel()
        code = 0  # stopped before there was anything to drain
    finally:
        await listener.aclose()
        await engine.aclose()
        await env.aclose()
        stop.close()
    return code, engine.is_device_lost


async def _run(
    engine: EngineServer,
    listener: TcpListener,
    stop: StopSignals,
    timeout_s: float,
    drain_by: DrainBy,
    manager: ServiceManager,
) -> int:
    """Serves until a signal or the word of a front, and then drains; or until the step loop is dead."""
    if not await engine.serve_until(stop.event, engine.drain_asked):
        return 1
    manager.stopping()
    await listener.aclose()
    asked: DrainBy | None = None if stop.event.is_set() else ASKED.get(engine.asked_by)
    is_clean = await engine.drain(timeout_s, asked or drain_by)
    log.info("engine.stopped", is_clean=is_clean)
    return 0


def _listener(
    address: tuple[str, int], key: FleetKey | None, tls: FleetTls | None, engine: EngineServer
) -> TcpListener:
    try:
        return TcpListener(*address, key, engine.take, tls=tls)
    except ValueError as error:
        raise ConfigError(f"--listen {_text(address)}: {error}; make one and set --fleet-key-file") from None


def _check_ports(address: tuple[str, int], metrics_port: int | None) -> None:
    """Raises `ConfigError` if fronts and pages would have one port."""
    if address[1] and metrics_port == address[1]:
        both = f"--listen {_text(address)} and --metrics-port {metrics_port} name one port"
        raise ConfigError(f"{both}; choose another --metrics-port")


async def _check_free(listener: TcpListener) -> None:
    """Raises `ConfigError` if the address cannot be used: before the model is loaded, which may take minutes.

    Until it is loaded nothing listens, so that fronts see an engine that is away, and try again.
    """
    if listener.address[1]:
        await _listen(listener)
        await listener.aclose()


async def _listen(listener: TcpListener) -> None:
    try:
        await listener.start()
    except OSError as error:
        raise ConfigError(port_problem(*listener.address, error, "--listen", "--listen")) from None


@asynccontextmanager
async def _pages(engine: EngineServer, host: str, port: int | None) -> AsyncIterator[EnginePages | None]:
    if port is None:
        yield None
        return
    pages = EnginePages(engine, host, port)
    pages.takes_fronts = False
    try:
        await pages.start()
        yield pages
    finally:
        await pages.aclose()


def _print_ready(listener: TcpListener, pages: EnginePages | None) -> None:
    """Prints the ready line, JSON for a parent process."""
    line = {"event": "ready", "listen": _text(listener.address), "pid": os.getpid()}
    if pages is not None:
        line["metrics"] = pages.url
    if (error := standard_streams.print_line(json.dumps(line, separators=(",", ":")))) is not None:
        log.warning("ready_line.not_printed", reason=error.strerror)


def _text(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
