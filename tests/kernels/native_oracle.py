"""A decoder in float64 numpy, by the definition: what the native step is held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, NativeExperts, NativeLayer, NativeNorm, NativeShape
from millrace.kernels.reference.experts import route
from tests.kernels.native_weights import (
    LATENT_NORM,
    WEIGHT_OPTIONS,
    Array,
    network_of,
    norms_of,
    random_tensors,
    small_shape,
)


@dataclass
class Checkpoint:
    """Random weights by the names checkpoints give them, as bfloat16 holds them, in float32."""

    shape: NativeShape
    tensors: dict[str, Array]
    ropes: list[tuple[Array, Array]]  # cos and sin [P, rotary_dim / 2] of each table
    num_positions: int
    has_int8_cache: bool = False

    @classmethod
    def random(cls, num_positions: int = 1200, seed: int = 0, **options: Any) -> Checkpoint:
        """`options`: those of `random_tensors`, and sizes as in `small_shape`, or a shape."""
        of_tensors = {name: options.pop(name) for name in WEIGHT_OPTIONS if name in options}
        shape = options.pop("shape", None) or small_shape(**options)
        tensors = random_tensors(shape, seed=seed, **of_tensors)
        return cls(
            shape, tensors, [_rope(dim, num_positions, i) for i, dim in enumerate(shape.rotary_dims)], num_positions
        )

    def load(self, dtype: DType = "float32", **settings: Any) -> NativeModel:
        """Into the library. All threads share each phase of a step but its first, however busy the machine is, and the
        cache is taken to keep what makes steps fetch a layer ahead and two threads share rows, whatever it does. No
        step's rows are taken apart."""
        model = NativeModel(self.shape, dtype, self.ropes, self.num_positions, **settings)
        for name, tensor in self.tensors.items():
            model.weights.set_tensor(name, tensor)
        model._library.millrace_set_join_delay(model._model, 0)
        model.in_library.assume_retained(16 << 20)
        model.in_library.assume_split(False)
        return model

    def kept_by(self, model: NativeModel) -> Checkpoint:
        """The checkpoint whose numbers are those the model computes with."""
        weights = model.weights
        kept = {
            name: weights.matrix(name, *tensor.shape) if weights.type_of(name) in ("int8", "int4") else tensor
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=kept, has_int8_cache=model.cache_dtype == "int8")

    def logits(self, token_ids: list[int]) -> Array:
        """[T, V] float64, of every token of one sequence."""
        shape = self.shape
        residual = self._get("model.embed_tokens.weight")[token_ids] * shape.embedding_scale
        if shape.num_learned_positions:
            residual += self._get("model.embed_positions.weight")[shape.position_offset :][: len(token_ids)]
        residual = self._norm(residual, shape.embedding_norm, "model.embed_layernorm")
        inputs = self._layer_inputs(token_ids, residual)
        kept: dict[int, tuple[Array, Array]] = {}
        for index, layer in enumerate(shape.layers):
            prefix, norms = f"model.layers.{index}", norms_of(layer)

            def normed(x: Array, name: str, prefix: str = prefix, norms: Any = norms) -> Array:
                return self._norm(x, norms[name], f"{prefix}.{name}")

            mixed = normed(self._mix(index, normed(residual, "input_layernorm"), kept), "post_mixer_layernorm")
            after = residual + layer.residual_scale * mixed
            before_feed = residual if layer.is_parallel else after
            is_shared = layer.is_parallel and layer.pre_feed is None
            x = normed(before_feed, "input_layernorm" if is_shared else "post_attention_layernorm")
            fed = normed(self._feed(index, x, before_feed), "post_feed_layernorm")
            residual = after + layer.residual_scale * fed
            if shape.layer_inputs is not None:
                gate = self._linear(residual, f"{prefix}.per_layer.gate_proj")
                inner = ACTIVATIONS[shape.layer_inputs.activation](gate) * inputs[:, index]
                added = self._linear(inner, f"{prefix}.per_layer.up_proj")
                residual = residual + self._norm(added, shape.layer_inputs.norm, f"{prefix}.per_layer.norm")
            if layer.has_output_scale:
                residual = residual * self._get(f"{prefix}.output_scale")
        x = self._norm(residual, shape.final_norm, "model.norm")
        logits = x @ self._get("model.embed_tokens.weight" if shape.is_tied else "lm_head.weight").T
        if shape.has_head_bias:
            logits += self._get("lm_head.bias")
        return _capped(shape.head_scale * logits, shape.head_soft_cap)

    def _layer_inputs(self, token_ids: list[int], residual: Array) -> Array:
        """[T, layers, width]; without numbers if layers have no inputs."""
        shape, inputs = self.shape, self.shape.layer_inputs
        if inputs is None:
            return np.empty((len(token_ids), shape.num_layers, 0))
        projected = self._linear(residual, "model.per_layer.projection") * inputs.projection_scale
        projected = projected.reshape(len(token_ids), shape.num_layers, -1)
        table = self._get("model.per_layer.embed_tokens.weight")[token_ids].reshape(projected.shape)
        return (self._norm(projected, inputs.norm, "model.per_layer.norm") + table * inputs.scale) / math.sqrt(2)

    def _feed(self, index: int, x: Array, residual: Array) -> Array:
        layer, prefix = self.shape.layers[index], f"model.layers.{index}"
        out: Array = np.zeros_like(x)
        if layer.intermediate_size:
            out = self._network(f"{prefix}.{network_of(layer)}", layer, x)
        if (experts := layer.experts) is None:
            return out
        if experts.has_shared_gate:
            out = out / (1 + np.exp(-x @ self._get(f"{prefix}.mlp.shared_expert_gate.weight").T))
        bias = self.tensors.get(f"{prefix}.mlp.gate.e_score_correction_bias")
        if experts.own_norms is not None:
            out = self._norm(out, experts.own_norms, f"{prefix}.post_dense_layernorm")
            x = self._norm(residual, experts.own_norms, f"{prefix}.pre_experts_layernorm")
        read = (
            x if experts.router_norm is None else self._norm(residual, experts.router_norm, f"{prefix}.mlp.gate_norm")
        )
        ids, weights = routed(self._linear(read, f"{prefix}.mlp.gate").astype(np.float32), experts, bias)
        if experts.router_norm is not None:
            weights = weights * self._get(f"{prefix}.mlp.expert_scale")[ids]
        other, out = out, out if experts.own_norms is None else np.zeros_like(out)
        for row, (chosen, by) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
            for expert, weight in zip(chosen, by, strict=True):
                given = weight * x[row : row + 1] if experts.scales_input else x[row : row + 1]
                got = self._network(f"{prefix}.mlp.experts.{expert}", experts, given)[0]
                out[row] += got if experts.scales_input else weight * got
        return (
            out
            if experts.own_norms is None
            else other + self._norm(out, experts.own_norms, f"{prefix}.post_experts_layernorm")
        )

    def _network(self, name: str, layer: NativeLayer | NativeExperts, x: Array) -> Array:
        alphas = self.tensors.get(f"{name}.act_alpha")
        up = self._linear(x, f"{name}.up_proj")
        gate = self._linear(x, f"{name}.gate_proj") if layer.is_gated else up
        if layer.activation == "swiglu_clamped":
            alpha, limit = layer.clamp
            gate, up = np.minimum(gate, limit), 1 + np.clip(up, -limit, limit)
            return self._linear(up * gate / (1 + np.exp(-alpha * gate)), f"{name}.down_proj")
        inner = ACTIVATIONS[layer.activation](gate, *(() if alphas is None else alphas.astype(np.float64)))
        return self._linear(inner * up if layer.is_gated else inner, f"{name}.down_proj")

    def _mix(self, index: int, x: Array, kept: dict[int, tuple[Array, Array]]) -> Array:
        """The layer before its feed-forward network, [T, hidden]."""
        return self._linear(self._attention(index, x, kept), f"model.layers.{index}.self_attn.o_proj")

    def _attention(self, index: int, x: Array, kept: dict[int, tuple[Array, Array]]) -> Array:
        """`kept`: keys and values of the layers before, to which those of this layer are added."""
        if self.shape.layers[index].latents is not None:
            return self._over_latents(index, x)
        shape, layer, prefix = self.shape, self.shape.layers[index], f"model.layers.{index}.self_attn"
        count, heads = len(x), shape.heads_of(layer)

        def projected(name: str) -> Array:
            return self._linear(x, f"{prefix}.{name}_proj").reshape(count, -1, heads.head_dim)  # [T, heads, D]

        q = projected("q")
        k = projected("k") if layer.kv_of is None else np.zeros((count, heads.num_kv_heads, heads.head_dim))
        v = projected("v") if layer.kv_of is None and not layer.is_k_v else k
        v = self._norm(v, layer.v_norm, "")

        def normed(x: Array, name: str) -> Array:
            qk = layer.qk_norm
            flat = x.reshape(count, -1) if qk is not None and qk.is_over_row else x
            return self._norm(flat, None if qk is None else qk.norm, f"{prefix}.{name}").reshape(x.shape)

        is_after = layer.qk_norm is not None and layer.qk_norm.is_after_rope
        if not is_after:
            q, k = normed(q, "q_norm"), k if layer.kv_of is not None else normed(k, "k_norm")
        if layer.rope is not None:
            q, k = self._rotate(q, layer.rope), self._rotate(k, layer.rope)
        if is_after:
            q, k = normed(q, "q_norm"), normed(k, "k_norm")
        if layer.query_temper is not None:
            beta, length = layer.query_temper
            q = q * (1 + beta * np.log(1 + np.arange(count) // length))[:, None, None]
        q, k, v = (part.transpose(1, 0, 2) for part in (q, k, v))  # [heads, T, D]
        if self.has_int8_cache:
            k, v = in_int8(k), in_int8(v)
        k, v = kept[index] = (k, v) if layer.kv_of is None else kept[layer.kv_of]
        k, v = (np.repeat(part, heads.num_heads // heads.num_kv_heads, axis=0) for part in (k, v))
        scores = q @ k.transpose(0, 2, 1) * (layer.attention_scale or heads.head_dim**-0.5)
        age = np.arange(count)[:, None] - np.arange(count)
        is_seen = (age >= 0) & (age < (layer.window or count))
        weights = np.exp(np.where(is_seen, _capped(scores, layer.soft_cap), -np.inf))
        total = weights.sum(-1, keepdims=True)
        if f"{prefix}.sinks" in self.tensors:
            total += np.exp(self._get(f"{prefix}.sinks"))[:, None, None]
        return (weights / total @ v).transpose(1, 0, 2).reshape(count, -1)

    def _over_latents(self, index: int, x: Array) -> Array:
        """Attention whose keys and values are made of latents."""
        layer, prefix, count = self.shape.layers[index], f"model.layers.{index}.self_attn", len(x)
        sizes, num_heads = layer.latents, self.shape.heads_of(layer).num_heads
        assert sizes is not None and layer.rope is not None
        if sizes.q_rank is None:
            q = self._linear(x, f"{prefix}.q_proj")
        else:
            q = self._norm(self._linear(x, f"{prefix}.q_a_proj"), LATENT_NORM, f"{prefix}.q_a_layernorm")
            q = self._linear(q, f"{prefix}.q_b_proj")
        q = q.reshape(count, num_heads, -1)
        down = self._linear(x, f"{prefix}.kv_a_proj_with_mqa")
        latent = self._norm(down[:, : sizes.kv_rank], LATENT_NORM, f"{prefix}.kv_a_layernorm")
        made = self._linear(latent, f"{prefix}.kv_b_proj").reshape(count, num_heads, -1)
        rotated = self._rotate(down[:, None, sizes.kv_rank :], layer.rope)
        k = np.concatenate([made[..., : sizes.nope_dim], np.repeat(rotated, num_heads, 1)], -1)
        q = np.concatenate([q[..., : sizes.nope_dim], self._rotate(q[..., sizes.nope_dim :], layer.rope)], -1)
        scores = np.einsum("thd,shd->hts", q, k) * layer.attention_scale
        weights = np.exp(np.where(np.tri(count, dtype=bool), scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hts,shd->thd", weights, made[..., sizes.nope_dim :]).reshape(count, -1)

    def _rotate(self, x: Array, rope: int) -> Array:
        cos, sin = (table[: len(x), None].astype(np.float64) for table in self.ropes[rope])
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def _linear(self, x: Array, name: str) -> Array:
        product = x @ self._get(f"{name}.weight").T
        bias = self.tensors.get(f"{name}.bias")
        return product if bias is None else product + bias

    def _norm(self, x: Array, norm: NativeNorm | None, name: str) -> Array:
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps)
        return x * self.tensors.get(f"{name}.weight", np.float64(1)) + self.tensors.get(f"{name}.bias", np.float64(0))

    def _get(self, name: str) -> Array:
        return self.tensors[name].astype(np.float64)


def routed(logits: Array, experts: NativeExperts, bias: Array | None) -> tuple[Array, Array]:
    """Experts and weights [T, top_k] of each row of logits [T, E], by the reference rule."""
    rule: Any = SimpleNamespace(
        score=experts.score,
        when="after_top_k" if experts.is_softmax_of_chosen else "before_top_k",
        norm_top_k=experts.divides_by_sum,
        norm_eps=experts.norm_eps,
        norm_min=experts.norm_min,
        scale=experts.scale,
        groups=experts.num_groups,
        groups_kept=experts.num_groups_kept,
        group_score=experts.group_score,
    )
    of_choice = None if bias is None else torch.from_numpy(bias)
    ids, weights = route(torch.from_numpy(logits), rule, experts.top_k, of_choice)
    return ids.numpy(), weights.numpy()


def _xielu(x: Array, above: float, below: float) -> Array:
    return np.where(x > 0, above * x * x, below * (np.expm1(np.minimum(x, -1e-6)) - x)) + 0.5 * x


ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "xielu": _xielu,
}


def _capped(x: Array, cap: float | None) -> Array:
    return x if cap is None else cap * np.tanh(x / cap)


def _rope(dim: int, num_positions: int, index: int) -> tuple[Array, Array]:
    """cos and sin; tables have different bases."""
    angles = np.arange(num_positions)[:, None] / 1000.0 ** ((1 + index) * np.arange(0, dim, 2) / dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def in_int8(x: Array) -> Array:
    """The nearest multiples of each row's scale: its largest number over 127, rounded up to what bfloat16 holds."""
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float32)
    bits = (largest / np.float32(127)).view(np.uint32)
    scale = ((bits + 0xFFFF) & 0xFFFF0000).view(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return np.rint(x * inverse.astype(x.dtype)) * scale
