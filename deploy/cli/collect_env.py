"""`millrace collect-env`: versions and hardware for a bug report, as one block to paste.

Contains no user name, host name or key, and of the environment only the variables of millrace.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...kernels.native import build, loading
from ...kernels.native.errors import NativeUnavailableError
from ...runtime.env.cpus import ComputeThreads, Cpus
from ...stages.backends.cache_size import free_host_bytes, host_limit, total_host_bytes
from ...stages.config import EngineConfig
from ..config import ServerConfig
from ..http.package_version import DISTRIBUTION
from ..settings.fields import ENV_PREFIX, is_secret

PACKAGES = (
    DISTRIBUTION,
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "llguidance",
    "numpy",
    "aiohttp",
    "anyio",
    "pydantic",
    "orjson",
    "uvloop",
)
AMX_FLAGS = ("amx_tile", "amx_bf16", "amx_int8")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", *AMX_FLAGS, "asimd", "sve", "bf16")


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command."""
    print("\n".join(["```", *report(os.environ), "```"]))
    return 0


def report(environment: Mapping[str, str]) -> Iterator[str]:
    """The lines, `name: value`."""
    yield f"python: {platform.python_version()} ({sys.implementation.name}, {platform.machine()})"
    yield f"system: {_system()}"
    yield f"cpu: {_cpu()}"
    yield f"memory: {_memory()}"
    for name in PACKAGES:
        yield f"{name}: {_version(name)}"
    yield from _native()
    yield from _torch()
    for name in sorted(environment):
        if name.startswith(ENV_PREFIX):
            is_masked = is_secret(name.removeprefix(ENV_PREFIX).lower())
            yield f"{name}: {'***' if is_masked else environment[name]}"


def _system() -> str:
    release = {}
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
    libc = " ".join(platform.libc_ver())
    return ", ".join(part for part in (platform.system(), platform.release(), release.get("PRETTY_NAME"), libc) if part)


def _cpu() -> str:
    fields = _fields(Path("/proc/cpuinfo"))
    model = fields.get("model name", platform.processor() or "unknown")
    flags = fields.get("flags", fields.get("Features", "")).split()
    known = " ".join(flag for flag in CPU_FLAGS if flag in flags) or "no known vector extension"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {usable} of {os.cpu_count()} cores, {known}"


def _memory() -> str:
    total, free = total_host_bytes() / 2**30, free_host_bytes() / 2**30
    limit = host_limit()
    return f"{total:.1f} GiB, {free:.1f} free{f', by {limit}' if limit else ''}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _native() -> Iterator[str]:
    """Threads and instruction set of a model on a CPU."""
    threads = ComputeThreads.choose(None, Cpus.of_this_process(), os.environ)
    yield f"compute threads: {threads.count} ({threads.reason})"
    try:
        name = loading.choose_instruction_set()
    except NativeUnavailableError as error:
        yield f"native step: none: {error}"
        return
    made = (
        "built"
        if build.is_ready(name)
        else f"to be built by {build.find_compiler() or 'a compiler, but none is installed'}"
    )
    yield f"native step: {name}, {made}"


def _torch() -> Iterator[str]:
    try:
        import torch
    except ImportError as error:
        yield f"torch cannot be imported: {error}"
        return
    yield f"torch threads: {torch.get_num_threads()}, best instruction set: {torch.backends.cpu.get_cpu_capability()}"
    yield f"cuda: built for {torch.version.cuda or 'none'}, {torch.cuda.device_count()} devices"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"{device.major}.{device.minor}"
        yield f"gpu {index}: {device.name}, {device.total_memory / 2**30:.1f} GiB, compute capability {capability}"


def _fields(path: Path) -> dict[str, str]:
    """Parses lines `name: value`; the first line of each name counts."""
    fields: dict[str, str] = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
