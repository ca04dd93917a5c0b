"""The pages of an engine, as probes ask them."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from millrace.deploy.cli.machines.engine import _check_free, _check_ports
from millrace.deploy.cli.machines.engine_pages import EnginePages
from millrace.runtime.processes.tcp import TcpListener
from millrace.stages.errors import ConfigError

PROBE = "/health/ready?fronts="
READY = {"/health": 200, "/health/ready": 200, f"{PROBE}0": 200, "/health/live": 200}
JUNK = {f"{PROBE}{text}": 400 for text in ("", "x", "-1", "1.0", "65")}


@pytest.mark.parametrize(
    ("state", "num_fronts", "statuses"),
    [
        ("ready", 0, READY | JUNK | {f"{PROBE}1": 503, f"{PROBE}2": 503}),
        ("ready", 1, READY | {f"{PROBE}1": 200, f"{PROBE}2": 503}),
        ("ready", 2, READY | {f"{PROBE}1": 200, f"{PROBE}2": 200, f"{PROBE}3": 503}),
        ("draining", 2, JUNK | {"/health": 503, f"{PROBE}1": 503, "/health/live": 200}),
    ],
)
def test_a_probe_may_ask_that_an_engine_has_so_many_fronts_before_it_is_ready(
    state: str, num_fronts: int, statuses: dict[str, int]
) -> None:
    async def main() -> None:
        reason = "" if state == "ready" else "the engine stops once its requests have ended"
        engine = SimpleNamespace(state=state, reason=reason, num_fronts=num_fronts, num_live=0, labels={})
        pages = EnginePages(cast(Any, engine), "127.0.0.1", 0)
        await pages.start()
        try:
            async with aiohttp.ClientSession() as session:
                for path, status in statuses.items():
                    async with session.get(pages.url + path) as answer:
                        body = await answer.json()
                        assert answer.status == status, (path, body)
                        if status == 503:
                            wanted = path.removeprefix(PROBE)
                            few = f"fronts that are connected: {num_fronts}; asked for: {wanted}"
                            named = "waiting" if num_fronts else "alone"
                            expected = (named, few) if state == "ready" else (state, reason)
                            assert (body["status"], body["reason"]) == expected
                        elif status == 400:
                            assert "must be a whole number from 0 to 64" in body["error"]["message"]
        finally:
            await pages.aclose()

    asyncio.run(main())


def test_an_engine_is_loading_until_it_listens_although_it_is_its_own_front_before() -> None:
    async def main() -> None:
        engine = SimpleNamespace(state="ready", reason="", num_fronts=1, num_live=0, labels={})
        pages = EnginePages(cast(Any, engine), "127.0.0.1", 0)
        pages.takes_fronts = False
        await pages.start()
        try:
            async with aiohttp.ClientSession() as session:
                for path in ("/health", "/health/ready?fronts=1"):
                    async with session.get(pages.url + path) as answer:
                        body = await answer.json()
                    told = (answer.status, body["status"], body["reason"])
                    assert told == (503, "loading", "the first requests run")
        finally:
            await pages.aclose()

    asyncio.run(main())


def test_a_taken_port_of_an_engine_is_refused_with_the_process_and_the_flag() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            mine = rf"process {os.getpid()} \(.*\), which is this one,"
            start = rf"^cannot listen on 127\.0\.0\.1:{port}: {mine} listens there; "
            with pytest.raises(ConfigError, match=rf"{start}choose another --listen$"):
                await _check_free(TcpListener("127.0.0.1", port, None, print))
            with pytest.raises(ConfigError, match=rf"{start}choose another --metrics-port$"):
                await EnginePages(cast(Any, None), "127.0.0.1", port).start()

    asyncio.run(main())


def test_options_that_name_one_port_twice_are_refused_before_the_model_is_loaded() -> None:
    said = "^--listen 127.0.0.1:7000 and --metrics-port 7000 name one port; choose another --metrics-port$"
    with pytest.raises(ConfigError, match=said):
        _check_ports(("127.0.0.1", 7000), 7000)
    for port, metrics_port in ((7000, 7001), (7000, None), (0, 0)):
        _check_ports(("127.0.0.1", port), metrics_port)
