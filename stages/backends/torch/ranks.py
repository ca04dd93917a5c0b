"""Tensor parallel: starts the ranks beside this process's, rank 0, and leads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ....model.sharding.shard import why_not_cut
from ....model.spec import DecoderSpec
from ....runtime.env import log as logs
from ....runtime.env.cpus import ComputeThreads
from ....runtime.env.log import get_logger
from ....runtime.processes.order_line import LineEnded, OrderLine
from ....runtime.workers.thread_start import ThreadNotStarted
from ...config import EngineConfig
from ...errors import ConfigError
from ...executor.executor import Executor
from ...executor.orders import CODEC, RankSetup
from ...executor.process_executor import ProcessExecutor
from ...executor.thread_executor import ThreadExecutor
from .leading import RankLeader
from .rank import run_rank

RANK_MODULE = "millrace.stages.backends.torch.rank"

log = get_logger("millrace.stages")


def start_ranks(
    config: EngineConfig, root: Path, whole: DecoderSpec, device: torch.device, threads: ComputeThreads
) -> tuple[RankLeader, int]:
    """Starts the other ranks, which load their shares meanwhile, and joins them.

    Returns their leader, and the number of the order to wait for by `leader.loaded`. Raises `ConfigError`.
    """
    size = config.tensor_parallel_size
    check_ranks(config, whole, device)
    num_threads = max(1, threads.count // size)
    started = _executor(config, num_threads).start_ranks(size)
    line = OrderLine(started.members, CODEC, started.abort)
    line.on_end += [lambda cause: log.error("ranks.ended", cause=cause), lambda cause: started.unlink()]
    try:
        number = line.send_each(
            [
                RankSetup(
                    config=config,
                    root=os.fspath(root),
                    rank=rank,
                    size=size,
                    device=_device_of(device, rank),
                    num_threads=num_threads,
                    folder=started.folder,
                    log=logs.settings() if started.folder else None,
                )
                for rank in range(1, size)
            ],
            "the model",
        )
        if device.type == "cpu" and started.folder:
            torch.set_num_threads(num_threads)
        comm = started.join(device)
    except (LineEnded, RuntimeError, OSError, ThreadNotStarted) as error:
        line.close()
        started.close()
        raise ConfigError(f"tensor_parallel_size = {size}: the ranks did not start: {line.cause or error}") from None
    log.info("ranks.started", size=size, executor=config.executor, device=str(device), threads=num_threads)
    return RankLeader(line, started, comm, whole, device), number


def check_ranks(config: EngineConfig, whole: DecoderSpec, device: torch.device) -> None:
    """Raises `ConfigError` where the model, the settings or the machine do not allow so many ranks."""
    size = config.tensor_parallel_size
    if (reason := why_not_cut(whole, size)) is not None:
        raise ConfigError(f"tensor_parallel_size = {size}: {reason}")
    if config.load_format == "stream" or "://" in str(config.model or ""):
        raise ConfigError(f"tensor_parallel_size = {size}: each rank reads the files; download the model first")
    if device.type == "cuda":
        last = (device.index or 0) + size - 1
        if last >= torch.cuda.device_count():
            raise ConfigError(
                f"tensor_parallel_size = {size}: the last rank needs cuda:{last}, and torch sees "
                f"{torch.cuda.device_count()} CUDA device(s); use a smaller size, or an earlier first device"
            )


def _executor(config: EngineConfig, num_threads: int) -> Executor:
    if config.executor == "thread":
        return ThreadExecutor(run_rank)
    return ProcessExecutor(RANK_MODULE, num_threads)


def _device_of(first: torch.device, rank: int) -> str:
    return f"cuda:{(first.index or 0) + rank}" if first.type == "cuda" else "cpu"


def probe_ranks(leader: RankLeader, own: Any) -> Any:
    """Finds out whether a rank is gone, and then what `own` finds out of this process's device."""

    def probe() -> None:
        leader.line.check()
        if own is not None:
            own()

    return probe
