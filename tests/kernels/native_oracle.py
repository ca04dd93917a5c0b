"""A decoder in float64 numpy, by the definition, and random weights for it: what the native step is held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.kernels.layout.state_layout import StateLayout
from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, NativeExperts, NativeLayer, NativeNorm, NativeQkNorm, NativeShape
from millrace.kernels.native.states import NativeStates
from millrace.kernels.reference.experts import route

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
    "is_tied": True,
}


LATENT_NORM = NativeNorm(eps=1e-6)


def small_shape(
    has_qk_norm: bool = False, layer: dict[str, Any] | None = None, last: dict[str, Any] | None = None, **sizes: Any
) -> NativeShape:
    """SMALL, with other sizes; `layer`: fields that all layers get, `last`: those that the last one gets besides.

    `eps` of its norms is `rms_norm_eps`, unless a norm is given."""
    sizes = {**SMALL, **sizes}
    norm = NativeNorm(eps=sizes.pop("rms_norm_eps"))
    num_layers, inner, rotary_dim = (sizes.pop(name) for name in ("num_layers", "intermediate_size", "rotary_dim"))
    windows = sizes.pop("sliding_windows", (None,) * num_layers)
    assert len(windows) == num_layers, f"{windows} for {num_layers} layers"
    fields = {
        "intermediate_size": inner,
        "pre_mixer": norm,
        "pre_feed": norm,
        "qk_norm": NativeQkNorm(norm=norm) if has_qk_norm else None,
        **(layer or {}),
    }
    layers = [NativeLayer(window=window, **fields) for window in windows]
    if last:
        layers[-1] = replace(layers[-1], **last)
    return NativeShape(**{"layers": tuple(layers), "rotary_dims": (rotary_dim,), "final_norm": norm, **sizes})


@dataclass
class Checkpoint:
    """Random weights by the names checkpoints give them, as bfloat16 holds them, in float32."""

    shape: NativeShape
    tensors: dict[str, Array]
    ropes: list[tuple[Array, Array]]  # cos and sin [P, rotary_dim / 2] of each table
    num_positions: int
    has_int8_cache: bool = False

    @classmethod
    def random(
        cls,
        has_bias: bool = False,
        has_norm_bias: bool = False,
        has_norm_weight: bool = True,
        has_sinks: bool = False,
        has_choice_bias: bool = False,
        num_positions: int = 1200,
        seed: int = 0,
        **sizes: Any,
    ) -> Checkpoint:
        """`sizes` as in `small_shape`, or a shape."""
        shape = sizes.pop("shape", None) or small_shape(**sizes)
        draw = np.random.default_rng(seed)
        hidden = shape.hidden_size
        tensors: dict[str, Array] = {}

        def put(name: str, *sizes: int, mean: float = 0.0, scale: float = 0.1) -> None:
            tensors[name] = round_to_bfloat16((mean + scale * draw.standard_normal(sizes)).astype(np.float32))

        def put_norm(name: str, norm: NativeNorm | None, *sizes: int) -> None:
            if norm is not None and has_norm_weight:
                put(f"{name}.weight", *sizes, mean=1.0)
            if norm is not None and has_norm_bias:
                put(f"{name}.bias", *sizes)

        put("model.embed_tokens.weight", shape.vocab_size, hidden, scale=1.0)
        if not shape.is_tied:
            put("lm_head.weight", shape.vocab_size, hidden)
        if shape.has_head_bias:
            put("lm_head.bias", shape.vocab_size, scale=1.0)
        if shape.num_learned_positions:
            put("model.embed_positions.weight", shape.num_learned_positions, hidden)
        put_norm("model.norm", shape.final_norm, hidden)
        put_norm("model.embed_layernorm", shape.embedding_norm, hidden)
        if (inputs := shape.layer_inputs) is not None:
            size = shape.num_layers * inputs.width
            put("model.per_layer.embed_tokens.weight", inputs.rows, size, scale=1.0)
            put("model.per_layer.projection.weight", size, hidden)
            put_norm("model.per_layer.norm", inputs.norm, inputs.width)
        for index, layer in enumerate(shape.layers):
            prefix = f"model.layers.{index}"
            for name, norm in norms_of(layer).items():
                put_norm(f"{prefix}.{name}", norm, hidden)
            heads = shape.heads_of(layer)
            all_heads, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
            rows = {"q": (all_heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, all_heads)}
            if (latents := layer.latents) is not None:
                queries = heads.num_heads * (latents.nope_dim + latents.rope_dim)
                rows = {"q": (queries, hidden), "o": (hidden, heads.num_heads * latents.value_dim)}
                put(f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", latents.kv_rank + latents.rope_dim, hidden)
                put_norm(f"{prefix}.self_attn.kv_a_layernorm", LATENT_NORM, latents.kv_rank)
                ups = heads.num_heads * (latents.nope_dim + latents.value_dim)
                put(f"{prefix}.self_attn.kv_b_proj.weight", ups, latents.kv_rank)
                if latents.q_rank is not None:
                    del rows["q"]
                    put(f"{prefix}.self_attn.q_a_proj.weight", latents.q_rank, hidden)
                    put_norm(f"{prefix}.self_attn.q_a_layernorm", LATENT_NORM, latents.q_rank)
                    put(f"{prefix}.self_attn.q_b_proj.weight", queries, latents.q_rank)
            for name, size in rows.items():
                if (name == "v" and layer.is_k_v) or (name in "kv" and layer.kv_of is not None):
                    continue
                put(f"{prefix}.self_attn.{name}_proj.weight", *size)
                if has_bias:
                    put(f"{prefix}.self_attn.{name}_proj.bias", size[0])
            networks = [(network_of(layer), layer.intermediate_size, layer.is_gated)] if layer.intermediate_size else []
            if experts := layer.experts:
                put(f"{prefix}.mlp.gate.weight", experts.num_experts, hidden, scale=0.3)
                if has_bias:
                    put(f"{prefix}.mlp.gate.bias", experts.num_experts)
                put_norm(f"{prefix}.mlp.gate_norm", experts.router_norm, hidden)
                if experts.router_norm is not None:
                    put(f"{prefix}.mlp.expert_scale", experts.num_experts, mean=1.0)
                for part in ("pre_experts", "post_experts", "post_dense"):
                    put_norm(f"{prefix}.{part}_layernorm", experts.own_norms, hidden)
                if has_choice_bias:
                    put(f"{prefix}.mlp.gate.e_score_correction_bias", experts.num_experts, mean=-1.0)
                if experts.has_shared_gate:
                    put(f"{prefix}.mlp.shared_expert_gate.weight", 1, hidden)
                one = experts.intermediate_size, experts.is_gated
                networks += [(f"mlp.experts.{expert}", *one) for expert in range(experts.num_experts)]
            for network, inner, is_gated in networks:
                matrices = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
                for name, size in matrices.items():
                    if name == "gate" and not is_gated:
                        continue
                    put(f"{prefix}.{network}.{name}_proj.weight", *size)
                    if has_bias:
                        put(f"{prefix}.{network}.{name}_proj.bias", size[0])
            if layer.activation == "xielu":
                put(f"{prefix}.mlp.act_alpha", 2, mean=0.8)
            if has_sinks:
                put(f"{prefix}.self_attn.sinks", heads.num_heads, scale=2.0)
            if layer.has_output_scale:
                put(f"{prefix}.output_scale", 1, mean=0.8)
            if inputs is not None:
                put(f"{prefix}.per_layer.gate_proj.weight", inputs.width, hidden)
                put(f"{prefix}.per_layer.up_proj.weight", hidden, inputs.width)
                put_norm(f"{prefix}.per_layer.norm", inputs.norm, hidden)
            if (qk := layer.qk_norm) is not None and layer.latents is None:
                dims = {"q": (heads.num_heads, heads.head_dim)}
                if layer.kv_of is None:
                    dims["k"] = (heads.num_kv_heads, heads.head_dim)
                for name, (count, dim) in dims.items():
                    size = (count, dim) if qk.has_weight_per_head else (count * dim,) if qk.is_over_row else (dim,)
                    put_norm(f"{prefix}.self_attn.{name}_norm", qk.norm, *size)
        return cls(
            shape, tensors, [_rope(dim, num_positions, i) for i, dim in enumerate(shape.rotary_dims)], num_positions
        )

    def load(self, dtype: DType = "float32", **settings: Any) -> NativeModel:
        """Into the library. All threads share each phase of a step but its first, however busy the machine is, and the
        cache is taken to keep what makes steps fetch a layer ahead and two threads share rows, whatever it does. No
        step's rows are taken apart."""
        model = NativeModel(self.shape, dtype, self.ropes, self.num_positions, **settings)
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


