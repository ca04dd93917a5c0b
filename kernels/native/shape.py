"""A decoder as the native library takes it, layer by layer, and the types of its arrays."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import UnsupportedModelError

Array = NDArray[Any]
Floats = NDArray[np.float32]
Longs = NDArray[np.int64]
Ints = NDArray[np.int32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
DType = Literal["float32", "bfloat16"]
RopeTable = tuple[Floats, Floats]  # cos and sin, [P, rotary_dim / 2] each
CacheDType = Literal["float32", "bfloat16", "int8"]
Quantization = Literal["int8", "int4"]

CACHE_TYPES: dict[CacheDType, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
_MAX_HEAD_DIM = 1024
_MAX_CONV_WIDTH = 16  # as in source/weights/recurrent.h


NormKind = Literal["rms", "layer"]
RecurrentKind = Literal["gdn", "mamba2", "short_conv"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_clamped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeNorm:
    """A norm of rows in float32. It has a weight, or a bias, if the tensor is set."""

    kind: NormKind = "rms"
    eps: float = 1e-6
    is_exact: bool = False  # weight and bias stay float32; False: they are rounded to the dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeQkNorm:
    """The norm of queries and keys."""

    norm: NativeNorm = NativeNorm()
    is_over_row: bool = False  # all heads of a token together, instead of each head
    is_after_rope: bool = False
    has_weight_per_head: bool = False  # [H, D] and [G, D] instead of [D]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeHeads:
    """The heads of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: CacheDType) -> int:
        """Memory of one cache block of one layer, keys and values.

        Heads are padded to a multiple of 16 numbers; in int8 each token's head has a scale of two bytes.
        """
        padded = -(-self.head_dim // 16) * 16
        head = padded * np.dtype(CACHE_TYPES[dtype]).itemsize + (2 if dtype == "int8" else 0)
        return 2 * self.num_kv_heads * block_size * head


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLatents:
    """Attention over latents: all heads read one, of `kv_rank` and `rope_dim` numbers a token."""

    q_rank: int | None  # of the compressed query; None = queries are projected directly
    kv_rank: int
    nope_dim: int  # numbers of a head without rotation
    rope_dim: int  # rotated numbers of a head, whose key all heads share
    value_dim: int

    def block_bytes(self, block_size: int, dtype: CacheDType) -> int:
        """Memory of one cache block of one layer; rows are padded to a multiple of 32 numbers."""
        padded = -(-(self.kv_rank + self.rope_dim) // 32) * 32
        return block_size * padded * np.dtype(CACHE_TYPES[dtype]).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayerInputs:
    """What each layer gets of a token besides the residual: x += norm(up(act(gate x) * input)), after its feed.

    The input is (norm(W e) + table[token]) / sqrt(2), for the first residual e; table and W have a part a layer.
    """

    rows: int  # of the table
    width: int  # numbers a layer
    activation: Activation
    norm: NativeNorm  # of the projected residual, and with another weight of what is added
    scale: float  # of the table; rounded to the dtype before use
    projection_scale: float  # of W


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeExperts:
    """Experts, and which of them a token goes to: the rule of `kernels/reference/experts.py`.

    Biases of the router and of experts, and that of the choice, are added if their tensors are set; a number for each
    expert multiplies weights likewise.
    """

    num_experts: int
    top_k: int  # of a token
    intermediate_size: int
    is_gated: bool = True
    activation: Activation = "silu"
    clamp: tuple[float, float] = (1.702, 7.0)  # alpha and limit of swiglu_clamped
    score: Literal["softmax", "sigmoid"] = "softmax"
    is_softmax_of_chosen: bool = False  # weights are the softmax of the chosen logits alone
    divides_by_sum: bool = False  # weights are divided by their sum
    norm_eps: float = 0.0  # added to that sum
    norm_min: float = 0.0  # least number that they are divided by
    scale: float = 1.0  # multiplies the weights
    num_groups: int = 1  # runs of experts of equal length
    num_groups_kept: int = 1  # whose experts can be chosen
    group_score: Literal["max", "top2"] = "max"
    scales_input: bool = False  # the weight multiplies the expert's input, instead of its output
    has_shared_gate: bool = False  # the output of the network beside is multiplied by the sigmoid of a product
    router_norm: NativeNorm | None = None  # of the residual, for the router; None = it reads what experts read
    # Of the residual, for the experts, of their sum, and of the output of the network beside; None = `pre_feed` alone
    own_norms: NativeNorm | None = None

    def gaps(self) -> list[str]:
        """What the library does not support of these sizes."""
        gaps = []
        if not 1 <= self.top_k <= self.num_experts:
            gaps.append(f"{self.top_k} experts a token of {self.num_experts}: must be between 1 and all")
        elif not 1 <= self.num_groups_kept <= self.num_groups or self.num_experts % self.num_groups:
            gaps.append(f"{self.num_groups} groups of {self.num_experts} experts: must divide them")
        elif self.num_groups_kept * (self.num_experts // self.num_groups) < self.top_k:
            gaps.append(f"{self.num_groups_kept} groups: must have the {self.top_k} experts of a token")
        if self.activation == "xielu":
            gaps.append("experts with the activation xielu")
        return gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRecurrent:
    """A layer with a state of one size: the rule of `kernels/reference/recurrent.py`.

    Biases of its products and of the convolution are added if their tensors are set.
    """

    kind: RecurrentKind
    num_key_heads: int = 1
    num_value_heads: int = 1
    key_dim: int = 0  # of a head; 0 = no matrix
    value_dim: int
    conv_width: int  # tokens, the newest included
    norm: NativeNorm | None = None  # of the gated output
    norm_group: int | None = None  # numbers normed together; None = a head, and all heads have the same weights
    step_limit: tuple[float, float] = (0.0, inf)  # of mamba2

    @property
    def inner_size(self) -> int:
        """Numbers of a token in all value heads, which the product out of the layer reads."""
        return self.num_value_heads * self.value_dim

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of the matrices of the product into the layer, in the order of their rows."""
        if self.kind == "short_conv":
            return ("in",)
        return ("gate", "in", "step", "rate") if self.kind == "gdn" else ("gate", "in", "step")

    def state_bytes(self, dtype: DType) -> int:
        """Memory of a sequence's state: matrices in float32, and what the convolution read last."""
        channels = 2 * self.num_key_heads * self.key_dim + self.inner_size
        return 4 * self.key_dim * self.inner_size + (self.conv_width - 1) * channels * (4 if dtype == "float32" else 2)

    def gaps(self) -> list[str]:
        """What the library does not support of these sizes."""
        gaps = []
        if self.conv_width > _MAX_CONV_WIDTH:
            gaps.append(f"a convolution over {self.conv_width} tokens: must be at most {_MAX_CONV_WIDTH}")
        if self.inner_size % 2:
            gaps.append(f"recurrent layers of {self.inner_size} numbers: must be even for the native step")
        return gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """What a layer computes; the defaults are Llama's.

    Biases of projections, and attention sinks, are added if their tensors are set.
    """

    intermediate_size: int  # of the network that all tokens take; 0: there are experts alone, or none
    has_mixer: bool = True  # False: neither attention nor a recurrent layer
    recurrent: NativeRecurrent | None = None  # instead of attention
    heads: NativeHeads | None = None  # None = those of `NativeShape`
    latents: NativeLatents | None = None  # instead of keys and values; `heads` are then those over the cache
    kv_of: int | None = None  # layer whose cache is read; this one writes none
    is_k_v: bool = False  # values are the keys before norm and rotation
    v_norm: NativeNorm | None = None  # of each head of values; it has no weight
    window: int | None = None  # keys a query sees, itself included; None = all
    rope: int | None = 0  # index into `NativeShape.rotary_dims`; None = not rotated
    attention_scale: float | None = None  # of scores; None = head_dim ** -0.5
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    qk_norm: NativeQkNorm | None = None
    query_temper: tuple[float, int] | None = (
        None  # (b, n): queries *= 1 + b * ln(1 + position // n), after the rotation
    )
    has_output_gate: bool = False  # attention is multiplied by the sigmoid of a product
    is_gated: bool = True  # down(act(gate x) * up x), instead of down(act(up x))
    activation: Activation = "silu"
    clamp: tuple[float, float] = (1.702, 7.0)  # alpha and limit of swiglu_clamped
    experts: NativeExperts | None = None
    is_shared: bool = False  # the network beside the experts has the names of shared experts
    pre_mixer: NativeNorm | None = NativeNorm()
    post_mixer: NativeNorm | None = None
    pre_feed: NativeNorm | None = NativeNorm()
    post_feed: NativeNorm | None = None
    is_parallel: bool = False  # x += mixer(pre_mixer(x)) + feed(pre_feed(x)); a missing pre_feed is pre_mixer
    residual_scale: float = 1.0  # multiplies what is added to the residual
    has_output_scale: bool = False  # the layer's output is multiplied by a number of the checkpoint

    @property
    def has_attention(self) -> bool:
        return self.has_mixer and self.recurrent is None


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeShape:
    """A decoder: the sizes that all layers share, and its layers, of which equal ones may be one object."""

    vocab_size: int
    hidden_size: int
    num_heads: int  # of layers without heads of their own, as the next two
    num_kv_heads: int
    head_dim: int
    layers: tuple[NativeLayer, ...]
    rotary_dims: tuple[int, ...]  # of each rotary table: rotated elements of a head, from its start
    is_tied: bool  # the head is the embedding
    has_head: bool = True
    has_head_bias: bool = False
    head_scale: float = 1.0  # logits = cap(scale * (W x + b))
    head_soft_cap: float | None = None
    embedding_scale: float = 1.0  # rounded to the dtype before use
    num_learned_positions: int = 0  # rows of the table that is added to the embedding; 0 = there is none
    position_offset: int = 0  # its row of position 0
    embedding_norm: NativeNorm | None = None
    layer_inputs: NativeLayerInputs | None = None
    final_norm: NativeNorm | None = NativeNorm()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values, by number."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_attention and layer.kv_of is None)

    def state_bytes(self, dtype: DType) -> int:
        """Memory of the recurrent layers' state of a sequence; 0: there are none."""
        return sum(layer.recurrent.state_bytes(dtype) for layer in self.layers if layer.recurrent is not None)

    @property
    def has_latents(self) -> bool:
        """Whether the cache keeps latents, in all layers."""
        return any(layer.latents is not None for layer in self.layers)

    def cached_sizes(self, layer: NativeLayer) -> tuple[int, int, int]:
        """Key/value heads, and numbers of a key and of a value, as a kind of the cache has them."""
        heads = self.heads_of(layer)
        return heads.num_kv_heads, heads.head_dim, layer.latents.kv_rank if layer.latents else heads.head_dim

    def heads_of(self, layer: NativeLayer) -> NativeHeads:
        """The heads of a layer's attention."""
        own = NativeHeads(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        return layer.heads or own

    def gaps(self) -> list[str]:
        """What the library does not support of these sizes; empty if it runs the decoder."""
        all_heads = dict.fromkeys(self.heads_of(layer) for layer in self.layers)
        even = [
            ("hidden_size", self.hidden_size),
            *{("intermediate_size", layer.intermediate_size) for layer in self.layers},
            *{("size of experts", layer.experts.intermediate_size) for layer in self.layers if layer.experts},
            *{("num_heads * head_dim", heads.num_heads * heads.head_dim) for heads in all_heads},
            *{("head_dim", heads.head_dim) for heads in all_heads},
            ("width of a layer's input", self.layer_inputs.width if self.layer_inputs else 0),
        ]
        for latents in filter(None, dict.fromkeys(layer.latents for layer in self.layers)):
            sizes = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
            even += [(f"{name} of latents", getattr(latents, name) or 0) for name in sizes]
        gaps = [f"{name} = {size}: must be even for the native step" for name, size in even if size % 2]
        for experts in dict.fromkeys(layer.experts for layer in self.layers):
            gaps += experts.gaps() if experts else []
        for recurrent in dict.fromkeys(layer.recurrent for layer in self.layers):
            gaps += recurrent.gaps() if recurrent else []
        if any(
            layer.has_output_gate and (layer.is_k_v or layer.latents or layer.kv_of is not None)
            for layer in self.layers
        ):
            gaps.append("a gate of attention's output beside shared keys or values")
        for dim in dict.fromkeys(heads.head_dim for heads in all_heads if heads.head_dim > _MAX_HEAD_DIM):
            gaps.append(f"head_dim = {dim}: the native step takes at most {_MAX_HEAD_DIM}")
        if not self.head_scale > 0:
            gaps.append(f"scale of logits = {self.head_scale:g}: must be above 0 for the native step")
        return gaps

    def check(self) -> None:
        """Raises UnsupportedModelError for sizes that the library does not support."""
        if gaps := self.gaps():
            raise UnsupportedModelError("; ".join(gaps))

    def bytes_per_block(self, block_size: int, dtype: CacheDType) -> int:
        """Memory of one cache block: all layers that have one, keys and values."""
        layers = [self.layers[index] for index in self.kv_layers]
        return sum((layer.latents or self.heads_of(layer)).block_bytes(block_size, dtype) for layer in layers)
