"""Checks of the machine: Python, memory, limits, threads, GPU."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ....runtime.env.cpus import ComputeThreads, Cpus
from ....runtime.env.limits import LIMIT_FLAGS, address_space_left
from ....stages.backends.cache_size import free_host_bytes, host_limit, total_host_bytes
from ....stages.config import EngineConfig
from ....stages.loading.native_choice import has_cuda_driver
from ...config import ServerConfig
from .findings import Finding, fail, ok, warn

TESTED = ((3, 11), (3, 13))  # the suite has passed on these versions and those between
LEAST_FREE_BYTES = 1 << 30  # for the libraries, the bundled model and its cache
FEW_FREE_BYTES = 4 << 30
FILES_BESIDE = 128  # that a server has open besides its connections
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_machine(engine: EngineConfig, server: ServerConfig) -> Iterator[Finding]:
    yield _python(sys.version_info[:2])
    yield _system()
    yield _threads(engine)
    yield memory(free_host_bytes(), total_host_bytes())
    if (left := address_space_left()) is not None:
        yield _address_space(left)
    yield huge_pages(_read(HUGE_PAGES))
    yield open_files(server.max_connections, *resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from _gpu(engine)


def _python(version: tuple[int, ...]) -> Finding:
    text = f"{platform.python_version()} ({sys.implementation.name})"
    if TESTED[0] <= version <= TESTED[1]:
        return ok("python", text)
    tested = " to ".join(".".join(map(str, each)) for each in TESTED)
    return warn("python", f"{text}: not tested", f"use Python {tested}")


def _system() -> Finding:
    text = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() == "Linux":
        return ok("system", text)
    return warn("system", f"{text}: the native library and Triton need Linux", "use Linux, or a container")


def _threads(engine: EngineConfig) -> Finding:
    threads = ComputeThreads.choose(engine.threads, Cpus.of_this_process(), os.environ)
    return ok("threads", f"{threads.count} ({threads.reason})")


def memory(free_bytes: int, total_bytes: int) -> Finding:
    """Free memory, by the container's limit if it has one."""
    limit = f", by {named}" if (named := host_limit()) else ""
    text = f"{free_bytes / 2**30:.1f} GiB free of {total_bytes / 2**30:.1f}{limit}"
    if free_bytes < LEAST_FREE_BYTES:
        return fail("memory", text, "free memory: even the bundled model takes about 1 GiB with its libraries")
    if free_bytes < FEW_FREE_BYTES:
        return warn("memory", text, "choose a small or quantized model: --quantization int4, or a GGUF file")
    return ok("memory", text)


def _address_space(left_bytes: int) -> Finding:
    text = f"this process may map {left_bytes / 2**30:.1f} GiB more"
    if left_bytes < LEAST_FREE_BYTES:
        return fail("address space", text, f"raise it with {LIMIT_FLAGS}")
    return warn("address space", text, f"large models need more: raise it with {LIMIT_FLAGS}")


def huge_pages(enabled: str) -> Finding:
    """Transparent huge pages, by the text of the kernel's file: `always [madvise] never`."""
    chosen = enabled.partition("[")[2].partition("]")[0]
    if not chosen:
        return ok("huge pages", "the kernel does not say")
    if chosen == "never":
        step = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return warn("huge pages", "never: weights on a CPU are read through many more page tables", step)
    return ok("huge pages", chosen)


def open_files(max_connections: int, soft: int, hard: int) -> Finding:
    """Files that a server may open, which raises its soft limit to the hard one itself."""
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    text = f"{'unlimited' if most == sys.maxsize else most}"
    if soft != hard:
        text += f" ({soft} before the server raises it)"
    if most < max_connections + FILES_BESIDE:
        step = f"raise it with ulimit -Hn {max_connections + FILES_BESIDE}, or lower --max-connections"
        return warn("open files", f"{text}, for {max_connections} connections", step)
    return ok("open files", text)


def _gpu(engine: EngineConfig) -> Iterator[Finding]:
    if not has_cuda_driver():
        if engine.gpu is not None:
            step = "install NVIDIA's driver; in a container, pass the GPUs through (docker run --gpus all)"
            yield fail("gpu", f"device = {engine.device}: no NVIDIA driver here", step)
        else:
            yield ok("gpu", "none: models run on the CPU")
        return
    if find_spec("torch") is None:
        yield warn("gpu", "an NVIDIA driver is there, but PyTorch is not installed", "pip install torch triton")
        return
    import torch  # only here, as it takes seconds

    if torch.version.cuda is None:
        step = "pip install --force-reinstall torch, without the CPU index"
        yield warn("gpu", f"PyTorch {torch.__version__} is built without CUDA", step)
        return
    if not torch.cuda.is_available():
        step = "check nvidia-smi; the driver may be older than CUDA " + torch.version.cuda
        yield (fail if engine.gpu is not None else warn)("gpu", "the driver shows PyTorch no device", step)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{device.name}, {free / 2**30:.1f} GiB free of {total / 2**30:.1f}"
        text += f", capability {device.major}.{device.minor}"
        if (device.major, device.minor) < (8, 0):
            yield warn(f"gpu {index}", f"{text}: below 8.0", "bfloat16 is slow there; use --dtype float16")
        else:
            yield ok(f"gpu {index}", text)
    if engine.gpu is not None and engine.gpu >= torch.cuda.device_count():
        yield fail("gpu", f"device = {engine.device}: there are {torch.cuda.device_count()}", "choose another --device")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
