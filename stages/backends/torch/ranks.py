"""Tensor and pipeline parallel: starts the ranks beside this process's, rank 0, and joins them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import torch

from ....model.sharding.comm import Comm
from ....model.sharding.layer_split import LayerRange, in_words, why_not_split
from ....model.sharding.rank_grid import RankGrid
from ....model.sharding.shard import why_not_cut
from ....model.spec import DecoderSpec
from ....runtime.env import log as logs
from ....runtime.env.cpus import ComputeThreads
from ....runtime.env.log import get_logger
from ....runtime.processes.order_line import LineEnded, OrderLine
from ....runtime.workers.thread_start import ThreadNotStarted
from ...config import EngineConfig
from ...errors import ConfigError
from ...executor.executor import Executor, StartedRanks
from ...executor.orders import CODEC, FirstSum, JoinRanks, RankSetup
from ...executor.process_executor import ProcessExecutor
from ...executor.thread_executor import ThreadExecutor
from .rank import run_rank, sum_once

RANK_MODULE = "millrace.stages.backends.torch.rank"
FIRST_SUM_S = 120.0  # NCCL connects all GPUs in it

Leader = TypeVar("Leader")

log = get_logger("millrace.stages")


class StartingRanks:
    """The ranks beside rank 0, which load their shares of the model `whole`. Call `join` next, or `close`.

    `ranges`: the layers of the ranks of a pipeline, in order; the last are rank 0's. None: each has all.
    """

    def __init__(
        self,
        config: EngineConfig,
        root: Path,
        whole: DecoderSpec,
        device: torch.device,
        threads: ComputeThreads,
        ranges: Sequence[LayerRange] | None = None,
    ) -> None:
        """Raises `ConfigError`. Call `check_ranks` before."""
        self._config, self._whole, self._device, self._ranges = config, whole, device, ranges
        self._size = config.num_ranks
        self._grid = RankGrid(config.pipeline_parallel_size, config.tensor_parallel_size)
        self._num_threads = max(1, threads.count // self._size)
        try:
            self._started = executor_of(config, self._num_threads).start_ranks(self._size)
        except (OSError, ThreadNotStarted) as error:
            raise ranks_not_started(self._config, error) from None
        try:
            self._line = OrderLine(self._started.members, CODEC, self._started.abort)
        except (OSError, ThreadNotStarted) as error:
            for member in self._started.members:
                member.kill()
            self._started.close()
            raise ranks_not_started(self._config, error) from None
        self._line.on_end += [
            lambda cause: log.error("ranks.ended", cause=cause),
            lambda cause: self._started.unlink(),
        ]
        if device.type == "cpu" and self._started.folder:
            torch.set_num_threads(self._num_threads)
        try:
            self._loading = self._line.send_each(self._setups(root), "the model")
        except LineEnded as error:
            self.close()
            raise ranks_not_started(self._config, error) from None

    def join(self, make_leader: Callable[[OrderLine, StartedRanks, Comm, Comm | None, DecoderSpec], Leader]) -> Leader:
        """Waits until all have loaded, and joins their sums to this process's, rank 0. Raises `ConfigError`."""
        line, started, size = self._line, self._started, self._size
        try:
            line.answers(self._loading)
            joining = line.send(JoinRanks(), "joining")
            comm, shares = line.unless_ended(self._ends)  # for which the backend waits for an hour
            line.answers(joining)
            summing = line.send(FirstSum(), "the first sum")
            line.unless_ended(lambda: sum_once(comm, self._device), FIRST_SUM_S, "the first sum of all ranks")
            line.answers(summing)
        except (LineEnded, RuntimeError, OSError) as error:
            raise ranks_not_started(self._config, error) from None
        if self._device.type == "cpu":  # NOTE: NCCL comes back to the folder with its first sum
            started.unlink()
        threads = self._num_threads if self._device.type == "cpu" else None
        layers = None if self._ranges is None else in_words(self._ranges)
        where = {"device": str(self._device), "threads": threads, "layers": layers}
        log.info("ranks.started", size=size, executor=self._config.executor, **where)
        return make_leader(line, started, comm, shares, self._whole)

    def _ends(self) -> tuple[Comm, Comm | None]:
        comm = self._started.join(self._device)
        return comm, self._grid.shares_of(comm)

    def close(self) -> None:
        """Ends them."""
        self._line.close()
        self._started.close()

    def _setups(self, root: Path) -> list[RankSetup]:
        folder, size, ranges, grid = self._started.folder, self._size, self._ranges, self._grid
        return [
            RankSetup(
                config=self._config,
                root=os.fspath(root),
                rank=rank,
                size=size,
                device=_device_of(self._device, rank),
                num_threads=self._num_threads,
                folder=folder,
                log=logs.settings() if folder else None,
                layers=() if ranges is None else astuple(ranges[grid.range_of(rank)]),
            )
            for rank in range(1, size)
        ]


def ranks_not_started(config: EngineConfig, error: Exception) -> ConfigError:
    """What a start raises for an error of the ranks."""
    return ConfigError(f"{setting_of(config)}: the ranks did not start: {error}")


def setting_of(config: EngineConfig) -> str:
    """The setting that asks for ranks, with its value."""
    names = [name for name in ("pipeline_parallel_size", "tensor_parallel_size") if getattr(config, name) > 1]
    return " with ".join(f"{name} = {getattr(config, name)}" for name in names)


def check_ranks(config: EngineConfig, whole: DecoderSpec, device: torch.device) -> None:
    """Raises `ConfigError` where the model, the settings or the machine do not allow so many ranks."""
    size, setting = config.num_ranks, setting_of(config)
    is_pipeline = config.pipeline_parallel_size > 1
    for name, why_not in (("pipeline_parallel_size", why_not_split), ("tensor_parallel_size", why_not_cut)):
        asked = getattr(config, name)
        if asked > 1 and (reason := why_not(whole, asked)) is not None:
            raise ConfigError(f"{name} = {asked}: {reason}")
    if config.load_format == "stream" or "://" in str(config.model or ""):
        raise ConfigError(f"{setting}: each rank reads the files; download the model first")
    if is_pipeline and device.type == "cuda":
        raise ConfigError(f"{setting}: ranks of layers run on CPUs; use device = cpu, or tensor_parallel_size")
    if is_pipeline and config.kv_cache_dtype == "fp8":
        raise ConfigError(f"{setting}: ranks of layers keep keys and values as dtype; use kv_cache_dtype = auto")
    if device.type == "cuda" and config.executor == "thread":
        raise ConfigError("executor = thread: its ranks share one device, a CPU; use process, or device = cpu")
    if device.type == "cuda":
        last = (device.index or 0) + size - 1
        if last >= torch.cuda.device_count():
            raise ConfigError(
                f"tensor_parallel_size = {size}: the last rank needs cuda:{last}, and torch sees "
                f"{torch.cuda.device_count()} CUDA device(s); use a smaller size, or an earlier first device"
            )


def executor_of(config: EngineConfig, num_threads: int) -> Executor:
    if config.executor == "thread":
        return ThreadExecutor(run_rank)
    return ProcessExecutor(RANK_MODULE, num_threads, is_ordered=config.deterministic)


def _device_of(first: torch.device, rank: int) -> str:
    return f"cuda:{(first.index or 0) + rank}" if first.type == "cuda" else "cpu"


def probe_ranks(line: OrderLine, own: Any) -> Any:
    """Finds out whether a rank is gone, and then what `own` finds out of this process's device."""

    def probe() -> None:
        line.check()
        if own is not None:
            own()

    return probe
