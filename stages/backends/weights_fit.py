"""Whether a model fits the memory, computed before its weights are read: weights, packing and the least KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...kernels.layout.kv_layout import KVLayout
from ...model.checkpoint.tensor_shapes import expected_shapes
from ...model.sharding.shard import WHOLE, RankShare, cuts_of
from ...model.spec import DecoderSpec
from ..config import EngineConfig
from ..errors import ConfigError
from ..memory_table import human
from .cache_size import memory_advice

LEAST_TOKENS = 2  # of a sequence, with max_model_len = auto


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFit:
    """The memory that loading a model needs, in bytes, and what is free."""

    name: str  # of the model or file; empty: not told
    device: str
    form: str  # what the weights become, as bfloat16 or int4
    weights: int  # kept
    packing: int = 0  # beside them, while they are packed
    cache: int = 0  # the smallest KV cache with which the engine starts
    free: int
    total: int = 0  # of the device; 0: not told
    num_engines: int = 1  # processes that load the model at the same time, each with as much free
    others: Mapping[str, int] = field(default_factory=dict)  # other forms or files -> what they would keep

    @property
    def needed(self) -> int:
        return self.weights + self.packing + self.cache

    @property
    def fits(self) -> bool:
        return self.needed <= self.free

    def check(self) -> None:
        """Raises `ConfigError` for a model that does not fit; it says which of the others do."""
        if self.fits:
            return
        subject = f"{self.name}: the weights" if self.name else "the weights"
        needs = f"take {human(self.weights)} as {self.form}"
        more = {"packing them": self.packing, "the smallest KV cache": self.cache}
        needs += "".join(f", {what} {human(size)}" for what, size in more.items() if size)
        of_total = f" of {human(self.total)}" if self.total else ""
        of_total += f", for each of {self.num_engines} engines" if self.num_engines > 1 else ""
        ways = ["set max_model_len to auto or less"] if self.weights + self.packing < self.free else self._ways()
        if self.num_engines > 1:
            ways.append(f"lower data_parallel_size = {self.num_engines}")
        ways.append("choose a smaller model, or " + (memory_advice() if self.device == "cpu" else "free memory"))
        raise ConfigError(
            f"{subject} {needs}, and {self.device} has {human(self.free)} free{of_total}: {'; or '.join(ways)}"
        )

    def to_event(self) -> dict[str, Any]:
        """The figures as log fields, with the table."""
        return {
            "form": self.form,
            "weights_bytes": self.weights,
            "packing_bytes": self.packing,
            "least_cache_bytes": self.cache,
            "free_bytes": self.free,
            "table": self.to_text(),
        }

    def to_text(self) -> tuple[str, ...]:
        """A table of what fits: this form, and the others."""
        rest = self.packing + self.cache
        rows = [(f"{self.form} (chosen)", self.weights), *self.others.items()]
        width = max(len(what) for what, _ in rows)
        head = f"{'weights as':<{width}}  {'weights':>10}  {'needed':>10}  of {human(self.free)} free"
        lines = [
            f"{what:<{width}}  {human(size):>10}  {human(size + rest):>10}  {self._verdict(size)}"
            for what, size in rows
        ]
        return (head, *lines)

    def _ways(self) -> list[str]:
        """The others that are smaller, those that fit first."""
        smaller = {what: size for what, size in self.others.items() if size < self.weights}
        fitting = {what: size for what, size in smaller.items() if self._verdict(size) == "fits"}
        if fitting:
            best = max(fitting, key=lambda what: fitting[what])
            return [f"{best} takes {human(fitting[best])} and fits"]
        if not smaller:
            return []
        least = min(smaller, key=lambda what: smaller[what])
        return [f"{least} takes {human(smaller[least])} and does not fit either"]

    def _verdict(self, weights: int) -> str:
        return "fits" if weights + self.packing + self.cache <= self.free else "does not fit"


def bytes_kept(shape: DecoderSpec, item_size: Callable[[str], float], shard: RankShare | None = None) -> int:
    """Bytes of a decoder's weights; `item_size(name)` is the bytes of one number of that tensor.

    `shard`: of the share of one rank.
    """
    cuts = {} if shard is None else cuts_of(shape, shard)
    sizes = {name: cuts.get(name, WHOLE).shape(whole) for name, whole in expected_shapes(shape).items()}
    return int(sum(math.prod(size) * item_size(name) for name, size in sizes.items()))


def least_cache_bytes(
    config: EngineConfig,
    bytes_per_block: int,
    max_model_len: int,
    layout_of: Callable[[int, int], KVLayout | None] = lambda num_bytes, length: None,
) -> int:
    """The KV cache below which the engine does not start: for one sequence of the longest length.

    `layout_of` is that of `CacheSizing`.
    NOTE: 0 where its size is configured. `cache_size` compares that with the memory, and its message names the setting.
    """
    if config.kv_cache_bytes is not None or config.num_gpu_blocks is not None:
        return 0
    length = LEAST_TOKENS if config.max_model_len == "auto" else max_model_len
    whole = -(-length // config.block_size) * bytes_per_block
    layout = layout_of(whole, length)
    return whole if layout is None else min(whole, layout.slabs_of_one(length) * layout.slab_bytes)


def smaller_forms(dtype: str, num_bytes: int, device: str, item_bytes: float) -> dict[str, int]:
    """What other settings would keep of weights that take `num_bytes` in `dtype`."""
    forms = {"dtype = bfloat16": 2.0} if dtype == "float32" else {}
    if device == "cpu":
        forms |= {"quantization = int8": 1.0, "quantization = int4": 0.5625}
    return {what: int(num_bytes * size / item_bytes) for what, size in forms.items() if size < item_bytes}


def check_weights(num_bytes: int, free_bytes: int, device: str, dtype: str, num_engines: int = 1) -> None:
    """Raises `ConfigError` for weights that are larger than the free memory, or than each engine's share of it."""
    others = smaller_forms(dtype, num_bytes, "", 4.0) if dtype == "float32" else {}
    fit = WeightsFit(
        name="",
        device=device,
        form=dtype,
        weights=num_bytes,
        free=free_bytes,
        others=others,
        num_engines=num_engines,
    )
    fit.check()