def network_of(layer: NativeLayer) -> str:
    """The name of the network that all tokens take."""
    return "mlp.shared_experts" if layer.is_shared else "mlp"


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


def norms_of(layer: NativeLayer) -> dict[str, NativeNorm | None]:
    """The norms of rows of the residual, by the names of their tensors."""
    return {
        "input_layernorm": layer.pre_mixer,
        "post_mixer_layernorm": layer.post_mixer,
        "post_attention_layernorm": layer.pre_feed,
        "post_feed_layernorm": layer.post_feed,
    }


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


NUM_STATES = 9


def state_of(sequence: int) -> int:
    """The slot of a sequence's state in a `Run`."""
    return (7 * sequence + 4) % NUM_STATES


@dataclass
class Run:
    """Sequences driven through a model step by step, in blocks that lie in no order, all logits kept."""

    model: NativeModel
    block_size: int = 16
    num_blocks: int = 0
    poison: float | None = None  # what all of the cache holds at first
    adapters: dict[int, int] = field(default_factory=dict)  # by sequence, the slot of its adapter
    cache: NativeCache = field(init=False)
    _free: list[int] = field(init=False)
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)
    logits: dict[int, list[Array]] = field(default_factory=dict)  # by sequence, [V] of each token

    def __post_init__(self) -> None:
        count = self.num_blocks or 4096 // self.block_size
        shape, states = self.model.shape, None
        if size := shape.state_bytes(self.model.dtype):
            states = NativeStates(shape, StateLayout(size, NUM_STATES), self.model.dtype)
            states.memory[:] = 0x7F  # a sequence that begins reads none of it
        self.cache = NativeCache.uniform(shape, count, self.block_size, self.model.cache_dtype, states=states)
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
        adapters = [self.adapters.get(sequence, 0) for sequence, ids in parts.items() for _ in ids]
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
            adapters=np.array(adapters, np.int64) if self.adapters else None,
            slots=None if self.cache.states is None else np.array([state_of(sequence) for sequence in parts], np.int64),
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
