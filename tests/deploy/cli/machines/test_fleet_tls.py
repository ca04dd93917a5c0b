"""Fronts and engines that encrypt their links: by the flags, by the documented commands, and with renewed files."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from millrace.deploy.cli.machines.addresses import read_tls, tls_files
from millrace.runtime.processes.auth import FleetKey
from millrace.runtime.processes.tcp import TcpListener, dial
from millrace.runtime.processes.tls import FleetTls, TlsError, TlsFiles
from millrace.stages.errors import ConfigError
from millrace.stages.machines.engine_peers import TcpPeer, look_at
from millrace.stages.machines.engine_sources import FixedAddress
from tests.deploy.cli.machines.test_engine_and_route import IS_FULL, MILLRACE, EngineCommand, text_of
from tests.deploy.running import ROOT, RunningServer
from tests.deploy.test_split import until
from tests.runtime.processes.test_tls import issue
from tests.stages.machines.scripted_engines import ScriptedMachines, answer, expected, states, with_machines
from tests.stages.machines.scripted_engines import until as until_so

KEY = FleetKey(bytes(range(32)))
PROMPT = "Zoe and 1"
PAGE = ROOT / "deploy" / "docs" / "deployment.md"


def test_files_that_lack_another_are_refused_with_the_flags_to_set(tmp_path: Path) -> None:
    assert tls_files(None, None, None) is None and read_tls(None, "dialer") is None
    with pytest.raises(ConfigError, match="^--fleet-tls-key and --fleet-tls-ca: must be set too"):
        tls_files(tmp_path, None, None)
    with pytest.raises(ConfigError, match="^--fleet-tls-cert: must be set too"):
        tls_files(None, tmp_path, tmp_path)
    files = issue(trustme.CA(key_type=trustme.KeyType.ECDSA), tmp_path)
    for file in ("cert", "key", "ca"):
        path = getattr(files, file)
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(ConfigError, match=f"^--fleet-tls-{file} {path}: No such file"):
            read_tls(files, "listener")
        path.write_bytes(data)


def test_requests_go_through_encrypted_links_and_on_with_renewed_files(tmp_path: Path) -> None:
    with_machines(partial(_answer_over_tls, tmp_path))()


async def _answer_over_tls(folder: Path, machines: ScriptedMachines) -> None:
    files = issue(trustme.CA(key_type=trustme.KeyType.ECDSA), folder / "a")
    stranger = issue(trustme.CA(key_type=trustme.KeyType.ECDSA), folder / "b")
    await machines.start("a")
    (server,) = machines.servers.values()
    listener = TcpListener("127.0.0.1", 0, KEY, server.take, tls=FleetTls(files, "listener"))
    await listener.start()
    try:
        wrong = TcpPeer(listener.address, KEY, FleetTls(stranger, "dialer"))
        with pytest.raises(ConfigError, match=r"engine 127.*no authority in .*b/ca\.pem.*--fleet-tls-ca"):
            await look_at(wrong)
        with pytest.raises(ConfigError, match="it speaks TLS and this end does not.*--fleet-tls-cert"):
            await look_at(TcpPeer(listener.address, KEY))
        tls = FleetTls(files, "dialer")
        machines.peer = lambda address: TcpPeer(address, KEY, tls)  # type: ignore[method-assign, assignment, return-value]
        async with machines.front(FixedAddress("a", listener.address)) as engine:
            assert await answer(engine, PROMPT) == expected(PROMPT)
            for name in ("cert", "key", "ca"):
                os.replace(getattr(stranger, name), getattr(files, name))
            assert await answer(engine, PROMPT) == expected(PROMPT), "the link goes on"
            for front in list(server.fronts.values()):
                front.close()
                server.lost(front, "a cut")
            await until_so(lambda: list(states(engine).values()) != ["ready"])
            await until_so(lambda: list(states(engine).values()) == ["ready"])
            assert await answer(engine, PROMPT) == expected(PROMPT)
    finally:
        await listener.aclose()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_the_documented_commands_make_certificates_that_links_take(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```sh\n(openssl req -x509.*?)```", PAGE.read_text(), re.DOTALL)
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
    files = TlsFiles(tmp_path / "engine.pem", tmp_path / "engine.key", tmp_path / "authority.pem")
    listener_tls, dialer_tls = read_tls(files, "listener"), read_tls(files, "dialer")

    async def main() -> None:
        taken: list[Any] = []
        listener = TcpListener("127.0.0.1", 0, KEY, taken.append, tls=listener_tls)
        await listener.start()
        (await dial(*listener.address, KEY, tls=dialer_tls, server_name="10.0.0.5")).close()
        await until_so(lambda: len(taken) == 1)
        with pytest.raises(TlsError, match=r"not valid for '10\.0\.0\.6'"):  # which subjectAltName does not list
            await dial(*listener.address, KEY, tls=dialer_tls, server_name="10.0.0.6")
        taken[0].close()
        await listener.aclose()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_the_commands_speak_tls_and_refuse_who_does_not(tmp_path: Path) -> None:
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    files = issue(authority, tmp_path / "a")
    stranger = issue(trustme.CA(key_type=trustme.KeyType.ECDSA), tmp_path / "b")
    key = tmp_path / "fleet.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)

    def flags(of: TlsFiles) -> list[str]:
        return ["--fleet-tls-cert", str(of.cert), "--fleet-tls-key", str(of.key), "--fleet-tls-ca", str(of.ca)]

    with EngineCommand(key, more=flags(files)) as engine:
        engine.wait_until_ready()
        command = [*MILLRACE, "route", "--port", "0", "--fleet-key-file", str(key), "--engine", engine.address]
        for given, said in (
            ([], "it speaks TLS and this end does not"),
            (flags(stranger), f"no authority in {stranger.ca}"),
            (flags(files)[:2], "--fleet-tls-key and --fleet-tls-ca: must be set too"),
        ):
            with RunningServer(wait=False, command=[*command, *given]) as server:
                assert server.process.wait(60.0) == 3
                assert said in server.errors()
        with RunningServer(command=[*command, *flags(files)]) as server:
            due = text_of(server, 0)
            renewed = issue(authority, tmp_path / "c")
            for name in ("cert", "key", "ca"):
                os.replace(getattr(renewed, name), getattr(files, name))
            with RunningServer(command=[*command, *flags(files), "--front-processes", "2"]) as other:
                assert text_of(other, 0) == due
            assert text_of(server, 0) == due
            engine.process.kill()
            until(lambda: server.get("/health/ready").status == 503)
