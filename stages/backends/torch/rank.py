"""A rank beside rank 0: loads its share of the model and obeys orders.

As a process it is `python -m` and this module's name, see `executor/process_executor.py`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....kernels import kernel_set
from ....model.checkpoint.tensor_shapes import open_source
from ....model.decoder.decoder import Decoder
from ....model.decoder.kv_cache import KVCache
from ....model.decoder.recurrent import RecurrentStates
from ....model.decoder.step_inputs import StepInputs
from ....model.families.registry import read_spec
from ....model.files import LinkedFolder
from ....model.lora.adapter import Adapter, AdapterSlice
from ....model.sharding.comm import Comm
from ....model.sharding.layer_split import LayerRange
from ....model.sharding.process_comm import ProcessComm
from ....model.sharding.rank_grid import RankGrid
from ....runtime.env import log as logs
from ....runtime.processes.child import end_with_parent, joined
from ....runtime.processes.lasting_starter import end_with_starter
from ....runtime.processes.order_line import OrderReader
from ...executor.orders import (
    CODEC,
    STEP_ARRAYS,
    AdapterPart,
    CopyOrder,
    FirstSum,
    FreeMemory,
    JoinRanks,
    LogitsOrder,
    MakeCache,
    MakeDecoder,
    MakeHostBlocks,
    MeasureScales,
    RankSetup,
    SentTables,
    StepOrder,
    WeightBytes,
)
from ..merged_adapters import merging_of
from .fitted_runner import backend_name, free_bytes
from .kv_dtype import kv_dtype_of, kv_scales_of
from .layer_leader import HIDDEN, receive_hidden
from .share import load_share
from .tilings import tilings_of

Join = Callable[[torch.device], Comm]


class RankWorker:
    """What the rank holds, and how it obeys. `join` is its end of the sums; None: that of a process."""

    def __init__(self, join: Join | None = None) -> None:
        self._join = join
        self._join_on: Callable[[], Comm] | None = None  # the same, on the rank's device
        self._device = torch.device("cpu")
        self._grid = RankGrid(1, 1)
        self._comm: Comm | None = None
        self._shares: Comm | None = None  # with the ranks that share its layers
        self._layers: LayerRange | None = None  # of a rank of a pipeline
        self._make: Callable[..., Decoder] | None = None
        self._decoder: Decoder | None = None
        self._scales: torch.Tensor | None = None  # of an fp8 cache
        self._cache: KVCache | None = None
        self._tables = SentTables()
        self._host_blocks: torch.Tensor | None = None
        self._host_states: torch.Tensor | None = None
        self._adapter: dict[Any, tuple[AdapterSlice, ...]] = {}  # what has come of the next one

    def run(self, sock: socket.socket) -> None:
        """Obeys until the line ends, or an order fails."""
        reader = OrderReader(sock, CODEC)
        while (order := reader.next()) is not None:
            try:
                value = self.obey(order)
            except Exception as error:
                text = next(iter(str(error).splitlines()), "")
                return reader.fail(f"{type(error).__name__}: {text}")
            log = None if self._comm is None else self._comm.log
            reader.answer(0 if log is None else log.number, "nothing" if log is None else log.last, value)

    @torch.inference_mode()
    def obey(self, order: Any) -> Any:
        """Does what an order says, and returns the value of the answer."""
        match order:
            case StepOrder():
                return self._step(order)
            case LogitsOrder():
                return self._logits(order)
            case CopyOrder():
                return self._copy(order)
            case AdapterPart():
                return self._take(order)
            case RankSetup():
                return self._load(order)
            case MakeDecoder():
                assert self._make is not None
                self._decoder = self._make(max_positions=order.max_positions, comm=self._shares)
            case JoinRanks():
                assert self._join_on is not None
                self._comm = self._join_on()
                self._shares = self._grid.shares_of(self._comm)
            case MeasureScales():
                self._scales = kv_scales_of(self._config, self._decoder)
            case FirstSum():
                assert self._comm is not None
                sum_once(self._comm, self._device)
            case MakeCache():
                self._make_cache(order)
            case MakeHostBlocks():
                assert self._cache is not None
                self._host_blocks = self._cache.make_host_blocks(order.num_blocks)
            case WeightBytes():
                assert self._decoder is not None
                return self._decoder.weights_bytes()
            case FreeMemory():
                assert self._decoder is not None
                self._cache = None  # of a step that was measured
                if self._decoder.device.type == "cuda":
                    torch.cuda.empty_cache()
                return free_bytes(self._config, self._decoder.device)
            case _:
                raise TypeError(f"{type(order).__name__} is no order")

    def _load(self, setup: RankSetup) -> None:
        if setup.log is not None:
            logs.configure(**setup.log)
        config = self._config = setup.config
        device = self._device = torch.device(setup.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        elif setup.folder:  # a process; threads share rank 0's
            torch.set_num_threads(setup.num_threads)
        grid = self._grid = RankGrid(config.pipeline_parallel_size, config.tensor_parallel_size)
        join = partial(ProcessComm, Path(setup.folder), setup.rank, grid.size, is_ordered=config.deterministic)
        self._join_on = partial(self._join or (lambda own: join(device=own)), device)
        root: Path = LinkedFolder(setup.root) if config.allow_links_outside else Path(setup.root)
        _, whole = open_source(root, read_spec(root), config.load_format, merging_of(config))
        kernels = kernel_set.load(backend_name(config, device, whole))
        self._layers = LayerRange(*setup.layers) if setup.layers else None
        share = grid.share_of(setup.rank)
        spec, parts, options = load_share(config, root, whole, share, device, kernels, None, self._layers)
        tilings = tilings_of(config, device, kernels.name)
        self._make = partial(Decoder, spec, *parts, tilings=tilings, **options)

    def _make_cache(self, order: MakeCache) -> None:
        decoder = self._decoder
        assert decoder is not None
        self._cache = self._host_blocks = None  # first, so that its memory is there for the new one
        states = None
        if order.states is not None:
            states = RecurrentStates(decoder.spec, order.states, decoder.dtype, decoder.device, decoder.kernels)
            self._host_states = states.make_host_states()
        self._cache = KVCache(
            decoder.spec,
            order.num_blocks,
            self._config.block_size,
            kv_dtype_of(self._config, decoder.dtype),
            decoder.device,
            decoder.kernels,
            self._scales,
            is_block_major=order.is_block_major,
            states=states,
        )

    def _step(self, order: StepOrder) -> None:
        decoder, cache = self._decoder, self._cache
        assert decoder is not None and cache is not None
        if decoder.adapters is not None:
            decoder.adapters.begin_step(order.adapters)
        arrays: dict[str, Any] = {
            name: torch.tensor(getattr(order, name), device=decoder.device) for name in STEP_ARRAYS
        }
        tables = torch.tensor(self._tables.apply(order.block_tables), device=decoder.device)
        slots = None if order.slots is None else torch.tensor(order.slots, device=decoder.device)
        inputs = StepInputs(**arrays, block_tables=tables, num_decode=order.num_decode, slots=slots)
        if self._layers is not None:
            self._pass_on(decoder, inputs, cache, self._layers)
        elif order.has_logits:
            decoder.forward(inputs, cache)
        else:
            decoder.hidden(inputs, cache)

    def _pass_on(self, decoder: Decoder, inputs: StepInputs[Any], cache: KVCache, layers: LayerRange) -> None:
        """Computes the rank's layers between those of the ranks before and behind it."""
        comm = self._comm
        assert comm is not None
        entering = None if layers.is_first else receive_hidden(comm, decoder, len(inputs.input_ids), self._grid)
        hidden = decoder.hidden(inputs, cache, entering)
        if layers.is_first:
            comm.log.note(HIDDEN, hidden)
        if not layers.is_last:
            comm.send(hidden, self._grid.behind(comm.rank))

    def _logits(self, order: LogitsOrder) -> None:
        decoder = self._decoder
        assert decoder is not None and decoder.comm is not None
        hidden = torch.empty(order.num_rows, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
        decoder.logits(decoder.comm.broadcast(hidden))

    def _copy(self, order: CopyOrder) -> None:
        assert self._cache is not None
        sources, destinations = order.sources.copy(), order.destinations.copy()  # torch wants arrays to write to
        if order.is_states:
            return self._copy_states(order.kind, sources, destinations)
        if order.kind == "fork":
            return self._cache.copy_blocks(sources, destinations)
        assert self._host_blocks is not None
        if order.kind == "out":
            return self._cache.copy_out(sources, self._host_blocks, destinations)
        self._cache.copy_in(self._host_blocks, sources, destinations)

    def _copy_states(self, kind: str, sources: Any, destinations: Any) -> None:
        assert self._cache is not None and self._cache.states is not None
        states = self._cache.states
        if kind == "fork":
            return states.copy(sources, destinations)
        assert self._host_states is not None
        if kind == "out":
            return states.copy_out(sources, self._host_states, destinations)
        states.copy_in(self._host_states, sources, destinations)

    def _take(self, part: AdapterPart) -> None:
        if part.linear:
            slices = tuple(AdapterSlice(row_start, a.copy(), b.copy()) for row_start, a, b in part.slices)
            if slices:
                self._adapter[part.layer, part.linear] = slices
            return
        assert self._decoder is not None and self._decoder.adapters is not None
        linears, self._adapter = self._adapter, {}
        self._decoder.adapters.load(part.slot, Adapter(part.name, None, part.dtype, linears))


def sum_once(comm: Comm, device: torch.device) -> None:
    """Adds up a number of all ranks, and waits for it. NCCL connects them then."""
    if float(comm.sum(torch.ones(1, device=device))) != comm.size:
        raise RuntimeError(f"the first sum of {comm.size} ranks is wrong")


def run_rank(sock: socket.socket, join: Join) -> None:
    """A rank as a thread."""
    RankWorker(join).run(sock)


def main(arguments: Sequence[str]) -> int:
    """The entry point of the process. Returns its exit code."""
    end_with_starter()
    sock, _ = joined(arguments)
    end_with_parent(sock)
    RankWorker().run(sock)
    logs.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
