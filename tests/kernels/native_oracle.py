"""A decoder in float64 numpy, by the definition, and random weights for it: what the native step is held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, NativeShape

Array = NDArray[Any]

SMALL: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 72,
    "rotary_dim": 32,
    "rms_norm_eps": 1e-5,
    "sliding_windows": (None, None),
    "is_tied": True,
}


@dataclass
class Checkpoint:
    """Random weights by the names checkpoints give them, as bfloat16 holds them, in float32."""

    shape: NativeShape
    tensors: dict[str, Array]
    cos: Array
    sin: Array
    has_int8_cache: bool = False

    @classmethod
    def random(
        cls, has_bias: bool = False, has_qk_norm: bool = False, num_positions: int = 1200, seed: int = 0, **sizes: Any
    ) -> Checkpoint:
        shape = NativeShape(**{**SMALL, **sizes})
        draw = np.random.default_rng(seed)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        rows = {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads)}
        tensors: dict[str, Array] = {}

        def put(name: str, *sizes: int, mean: float = 0.0, scale: float = 0.1) -> None:
            tensors[name] = round_to_bfloat16((mean + scale * draw.standard_normal(sizes)).astype(np.float32))

        put("model.embed_tokens.weight", shape.vocab_size, hidden, scale=1.0)
        if not shape.is_tied:
            put("lm_head.weight", shape.vocab_size, hidden)
        put("model.norm.weight", hidden, mean=1.0)
        for layer in range(shape.num_layers):
            prefix = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                put(f"{prefix}.{norm}.weight", hidden, mean=1.0)
            for name, size in rows.items():
                put(f"{prefix}.self_attn.{name}_proj.weight", *size)
                if has_bias:
                    put(f"{prefix}.self_attn.{name}_proj.bias", size[0])
            for name, size in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
                put(f"{prefix}.mlp.{name}_proj.weight", *size)
                if has_bias:
                    put(f"{prefix}.mlp.{name}_proj.bias", size[0])
            if has_qk_norm:
                put(f"{prefix}.self_attn.q_norm.weight", shape.head_dim, mean=1.0)
                put(f"{prefix}.self_attn.k_norm.weight", shape.head_dim, mean=1.0)
        angles = np.arange(num_positions)[:, None] / 1000.0 ** (np.arange(0, shape.rotary_dim, 2) / shape.rotary_dim)
        return cls(shape, tensors, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    def load(self, dtype: DType = "float32", **settings: Any) -> NativeModel:
        """Into the library. All threads share each phase of a step but its first, however busy the machine is, and the
        cache is taken to keep what makes steps fetch a layer ahead and two threads share rows, whatever it does. No
        step's rows are taken apart."""
        model = NativeModel(self.shape, dtype, self.cos, self.sin, **settings)
        for name, tensor in self.tensors.items():
            model.set_tensor(name, tensor)
        model._library.millrace_set_join_delay(model._model, 0)
        model.assume_retained(16 << 20)
        model.assume_split(False)
        return model

    def kept_by(self, model: NativeModel) -> Checkpoint:
        """The checkpoint whose numbers are those the model computes with."""
        kept = {
            name: model.matrix(name, *tensor.shape) if model.type_of(name) in ("int8", "int4") else tensor
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=kept, has_int8_cache=model.cache_dtype == "int8")

    def logits(self, token_ids: list[int]) -> Array:
        """[T, V] float64, of every token of one sequence."""
        shape, eps = self.shape, self.shape.rms_norm_eps
        residual = self._get("model.embed_tokens.weight")[token_ids]
        for layer in range(shape.num_layers):
            prefix = f"model.layers.{layer}"
            x = _norm(residual, self._get(f"{prefix}.input_layernorm.weight"), eps)
            residual = residual + self._linear(self._attention(layer, x), f"{prefix}.self_attn.o_proj")
            x = _norm(residual, self._get(f"{prefix}.post_attention_layernorm.weight"), eps)
            gate, up = (self._linear(x, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
            residual = residual + self._linear(gate / (1 + np.exp(-gate)) * up, f"{prefix}.mlp.down_proj")
        x = _norm(residual, self._get("model.norm.weight"), eps)
        return x @ self._get("model.embed_tokens.weight" if shape.is_tied else "lm_head.weight").T

    def _attention(self, layer: int, x: Array) -> Array:
        shape, prefix, count = self.shape, f"model.layers.{layer}.self_attn", len(x)
        q, k, v = (
            self._linear(x, f"{prefix}.{name}_proj").reshape(count, -1, shape.head_dim).transpose(1, 0, 2)
            for name in ("q", "k", "v")
        )  # [heads, T, D]
        if f"{prefix}.q_norm.weight" in self.tensors:
            q = _norm(q, self._get(f"{prefix}.q_norm.weight"), shape.rms_norm_eps)
            k = _norm(k, self._get(f"{prefix}.k_norm.weight"), shape.rms_norm_eps)
        q, k = self._rotate(q), self._rotate(k)
        if self.has_int8_cache:
            k, v = in_int8(k), in_int8(v)
        k, v = (np.repeat(part, shape.num_heads // shape.num_kv_heads, axis=0) for part in (k, v))
        scores = q @ k.transpose(0, 2, 1) / shape.head_dim**0.5
        age = np.arange(count)[:, None] - np.arange(count)
        window = shape.sliding_windows[layer] or count
        weights = np.exp(np.where((age >= 0) & (age < window), scores, -np.inf))
        seen = weights / weights.sum(-1, keepdims=True) @ v
        return seen.transpose(1, 0, 2).reshape(count, -1)

    def _rotate(self, x: Array) -> Array:
        half = self.shape.rotary_dim // 2
        cos, sin = self.cos[: x.shape[1]].astype(np.float64), self.sin[: x.shape[1]].astype(np.float64)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def _linear(self, x: Array, name: str) -> Array:
        product = x @ self._get(f"{name}.weight").T
        bias = self.tensors.get(f"{name}.bias")
        return product if bias is None else product + bias

    def _get(self, name: str) -> Array:
        return self.tensors[name].astype(np.float64)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def round_to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest numbers that bfloat16 holds, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def in_int8(x: Array) -> Array:
    """The nearest multiples of each row's scale: its largest number over 127, rounded up to what bfloat16 holds."""
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float32)
    bits = (largest / np.float32(127)).view(np.uint32)
    scale = ((bits + 0xFFFF) & 0xFFFF0000).view(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return np.rint(x * inverse.astype(x.dtype)) * scale


@dataclass
class Run:
    """Sequences driven through a model step by step, in blocks that lie in no order, all logits kept."""

    model: NativeModel
    block_size: int = 16
    num_blocks: int = 0
    poison: float | None = None  # what all of the cache holds at first
    cache: NativeCache = field(init=False)
    _free: list[int] = field(init=False)
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)
    logits: dict[int, list[Array]] = field(default_factory=dict)  # by sequence, [V] of each token

    def __post_init__(self) -> None:
        count = self.num_blocks or 4096 // self.block_size
        self.cache = NativeCache(self.model.shape, count, self.block_size, self.model.cache_dtype)
        self._free = np.random.default_rng(3).permutation(count).tolist()
        if self.poison is not None:
            bits = np.float32(self.poison).view(np.uint32) >> 16
            data = self.cache.data if self.cache.dtype == "float32" else self.cache.data.view(np.uint16)
            data[:] = self.poison if self.cache.dtype == "float32" else bits  # in int8: as scales

    def step(self, parts: dict[int, list[int]], asked: dict[int, list[int]] | None = None) -> dict[int, Array]:
        """One step: for each sequence its next tokens. Logits [n, V] of those of them that are asked for, by their
        numbers among these; of all, which are kept, by default."""
        positions, slots, starts = [], [], [0]
        for sequence, token_ids in parts.items():
            table, start = self._tables.setdefault(sequence, []), self._lengths.get(sequence, 0)
            end = self._lengths[sequence] = start + len(token_ids)
            while len(table) * self.block_size < end:
                table.append(self._free.pop())
            places = np.arange(start, end)
            positions.append(places)
            slots.append(np.array(table)[places // self.block_size] * self.block_size + places % self.block_size)
            starts.append(starts[-1] + len(token_ids))
        tables = np.zeros((len(parts), max(len(self._tables[s]) for s in parts)), np.int32)
        for row, sequence in enumerate(parts):
            tables[row, : len(self._tables[sequence])] = self._tables[sequence]
        begins = dict(zip(parts, starts, strict=False))
        wanted = asked or {sequence: list(range(len(token_ids))) for sequence, token_ids in parts.items()}
        rows = np.array([begins[sequence] + i for sequence, numbers in wanted.items() for i in numbers], np.int64)
        logits = np.empty((len(rows), self.model.shape.vocab_size), np.float32)
        self.model.step(
            self.cache,
            input_ids=np.concatenate([np.array(ids, np.int64) for ids in parts.values()]),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots).astype(np.int64),
            block_tables=tables,
            query_starts=np.array(starts, np.int32),
            lengths=np.array([self._lengths[sequence] for sequence in parts], np.int32),
            logits_rows=rows,
            logits=logits,
        )
        ends = np.cumsum([len(numbers) for numbers in wanted.values()])[:-1]
        given = dict(zip(wanted, np.split(logits, ends), strict=True))
        for sequence in parts if asked is None else ():
            self.logits.setdefault(sequence, []).extend(given[sequence])
        return given

    def whole(self, token_ids: list[int], chunks: Iterable[int] = ()) -> Array:
        """[T, V], of one sequence alone, in chunks of these sizes and then the rest."""
        sequence = len(self._tables)
        rest = list(token_ids)
        for size in chunks:
            if rest[:size]:
                self.step({sequence: rest[:size]})
                rest = rest[size:]
        if rest:
            self.step({sequence: rest})
        return np.array(self.logits[sequence])
