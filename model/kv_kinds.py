"""The kinds of memory that a decoder's layers need for keys and values. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable

from ..kernels.layout.kv_layout import KindName, KVKind, KVLayout
from .spec import AttentionSpec, DecoderSpec, LatentSpec

CachedMixer = AttentionSpec | LatentSpec
# Bytes of one block of one layer with this mixer, keys and values, as a backend stores them.
BlockBytes = Callable[[CachedMixer], int]

_Shape = tuple[KindName, int | None, int, int, int, int]  # name, window, heads, key dim, value dim, bytes


def kv_layout(
    spec: DecoderSpec,
    block_size: int,
    num_bytes: int,
    block_bytes: BlockBytes,
    *,
    max_model_len: int | None = None,
    has_kinds: bool = True,
) -> KVLayout:
    """The layout of a cache of `num_bytes`: see `kv_kinds`."""
    kinds = kv_kinds(spec, block_bytes, max_model_len=max_model_len, has_kinds=has_kinds)
    return KVLayout.of(kinds, block_size, num_bytes, _places(spec, kinds))


def kv_kinds(
    spec: DecoderSpec, block_bytes: BlockBytes, *, max_model_len: int | None = None, has_kinds: bool = True
) -> tuple[KVKind, ...]:
    """The kinds of a decoder, kind 0 first: the full kind if it has one, else the one with the largest window.

    A window that no sequence of `max_model_len` tokens exceeds is full, unless layers of other sizes are: of several
    kinds one is full. Without `has_kinds`, of an executor with one
    table a sequence, all layers are of one full kind and windows only mask. A layer that reads another's cache is of no
    kind, and neither is one without keys.
    """
    groups = _groups(spec, block_bytes, max_model_len)
    if sum(shape[1] is None for shape in groups) > 1:
        groups = _groups(spec, block_bytes, None)
    if not has_kinds and groups:
        groups = {_joined(list(groups)): sorted(layer for layers in groups.values() for layer in layers)}
    kinds = [
        KVKind(name, tuple(layers), window, heads, key_dim, value_dim, len(layers) * num_bytes)
        for (name, window, heads, key_dim, value_dim, num_bytes), layers in groups.items()
    ]
    kinds.sort(key=lambda kind: (kind.window is not None, -(kind.window or 0), kind.layers))
    return tuple(kinds)


def _groups(spec: DecoderSpec, block_bytes: BlockBytes, max_model_len: int | None) -> dict[_Shape, list[int]]:
    """The layers that keep keys and values, by shape."""
    groups: dict[_Shape, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        mixer = layer.mixer
        if isinstance(mixer, LatentSpec) or (isinstance(mixer, AttentionSpec) and mixer.kv_of is None):
            groups.setdefault(_shape(mixer, block_bytes(mixer), max_model_len), []).append(index)
    return groups


def _shape(mixer: CachedMixer, num_bytes: int, max_model_len: int | None) -> _Shape:
    if isinstance(mixer, LatentSpec):
        return "latent", None, 1, mixer.kv_rank + mixer.rope_dim, mixer.kv_rank, num_bytes
    sizes = (mixer.num_kv_heads, mixer.head_dim, mixer.value_dim or mixer.head_dim, num_bytes)
    limits: list[tuple[int, KindName]] = []
    if mixer.window is not None:
        limits.append((mixer.window, "window"))
    if mixer.chunk is not None:
        limits.append((mixer.chunk, "chunk"))
    if not limits or (max_model_len is not None and min(limits)[0] >= max_model_len):
        return "full", None, *sizes
    window, name = min(limits)
    return name, window, *sizes


def _joined(shapes: list[_Shape]) -> _Shape:
    """The shape of all layers together, for an executor that treats them alike."""
    sizes = {shape[2:] for shape in shapes}
    if len(sizes) > 1:
        raise ValueError(f"layers have keys and values of {len(sizes)} shapes {sorted(sizes)}, which need kinds")
    return ("latent" if shapes[0][0] == "latent" else "full"), None, *shapes[0][2:]


def _places(spec: DecoderSpec, kinds: tuple[KVKind, ...]) -> list[tuple[int, int] | None]:
    """(kind, place) of each layer, that of its donor for a layer that reads another's cache."""
    own = {layer: (k, i) for k, kind in enumerate(kinds) for i, layer in enumerate(kind.layers)}
    found: list[tuple[int, int] | None] = []
    for index, layer in enumerate(spec.layers):
        donor = layer.mixer.kv_of if isinstance(layer.mixer, AttentionSpec) else None
        found.append(own.get(index if donor is None else donor))
    return found
