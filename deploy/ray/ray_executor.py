"""Starts and ends engine processes as actors of a Ray cluster.

Ray finds a node for each and reports its end. It restarts none: the fleet is the only keeper, or two would start the
same engine. An actor dials back over TCP with a key of its own, and from then on is an engine process like any other.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.processes.auth import FleetKey
from ...runtime.processes.tcp import TcpListener
from ...runtime.processes.transport import SocketTransport
from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ...stages.split.process_client import EngineDied
from .engine_actor import EngineActor
from .placement import PlacementRequest, Resources, engines_beside, environment_for, make_request, no_room
from .ray_library import ray_library

LINK_TIMEOUT_S = 10.0  # without a sign of life of the other end: its machine may be gone without a word
DEATH_S = 0.2  # from the end of the link to Ray's report, at most; of a node it takes seconds
KILL_S = 0.1  # from a kill to Ray's report
REACHED_S = 5.0  # for a cluster's address to answer
CONNECTED_S = 5.0  # from the end of `join` to the connection's arrival here

log = get_logger("millrace.deploy")


class ActorHost:
    """See `EngineHost`. The link is the fence: once it is closed, nothing of the actor is read."""

    link_timeout_s: float | None = LINK_TIMEOUT_S
    death_s = DEATH_S

    def __init__(self, ray: Any, actor: Any, running: Any, transport: SocketTransport, pid: int) -> None:
        self.transport, self.pid = transport, pid
        self._ray, self._actor = ray, actor
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        running.future().add_done_callback(self._note_end)

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        self._kill()
        self._loop.call_later(KILL_S, self._end, "a kill, as its link had ended")

    def _note_end(self, done: Any) -> None:
        """On a thread of Ray."""
        error = done.exception()
        how = f"exit status {done.result()}" if error is None else how_it_ended(error)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, how)

    def _end(self, how: str) -> None:
        if not self._ended.done():
            self._ended.set_result(how)
            self._kill()  # frees its bundle; of a node that comes back, too

    def _kill(self) -> None:
        with suppress(RuntimeError):  # the loop ends
            self._loop.run_in_executor(None, kill_actor, self._ray, self._actor)  # Ray may have to ask another machine


class RayExecutor:
    """The actors of one fleet, in one placement group with a bundle for each. Call `start`, and in the end `aclose`."""

    def __init__(self, config: EngineConfig, env: Env) -> None:
        self._config, self._env = config, env
        self._environment = environment_for(config.ray_env, os.environ)
        self._ray: Any = None
        self._has_connected = False  # to the cluster, by this executor
        self._group: Any = None
        self._host = ""  # the address of this node, which actors dial
        self.placed: list[str] = []  # the id of each engine's node, when last asked; "": it waits for one
        self.request: PlacementRequest | None = None

    async def start(self) -> None:
        """Connects to the cluster and reserves room for all engines. Raises `ConfigError`."""
        await self._env.run_in_thread(self._reserve)

    def config_for(self, index: int, starting: Sequence[int]) -> EngineConfig:
        """The settings of an engine process. It shares what is free on its node with those that start there, too."""
        assert self.request is not None
        return replace(self.request.config, data_parallel_size=engines_beside(self.placed, index, starting))

    async def look(self) -> None:
        """Asks Ray where the engines are, for `placed`."""
        await self._env.run_in_thread(self._look)

    async def start_host(self, index: int) -> ActorHost:
        """Starts the actor of an engine, in its bundle. Raises `EngineDied`, and OSError."""
        ray, arrived = self._ray, asyncio.get_running_loop().create_future()
        secret = secrets.token_bytes(32)
        listener = TcpListener(self._host, 0, FleetKey(secret), lambda one: _take(arrived, one))
        await listener.start()
        actor = None
        try:
            actor = self._make_actor(index)
            joining = actor.join.remote(*listener.address, secret, LINK_TIMEOUT_S, self._environment)
            pid = await self._joined(joining, index)
            transport = await asyncio.wait_for(arrived, CONNECTED_S)
            host = ActorHost(ray, actor, actor.run.remote(), transport, pid)
            await self.look()
        except BaseException:
            if actor is not None:
                asyncio.get_running_loop().run_in_executor(None, kill_actor, ray, actor)
            if arrived.done() and not arrived.cancelled():
                arrived.result().close()
            raise
        finally:
            await listener.aclose()
        log.info("ray.actor_started", engine=index, pid=pid, node=self.placed[index])
        return host

    async def aclose(self) -> None:
        """Frees the group, and leaves the cluster if this executor has joined it. Idempotent."""
        if self._ray is not None:
            await self._env.run_in_thread(self._leave)

    async def _joined(self, joining: Any, index: int) -> int:
        limit_s = self._config.ray_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return int(await _result(joining))
        except self._ray.exceptions.RayError as error:  # NOTE: the actor's own timeout is a TimeoutError, too
            message = f"the actor of engine {index} did not start: {how_it_ended(error)}"
            if isinstance(error, OSError):
                message += f"; its node must reach this one at {self._host}, at any port"
            raise EngineDied(message) from None
        except TimeoutError:
            needs = f"it needs {self.request}; `ray status` shows what is free"
            raise EngineDied(f"Ray has not started the actor of engine {index} in {limit_s:g} s: {needs}") from None

    def _make_actor(self, index: int) -> Any:
        assert self.request is not None
        strategies = ray_library("ray.util.scheduling_strategies")
        bundle = dict(self.request.bundle)
        in_bundle = strategies.PlacementGroupSchedulingStrategy(self._group, index)
        actor_class = self._ray.remote(EngineActor).options(
            num_cpus=bundle.pop("CPU", 0),
            num_gpus=bundle.pop("GPU", 0),
            memory=bundle.pop("memory", None),
            resources=bundle,
            scheduling_strategy=in_bundle,
            max_restarts=0,
            max_task_retries=0,
        )
        return actor_class.remote()

    # -- in a thread

    def _reserve(self) -> None:
        ray = self._ray = ray_library()
        if not ray.is_initialized():
            self._connect(ray)
        util = ray_library("ray.util")
        self._host = util.get_node_ip_address()
        nodes = self._nodes()
        request = self.request = make_request(self._config, nodes)
        self._group = util.placement_group([dict(request.bundle)] * request.num_engines, strategy=request.strategy)
        if not self._group.wait(self._config.ray_timeout_s):
            limit_s = self._config.ray_timeout_s
            raise ConfigError(no_room(request, self._nodes(), f"has had no room for this in {limit_s:g} s"))
        self._look()
        log.info("ray.placed", asked=str(request), nodes=self.placed)

    def _look(self) -> None:
        table = ray_library("ray.util").placement_group_table(self._group)
        nodes = table.get("bundles_to_node_id", {})
        self.placed = [str(nodes.get(index) or "") for index in range(self._config.data_parallel_size)]

    def _connect(self, ray: Any) -> None:
        address = self._config.ray_address
        try:
            _check_address(address or os.environ.get("RAY_ADDRESS") or "")
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that starts here reports to no one
            ray.init(address=address)
        except (OSError, ValueError, RuntimeError) as error:
            message = f"ray_address = {address}: Ray cannot be joined ({str(error).strip().partition(chr(10))[0]})"
            raise ConfigError(f"{message}; start a cluster with `ray start --head`, or leave ray_address out") from None
        self._has_connected = True

    def _nodes(self) -> list[Resources]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _leave(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            ray_library("ray.util").remove_placement_group(group)  # ends what is left in it
        if self._has_connected:
            self._has_connected = False
            self._ray.shutdown()


def _check_address(address: str) -> None:
    """Raises OSError where nothing listens: Ray itself would ask for a minute, and then end this process."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), REACHED_S).close()


def kill_actor(ray: Any, actor: Any) -> None:
    """Ends an actor for good. Does nothing if Ray is gone or knows it no more."""
    with suppress(Exception):  # of Ray's, which differ by version
        ray.kill(actor, no_restart=True)


def how_it_ended(error: BaseException) -> str:
    """An error of Ray in one line, without the stack of the other process: by its cause there, if it has one."""
    error = getattr(error, "cause", None) or error
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _take(arrived: asyncio.Future[SocketTransport], transport: SocketTransport) -> None:
    if arrived.done():
        transport.close()
    else:
        arrived.set_result(transport)


def _result(reference: Any) -> Awaitable[Any]:
    return asyncio.wrap_future(reference.future())
