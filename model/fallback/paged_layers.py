"""The attention calls of a model's step, and the layer of the cache that each reads and writes.

Shapes: T new tokens, H query heads, G key/value heads, D size of queries and keys, E size of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from ...kernels.kernel_set import KernelSet
from ...kernels.reference.attention_prologue import write_kv
from ..decoder.kv_cache import KVCache
from ..decoder.step_inputs import StepInputs
from ..spec import AttentionSpec
from .attention_interface import AttentionCall
from .errors import UnservableError

CHUNKED, SLIDING = "chunked_attention", "sliding_attention"  # of `layer_types`


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """One attention call of each step: the n-th call is that of the n-th layer."""

    module: nn.Module
    place: int  # layer of the cache
    writes: bool  # False: an earlier call of the step writes the keys and values
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None  # keys a query sees, itself included; None = all
    chunk: int | None  # a query sees only keys of its own chunk of so many positions; None = all

    @property
    def size(self) -> int:
        """Numbers of a head in the cache: the smaller of keys and values is padded."""
        return max(self.key_dim, self.value_dim)


def paged_layers(calls: Sequence[AttentionCall], config: PreTrainedConfig) -> tuple[PagedLayer, ...]:
    """The layers of the calls that one step has made, all of whose tensors are still alive.

    A call with the very keys and values of an earlier one shares its layer of the cache. Windows and chunks are those
    of transformers' cache classes, as not all models pass them to the attention.
    """
    if not calls:
        raise UnservableError("its attention does not go through transformers' attention interface")
    reaches = _reaches(config)
    writers: list[AttentionCall] = []
    layers = []
    for call in calls:
        index = getattr(call.module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(reaches):
            raise UnservableError(f"its {type(call.module).__name__} has no layer_idx that transformers' cache knows")
        place = next((n for n, writer in enumerate(writers) if _shares(call, writer)), None)
        if place is None:
            writers.append(call)
        layers.append(
            PagedLayer(
                module=call.module,
                place=len(writers) - 1 if place is None else place,
                writes=place is None,
                num_heads=call.q.shape[1],
                num_kv_heads=call.k.shape[1],
                key_dim=call.q.shape[2],
                value_dim=call.v.shape[2],
                window=reaches[index][0],
                chunk=reaches[index][1],
            )
        )
    return tuple(layers)


def _shares(call: AttentionCall, writer: AttentionCall) -> bool:
    pairs = ((call.k, writer.k), (call.v, writer.v))
    return all(one.data_ptr() == other.data_ptr() and one.shape == other.shape for one, other in pairs)


def _reaches(config: PreTrainedConfig) -> list[tuple[int | None, int | None]]:
    """The window and the chunk of each layer of transformers' cache."""
    text = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    types = getattr(text, "layer_types", None) or [None] * len(layers)
    reaches: list[tuple[int | None, int | None]] = []
    for index, (layer, kind) in enumerate(zip(layers, types, strict=True)):
        if type(layer) is DynamicSlidingWindowLayer:
            is_chunked = kind == CHUNKED or (kind is None and getattr(text, "sliding_window", None) is None)
            reaches.append((None, layer.sliding_window) if is_chunked else (layer.sliding_window, None))
        elif kind == SLIDING:  # reads the cache of another layer, so that it has none of its own
            reaches.append((text.per_layer_config[index].sliding_window, None))
        else:
            reaches.append((None, None))
    return reaches


def attention_specs(layers: Sequence[PagedLayer]) -> tuple[AttentionSpec, ...]:
    """The attention of each layer of the cache. All have the sizes of the largest, as the cache has one for all."""
    heads, kv_heads = max(layer.num_heads for layer in layers), max(layer.num_kv_heads for layer in layers)
    size = max(layer.size for layer in layers)
    return tuple(
        AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            scale=size**-0.5,
            rope=None,
            window=layer.window,
            chunk=layer.chunk,
        )
        for layer in layers
        if layer.writes
    )


class PagedStep:
    """The attention of one step, on a paged cache: writes new keys and values, and reads those of each sequence."""

    def __init__(
        self, layers: Sequence[PagedLayer], inputs: StepInputs[Tensor], cache: KVCache, kernels: KernelSet
    ) -> None:
        self._layers, self._inputs, self._cache, self._kernels = layers, inputs, cache, kernels
        self._num_calls = 0

    def __call__(self, call: AttentionCall) -> Tensor:
        """The attention of the next layer, [T, H, E]."""
        layer = self._layers[self._num_calls] if self._num_calls < len(self._layers) else None
        if layer is None or layer.module is not call.module:
            raise UnservableError("its layers attend in another order from step to step")
        self._num_calls += 1
        keys, values = (data[:, : layer.num_kv_heads, :, : layer.size] for data in self._cache.layer(layer.place))
        if layer.writes:
            k, v = _padded(call.k, layer.size), _padded(call.v, layer.size)
            write_kv(k, v, keys, values, self._inputs.slot_mapping)
        return self._attend(call, layer, keys, values)[..., : layer.value_dim]

    def finish(self) -> None:
        """Called when the model is through, which must have made all calls."""
        if self._num_calls != len(self._layers):
            raise UnservableError(f"a step makes {self._num_calls} of its {len(self._layers)} attention calls")

    def _attend(self, call: AttentionCall, layer: PagedLayer, keys: Tensor, values: Tensor) -> Tensor:
        inputs, q = self._inputs, _padded(call.q, layer.size).contiguous()
        if inputs.is_decode:
            return self._kernels.paged_decode(
                q,
                keys,
                values,
                inputs.block_tables,
                inputs.lengths,
                call.scale,
                layer.window,
                soft_cap=call.soft_cap,
                sinks=call.sinks,
                chunk=layer.chunk,
            )
        return self._kernels.paged_attention(
            q,
            keys,
            values,
            inputs.block_tables,
            inputs.query_starts,
            inputs.lengths,
            call.scale,
            layer.window,
            soft_cap=call.soft_cap,
            sinks=call.sinks,
            chunk=layer.chunk,
        )


def _padded(heads: Tensor, size: int) -> Tensor:
    """Heads [T, H, D] with zeros behind their numbers: [T, H, size]."""
    return heads if heads.shape[-1] == size else pad(heads, (0, size - heads.shape[-1]))
