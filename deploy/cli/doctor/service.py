"""Checks of what is to be served: the model and its parsers, downloads, address, certificate, written folders."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ....model.checkpoint import hub
from ....model.errors import DownloadError, ModelError
from ....runtime.env.writable import folder_problem
from ....stages.config import EngineConfig
from ....stages.errors import ConfigError
from ....stages.loading.preview import preview_model
from ...api.chat_format import check_parsers
from ...config import ServerConfig
from ...http.listening import ListeningSockets
from ...http.tls import tls_context
from .findings import Finding, fail, ok, warn

HUB, HUB_WAIT_S = "huggingface.co", 2.0
FEW_DISK_BYTES = 10 << 30


def check_service(engine: EngineConfig, server: ServerConfig) -> Iterator[Finding]:
    is_here = True
    try:
        preview = preview_model(engine)
    except DownloadError as error:
        is_here = False
        yield from _not_here(engine, error)
    except (ConfigError, ModelError) as error:
        text, _, step = str(error).partition("; ")
        yield fail("model", text, step or "choose another model or setting")
    else:
        fit = preview.fit
        length = f", {preview.max_model_len} tokens of context" if preview.max_model_len else ""
        yield ok("model", f"{preview.model_id} loads: {preview.runs_on}{length}")
        if fit is not None:
            needed, free = fit.needed / 2**30, fit.free / 2**30
            yield ok("model memory", f"{needed:.2f} GiB with the smallest cache, of {free:.1f} GiB free")
    yield from _cache(engine, is_needed=not is_here)
    yield _address(server)
    yield from _server_files(server)
    yield from _folders(server)


def _not_here(engine: EngineConfig, error: DownloadError) -> Iterator[Finding]:
    model = hub.model_name(engine.model)
    text, _, step = str(error).partition("; ")
    if "not in the cache" not in text:
        yield fail("model", text, step or "check the name")
    elif is_offline(engine):
        yield fail(
            "model", f"{model} is not on this machine, and downloads are off", "unset --offline and HF_HUB_OFFLINE"
        )
    else:
        yield warn("model", f"{model} is not on this machine: the first start downloads it", "check its size first")
        yield _hub()


def is_offline(engine: EngineConfig) -> bool:
    """Whether downloads are switched off."""
    return engine.offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _hub() -> Finding:
    """Whether the Hub can be reached, or the mirror and the proxy that the environment names."""
    endpoint = os.environ.get("HF_ENDPOINT") or f"https://{HUB}"
    try:
        host, port = _place(endpoint)
        proxy = None if proxy_bypass(host) else getproxies().get(urlsplit(endpoint).scheme)
        asked, where = host, (host, port)
        if proxy is not None:
            where = _place(proxy if "://" in proxy else f"http://{proxy}")
            asked = f"{host}, by the proxy {where[0]}:{where[1]},"
        socket.create_connection(where, HUB_WAIT_S).close()
    except ValueError as error:
        return fail("hub", f"{error}: must be like https://{HUB}", "correct HF_ENDPOINT or the proxy's variable")
    except OSError as error:
        step = "check network and proxy, or copy the model's folder here; HF_ENDPOINT names a mirror"
        return fail("hub", f"{asked} cannot be reached: {error.strerror or error}", step)
    return ok("hub", f"{asked} answers")


def _place(url: str) -> tuple[str, int]:
    """Host and port of a URL. Raises ValueError."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        pass
    raise ValueError(url)


def _cache(engine: EngineConfig, *, is_needed: bool) -> Iterator[Finding]:
    """The folder of downloads: whether it can be written, and its free space."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(engine.download_dir or HF_HUB_CACHE)
    if is_offline(engine):
        yield ok("downloads", f"off; models are read from {folder}")
        return
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    if not os.access(there, os.W_OK):
        step = "set --download-dir or HF_HOME to a folder of yours"
        yield (fail if is_needed else warn)("downloads", f"{folder} cannot be written", step)
        return
    free = shutil.disk_usage(there).free
    text = f"{folder}, {free / 2**30:.0f} GiB free"
    if free < FEW_DISK_BYTES:
        yield warn("downloads", text, "free some space, or set --download-dir to another disk")
    else:
        yield ok("downloads", text)


def _address(server: ServerConfig) -> Finding:
    where = server.uds or f"{server.host}:{server.port}"
    try:
        ListeningSockets.open(server).close()
    except ConfigError as error:
        text, _, step = str(error).partition("; ")
        return fail("address", text, step or "choose another --port")
    return ok("address", f"{where} is free")


def _server_files(server: ServerConfig) -> Iterator[Finding]:
    """The certificate and the parsers, where they are wrong."""
    for name, check in (("certificate", tls_context), ("parsers", check_parsers)):
        try:
            check(server)
        except ConfigError as error:
            text, _, step = str(error).partition("; ")
            yield fail(name, text, step or "choose another setting")


def _folders(server: ServerConfig) -> Iterator[Finding]:
    for name in ("flight_recorder_dir", "profiler_dir"):
        folder = getattr(server, name)
        if folder is not None and (problem := folder_problem(Path(folder))) is not None:
            yield fail(name, f"{folder} {problem}", "choose another folder")
