"""`serve` and `route` with `--front-processes` above 1: starts fronts and engines, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from ....runtime.env.log import configure, get_logger
from ....runtime.env.loops import loop_factory, until_any_is_set
from ....runtime.env.service_manager import ServiceManager
from ....stages.config import EngineConfig
from ....stages.errors import ConfigError
from ....stages.traffic.traffic_rules import TrafficRules
from ...config import ServerConfig
from ...front_processes.check import check
from ...front_processes.supervisor import ServerPlan, Supervisor
from .. import standard_streams
from ..machines.addresses import engines_by_model, parse_source, read_key, read_tls, tls_files
from ..serve import STOP_S, StopSignals, check_limits, log_notes

FRONT, CORE = "millrace.deploy.cli.fronts.front_process", "millrace.deploy.cli.fronts.core_process"
ENGINES_S = 10.0  # at the end, for the engines to free everything

log = get_logger("millrace.deploy")


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 0 after a stop by signal; 1 if a child kept ending; as `serve` for what does not start."""
    engines: list[str] = getattr(options, "engine", None) or []
    key_file = getattr(options, "fleet_key_file", None)
    configure(server_config.log_format, server_config.log_level, with_error_messages=server_config.log_error_messages)
    log_notes(options)
    if len(models := engines_by_model(engines)) > 1:
        engines = [text for some in models.values() for text in some]
        server_config = _for_models(list(models), engine_config, server_config)
    else:
        engines = next(iter(models.values()), engines)
        names = server_config.served_model_name or tuple(models)
        models, server_config = {}, replace(server_config, served_model_name=names)
    check(engine_config, server_config, has_engines=bool(engines))
    for text in engines:
        parse_source(text)
    traffic = TrafficRules.parse(getattr(options, "split", None), getattr(options, "shadow", None))
    read_key(key_file)
    tls = tls_files(*(getattr(options, f"fleet_tls_{one}", None) for one in ("cert", "key", "ca")))
    read_tls(tls, "dialer")
    plan = ServerPlan(
        front_module=FRONT,
        core_module=CORE,
        engine_config=engine_config,
        server_config=server_config,
        sources=options.sources,
        engines=engines,
        fleet_key_file=None if key_file is None else str(key_file),
        fleet_tls=() if tls is None else tuple(map(str, (tls.cert, tls.key, tls.ca))),
        traffic=traffic,
        models=models,
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_supervise(plan))


def _for_models(models: Sequence[str], engine: EngineConfig, server: ServerConfig) -> ServerConfig:
    """The settings for fronts of several models, each with `front_processes` of them. Raises `ConfigError`."""
    of_one = {"model": engine.model, "tokenizer": engine.tokenizer, "served_model_name": server.served_model_name}
    for name, value in of_one.items():
        if value:
            named = ", ".join(models)
            raise ConfigError(f"{name} = {value}: is of one model, and --engine names {named}; leave it out")
    return replace(server, front_processes=len(models) * server.front_processes)


async def _supervise(plan: ServerPlan) -> int:
    manager = ServiceManager.take(os.environ)
    check_limits()
    if not plan.engines:
        plan.engine_config.check_files()
    plan.server_config.check_folders()
    server = plan.server_config
    stop = StopSignals(server.lame_duck_s + server.shutdown_timeout_s + STOP_S + ENGINES_S)
    supervisor = Supervisor(plan)
    main = asyncio.current_task()
    assert main is not None
    stop.on_early = main.cancel
    try:
        supervisor.open()
        if await _start(supervisor, stop):
            url = _url(server, supervisor.port)
            _print_ready(supervisor, url)
            manager.ready(f"{supervisor.models[0]} on {url}, {server.front_processes} fronts")
        return await _run(supervisor, stop, manager)
    except asyncio.CancelledError:
        if not stop.event.is_set():
            raise
        main.uncancel()
        return 0  # stopped before there was anything to drain
    finally:
        await supervisor.aclose()
        stop.close()


async def _start(supervisor: Supervisor, stop: StopSignals) -> bool:
    """Waits until all fronts take requests. False: a signal came before that, and fronts that do are to drain."""
    starting = asyncio.ensure_future(supervisor.start())
    leaving = asyncio.ensure_future(_stopped(supervisor, stop))
    try:
        await asyncio.wait([starting, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        starting.result()
        stop.on_early = None
        return True
    finally:
        starting.cancel()
        leaving.cancel()
        await asyncio.wait([starting, leaving])


async def _stopped(supervisor: Supervisor, stop: StopSignals) -> None:
    """Waits for a signal that ends a server with requests: once one front takes some, there is something to drain."""
    await supervisor.serves.wait()
    stop.on_early = None
    await stop.event.wait()


async def _run(supervisor: Supervisor, stop: StopSignals, manager: ServiceManager) -> int:
    """Waits for a signal, or until a child is given up. Then all fronts drain, and the engines end."""
    beating = asyncio.ensure_future(_beat(manager))
    try:
        await until_any_is_set(stop.event, supervisor.failed)
    finally:
        beating.cancel()
        await asyncio.wait([beating])
    manager.stopping()
    failure = supervisor.failure
    log.info("front_processes.stopping", reason="a signal" if failure is None else str(failure))
    await supervisor.stop()
    log.info("front_processes.stopped")
    if failure is not None:
        standard_streams.print_error(f"millrace: {failure}")
    return 0 if failure is None else 1


async def _beat(manager: ServiceManager) -> None:
    while manager.watchdog_s is not None:
        manager.alive()
        await asyncio.sleep(manager.watchdog_s / 2)
    await asyncio.Event().wait()


def _url(config: ServerConfig, port: int) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{port}"


def _print_ready(supervisor: Supervisor, url: str) -> None:
    """Prints the ready line: JSON for a parent process, addresses for a person at a terminal."""
    config, names = supervisor.plan.server_config, list(supervisor.models)
    count = config.front_processes
    line = {"event": "ready", "url": url, "models": names, "model_impl": supervisor.model_impl, "pid": os.getpid()}
    text = json.dumps(line | {"fronts": count}, separators=(",", ":"))
    if sys.stdout.isatty():
        root = url + config.root_path
        text = f"ready: model {', '.join(names)}, {count} fronts\n  API       {root}/v1\n  dashboard {root}/dashboard"
    if (error := standard_streams.print_line(text)) is not None:
        log.warning("ready_line.not_printed", reason=error.strerror)
