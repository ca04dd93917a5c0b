"""Decoders with recurrent layers in float64 numpy, by the definition, and random weights for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from millrace.kernels.native.shape import NativeRecurrent
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_weights import Array, round_to_bfloat16


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


class RecurrentCheckpoint(Checkpoint):
    """As `Checkpoint`; layers may be recurrent, without a mixer, or have gates of attention's output."""

    @classmethod
    def random(cls, layers: tuple[dict[str, Any], ...] = (), has_bias: bool = False, **sizes: Any) -> Any:
        """`layers`: fields of each `NativeLayer`, besides those that all have."""
        base = Checkpoint.random(has_bias=has_bias, num_layers=len(layers), **sizes)
        each = tuple(replace(layer, **fields) for layer, fields in zip(base.shape.layers, layers, strict=True))
        draw, hidden, tensors = np.random.default_rng(5), base.shape.hidden_size, dict(base.tensors)

        def put(name: str, *sizes: int, mean: float = 0.0, scale: float = 0.1) -> None:
            tensors[name] = round_to_bfloat16((mean + scale * draw.standard_normal(sizes)).astype(np.float32))

        def put_product(name: str, rows: int, columns: int) -> None:
            put(f"{name}.weight", rows, columns, scale=columns**-0.5)
            if has_bias:
                put(f"{name}.bias", rows)

        for index, layer in enumerate(each):
            prefix = f"model.layers.{index}"
            if layer.recurrent is not None or not layer.has_mixer:
                for name in [name for name in tensors if name.startswith(f"{prefix}.self_attn.")]:
                    del tensors[name]
            if not layer.intermediate_size:
                for name in [name for name in tensors if name.startswith(f"{prefix}.mlp.")]:
                    del tensors[name]
            if layer.has_output_gate:
                put_product(f"{prefix}.self_attn.gate_proj", base.shape.num_heads * base.shape.head_dim, hidden)
            if layer.recurrent is not None:
                its, prefix = layer.recurrent, f"{prefix}.recurrent"
                for name, rows in _projections(its).items():
                    put_product(f"{prefix}.{name}_proj", rows, hidden)
                put_product(f"{prefix}.out_proj", hidden, its.inner_size)
                put(f"{prefix}.conv.weight", _channels(its), its.conv_width, scale=0.5)
                if has_bias:
                    put(f"{prefix}.conv.bias", _channels(its))
                if its.kind != "short_conv":
                    put(f"{prefix}.decay", its.num_value_heads, mean=-0.7)
                    put(f"{prefix}.step_offset", its.num_value_heads, scale=0.5)
                if its.kind == "mamba2":
                    put(f"{prefix}.skip", its.num_value_heads, mean=1.0)
                if its.norm is not None:
                    put(f"{prefix}.norm.weight", its.inner_size if its.norm_group else its.value_dim, mean=1.0)
        shape = replace(base.shape, layers=each)
        return cls(shape, tensors, base.ropes, base.num_positions)

    def _mix(self, index: int, x: Array, kept: Any) -> Array:
        layer, prefix = self.shape.layers[index], f"model.layers.{index}"
        if not layer.has_mixer:
            return np.zeros_like(x)
        if layer.recurrent is None:
            return super()._mix(index, x, kept)
        prefix = f"{prefix}.recurrent"
        joined = {name: self._linear(x, f"{prefix}.{name}_proj") for name in _projections(layer.recurrent)}
        return self._linear(self._recur(layer.recurrent, prefix, joined), f"{prefix}.out_proj")

    def _attention(self, index: int, x: Array, kept: Any) -> Array:
        seen, layer = super()._attention(index, x, kept), self.shape.layers[index]
        if layer.has_output_gate:
            seen = seen * sigmoid(self._linear(x, f"model.layers.{index}.self_attn.gate_proj"))
        return seen

    def _recur(self, its: NativeRecurrent, prefix: str, joined: dict[str, Array]) -> Array:
        """From the products into a layer to what the product out of it reads, [T, inner]."""
        if its.kind == "short_conv":
            before, after, x = np.split(joined["in"], 3, -1)
            return after * self._convolve(prefix, before * x)
        count, keys, inner = len(joined["in"]), its.num_key_heads * its.key_dim, its.inner_size
        mixed = silu(self._convolve(prefix, joined["in"]))
        cuts = [keys, 2 * keys] if its.kind == "gdn" else [inner, inner + keys]
        parts = np.split(mixed, cuts, -1)
        q, k, v = parts if its.kind == "gdn" else reversed(parts)
        each = its.num_value_heads // its.num_key_heads
        q, k = (np.repeat(one.reshape(count, -1, its.key_dim), each, axis=1) for one in (q, k))
        v = v.reshape(count, -1, its.value_dim)
        step = np.logaddexp(0, joined["step"] + self._get(f"{prefix}.step_offset"))  # [T, H]
        if its.kind == "mamba2":
            step = np.clip(step, *its.step_limit)
        else:
            q, k = (one / np.sqrt((one * one).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
            q = q * its.key_dim**-0.5
        decay = np.exp(step * self._get(f"{prefix}.decay"))
        state, out = np.zeros((its.num_value_heads, its.key_dim, its.value_dim)), np.empty_like(v)
        for t in range(count):
            state = state * decay[t, :, None, None]
            if its.kind == "gdn":
                added = sigmoid(joined["rate"][t])[:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            else:
                added = step[t, :, None] * v[t]
            state = state + k[t][:, :, None] * added[:, None]
            out[t] = np.einsum("hk,hkv->hv", q[t], state)
            if its.kind == "mamba2":
                out[t] += self._get(f"{prefix}.skip")[:, None] * v[t]
        gate, is_gated_first = silu(joined["gate"]), its.kind == "mamba2" or its.norm is None
        out = out.reshape(count, inner) * (gate if is_gated_first else 1)
        if its.norm is not None:
            weight = np.resize(self._get(f"{prefix}.norm.weight"), inner)
            parts = out.reshape(count, -1, its.norm_group or its.value_dim)
            parts = parts / np.sqrt((parts * parts).mean(-1, keepdims=True) + its.norm.eps)
            out = parts.reshape(count, inner) * weight
        return out if is_gated_first else out * gate

    def _convolve(self, prefix: str, x: Array) -> Array:
        taps, bias = self._get(f"{prefix}.conv.weight"), self.tensors.get(f"{prefix}.conv.bias")
        width = taps.shape[1]
        wide = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
        out = sum(wide[tap : tap + len(x)] * taps[:, tap] for tap in range(width))
        return np.asarray(out) if bias is None else out + bias


def _channels(its: NativeRecurrent) -> int:
    return 2 * its.num_key_heads * its.key_dim + its.inner_size


def _projections(its: NativeRecurrent) -> dict[str, int]:
    """The products into a layer -> their rows."""
    if its.kind == "short_conv":
        return {"in": 3 * its.inner_size}
    rows = {"gate": its.inner_size, "in": _channels(its), "step": its.num_value_heads, "rate": its.num_value_heads}
    return {name: rows[name] for name in its.matrices}
