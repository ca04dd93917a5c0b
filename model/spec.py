"""The architecture of a decoder as data: what each layer computes, whichever family it is of. Does not import torch.

A family (`families/NAME.py`) makes a `DecoderSpec` of a config.json. The decoders read only the spec, and
`backend_gaps.py` says what each backend lacks of one. Every default is Llama's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Literal

from .rope_config import RopeConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_clamped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm over the numbers of a row: RMS norm, or LayerNorm, which subtracts the mean first. Computed in f32."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    weight: Literal["w", "one_plus", "none"] = (
        "w"  # one_plus: the checkpoint stores w - 1, and the loader adds 1 in f32
    )
    has_bias: bool = False  # added after the weight
    is_exact: bool = False  # False: rounded to the dtype before the weight as well, as in Llama; True: at the end only


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """The norm of queries and keys."""

    norm: NormSpec
    over: Literal["head", "row"] = "head"  # row: all heads of a token together, with a weight a number of the row
    when: Literal["before_rope", "after_rope"] = "before_rope"
    has_weight_per_head: bool = False  # over heads: each head has its own weight, [H, D] and [G, D], instead of [D]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention over cached keys and values."""

    num_heads: int  # H
    num_kv_heads: int  # G; divides H
    head_dim: int  # D, of queries and keys
    value_dim: int | None = None  # of values; None = head_dim
    scale: float  # multiplies q @ k; usually head_dim ** -0.5
    rope: int | None = 0  # index into `DecoderSpec.ropes`; None = no rotary positions (NoPE)
    window: int | None = None  # keys a query sees, itself included; None = all
    chunk: int | None = None  # a query sees only keys of its own chunk of so many positions; None = all
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    has_sinks: bool = False  # one more score a head in the softmax, without a value
    qk_norm: QkNorm | None = None
    v_norm: NormSpec | None = None  # over each value head
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_output_gate: bool = False  # the output is multiplied by the sigmoid of a fourth projection
    is_k_v: bool = False  # values are the keys before norm and rotation
    query_temper: tuple[float, int] | None = None  # (b, n): q *= 1 + b * ln(1 + position // n), after the rotation
    kv_of: int | None = None  # layer whose cache is read; this one writes none
    has_alibi: bool = False  # scores get slope(head) * (key position - query position)
    alibi_scale: float = 1.0  # multiplies the slopes
    is_alibi_rounded: bool = False  # slope * key position is rounded to bfloat16, before the scale

    @property
    def group(self) -> int:
        """Query heads a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Columns of the fused projection: queries, keys and values, as far as the layer has its own."""
        if self.kv_of is not None:
            return self.num_heads * self.head_dim
        values = 0 if self.is_k_v else self.num_kv_heads * (self.value_dim or self.head_dim)
        return (self.num_heads + self.num_kv_heads) * self.head_dim + values

    @property
    def cached_numbers(self) -> int:
        """Numbers of a token that the layer keeps: its keys and values."""
        return 0 if self.kv_of is not None else self.num_kv_heads * (self.head_dim + (self.value_dim or self.head_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Attention over a compressed cache (multi-head latent attention): see `kernels/reference/latents.py`."""

    num_heads: int
    q_rank: int | None  # of the compressed query; None = queries are projected directly
    kv_rank: int  # of the cached latent
    nope_dim: int  # numbers of a head without rotation
    rope_dim: int  # rotated numbers of a head, whose key all heads share
    value_dim: int
    scale: (
        float  # multiplies q @ k of nope_dim + rope_dim numbers; usually their sum ** -0.5, times mscale ** 2 of yarn
    )
    rope: int = 0
    norm: NormSpec = NormSpec()  # of the compressed query, and of the latent
    has_bias: bool = False  # of the products that compress
    has_output_bias: bool = False

    @property
    def query_size(self) -> int:
        """Numbers of a token's queries."""
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def cached(self) -> AttentionSpec:
        """Attention over the cache: all heads read one head, whose value is the first `kv_rank` numbers of its key."""
        size = self.kv_rank + self.rope_dim
        return AttentionSpec(num_heads=self.num_heads, num_kv_heads=1, head_dim=size, scale=self.scale, rope=self.rope)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """A layer whose state has one size, however long the sequence is: see `kernels/reference/recurrent.py`.

    A causal convolution over `conv_width` tokens, whose last inputs are kept. Then, but for `short_conv`, a matrix
    [key_dim, value_dim] for each value head, changed by the delta rule (`gdn`) or added to (`mamba2`).
    """

    kind: Literal["gdn", "kda", "mamba2", "mamba", "short_conv"]
    num_key_heads: int = 1  # G, of queries and keys; divides num_value_heads
    num_value_heads: int = 1  # H
    key_dim: int = 0  # of a head; 0 = no matrix
    value_dim: int = 0  # of a head
    conv_width: int = 4  # tokens, the newest included
    has_conv_bias: bool = False
    has_bias: bool = False  # of the projections into the layer and out of it
    norm: NormSpec | None = None  # of the gated output
    norm_group: int | None = None  # numbers normed together; None = a head
    step_limit: tuple[float, float] = (0.0, inf)  # mamba2: of the step that a token's projection gives

    @property
    def inner_size(self) -> int:
        """Numbers of a token in all value heads, which the output projection reads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Numbers of a token that the convolution reads: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.inner_size

    @property
    def matrix_size(self) -> int:
        """Numbers of a sequence's matrices, in f32."""
        return self.key_dim * self.inner_size

    @property
    def tail_size(self) -> int:
        """Numbers of a sequence's earlier tokens that the convolution keeps, in the model's dtype."""
        return (self.conv_width - 1) * self.conv_channels


Mixer = AttentionSpec | LatentSpec | RecurrentSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSpec:
    """A feed-forward network: down(act(gate x) * up x), or down(act(up x))."""

    intermediate_size: int
    is_gated: bool = True
    activation: Activation = "silu"
    has_bias: bool = False
    alpha: float = 1.702  # swiglu_clamped: (up + 1) * gate * sigmoid(alpha * gate)
    limit: float = 7.0  # swiglu_clamped: gate <= limit, |up| <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Which experts a token goes to, and with what weights, in f32: see `kernels/reference/experts.py`."""

    score: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits
    when: Literal["before_top_k", "after_top_k"] = "before_top_k"  # after: of the chosen logits only, for softmax
    norm_top_k: bool = False  # the chosen weights are divided by their sum
    norm_eps: float = 0.0  # added to that sum
    norm_min: float = 0.0  # least number that they are divided by
    scale: float = 1.0  # multiplies the weights, divided or not
    has_bias: bool = False  # of the logits
    has_choice_bias: bool = False  # added to the scores to choose, not to weigh
    groups: int = 1  # runs of experts of equal length
    groups_kept: int = 1  # whose experts can be chosen
    group_score: Literal["max", "top2"] = "max"  # best score of a group, or the sum of its best two
    scales_input: bool = False  # the weight multiplies the expert's input, instead of its output
    input_norm: NormSpec | None = None  # of what the router reads
    has_expert_scale: bool = False  # each expert's weight is multiplied by a number of the checkpoint, at last


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts: a sum of the chosen experts by weight, in the order of rank, and of what all tokens get."""

    num_experts: int
    top_k: int  # experts a token goes to
    expert: FeedSpec
    router: RouterSpec
    shared: FeedSpec | None = None  # computed for every token
    has_shared_gate: bool = False  # its output is multiplied by the sigmoid of a product of the input
    dense_beside: FeedSpec | None = None  # a network of its own beside the experts
    # With a norm for each of the three: what the experts read, what they return, and what `dense_beside` returns. The
    # router and the experts then read the residual, and `pre_feed` is of `dense_beside` alone. None = no such norms
    own_norms: NormSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """x += scale * post_mixer(mixer(pre_mixer(x))); x += scale * post_feed(feed(pre_feed(x))).

    With `is_parallel` both read the same x: x += mixer(pre_mixer(x)) + feed(pre_feed(x)), where a missing `pre_feed` is
    `pre_mixer`.
    """

    mixer: Mixer
    feed: FeedSpec | MoeSpec | None
    pre_mixer: NormSpec | None = field(default_factory=NormSpec)
    post_mixer: NormSpec | None = None
    pre_feed: NormSpec | None = field(default_factory=NormSpec)
    post_feed: NormSpec | None = None
    is_parallel: bool = False
    is_post_norm: bool = False  # the two norms are of the sums: x = pre_mixer(x + mixer(x)); x = pre_feed(x + feed(x))
    residual_scale: float = 1.0  # multiplies what is added to the residual
    has_output_scale: bool = False  # the layer's output is multiplied by a number of the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositions:
    """A table of position vectors that are added to the embedding."""

    rows: int  # of the table
    offset: int = 0  # row of position 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs:
    """What each layer gets of a token besides the residual: x += norm(up(act(gate x) * input)), after its feed.

    The input is (norm(W e) + table[token]) / sqrt(2), for the first residual e; table and W have a part a layer.
    """

    rows: int  # of the table
    width: int  # numbers a layer
    activation: Activation
    norm: NormSpec  # of the projected residual, and with another weight of what is added
    scale: float  # of the table; rounded to the dtype before use
    projection_scale: float  # of W


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """From token ids to the first residual."""

    width: int | None = None  # of the table, beside projections from it and to it; None = hidden_size
    scale: float = 1.0  # rounded to the dtype before use
    positions: LearnedPositions | None = None
    norm: NormSpec | None = None  # after the positions
    per_layer: PerLayerInputs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Logits = cap(scale * (W x + b))."""

    exists: bool = True  # False = no logits, as the checkpoint was saved without its output layer
    is_tied: bool = False  # W is the embedding
    has_bias: bool = False
    scale: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder, layer by layer. Equal layers are one object, so `is` compares them."""

    family: str  # model_type of config.json
    vocab_size: int  # V, rows of the embedding; the tokenizer may have fewer ids
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    embedding: EmbeddingSpec = EmbeddingSpec()
    final_norm: NormSpec | None = NormSpec()
    head: HeadSpec = HeadSpec()
    ropes: tuple[RopeConfig, ...]  # of the layers; empty = none rotates
    max_position_embeddings: int  # longest sequence, prompt and output together
    dtype: str  # float32, bfloat16 or float16; "auto", if config.json names none, until the files say it
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has one, over latents as the cache has them."""
        mixers = [layer.mixer.cached if isinstance(layer.mixer, LatentSpec) else layer.mixer for layer in self.layers]
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    @cached_property
    def latents(self) -> tuple[LatentSpec, ...]:
        """The attention of each layer that keeps latents instead of keys and values."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, LatentSpec))

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values, or latents, by number; others may read the cache of one of them."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return tuple(
            index
            for index, one in mixers
            if isinstance(one, LatentSpec) or (isinstance(one, AttentionSpec) and one.kv_of is None)
        )

    @cached_property
    def donors(self) -> dict[int, int]:
        """The layers that read another layer's cache -> that layer, by number."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: one.kv_of for index, one in mixers if isinstance(one, AttentionSpec) and one.kv_of is not None}

    @property
    def cache_parts(self) -> int:
        """Parts of a layer in the cache: keys and values, or latents, which are both."""
        return 1 if self.latents else 2

    @cached_property
    def cached_numbers(self) -> int:
        """Numbers of a token that all layers keep: keys and values, or latents, which are both."""
        if self.latents:
            return sum(latent.kv_rank + latent.rope_dim for latent in self.latents)
        return sum(attention.cached_numbers for attention in self.attentions)

    @cached_property
    def recurrent_layers(self) -> dict[int, RecurrentSpec]:
        """The layers that keep a state of one size, by number."""
        return {index: one.mixer for index, one in enumerate(self.layers) if isinstance(one.mixer, RecurrentSpec)}

    def state_bytes(self, item_size: int) -> int:
        """Bytes of a sequence's recurrent state, where a number of the model has `item_size`."""
        return sum(4 * one.matrix_size + item_size * one.tail_size for one in self.recurrent_layers.values())

    @property
    def attention(self) -> AttentionSpec:
        """The first layer's that has one; `has_one_shape` says whether all layers have its sizes."""
        return self.attentions[0]

    @cached_property
    def has_one_shape(self) -> bool:
        """Whether the heads of all layers have the same sizes, which `num_heads` and its neighbours are."""
        return len({(one.num_heads, one.num_kv_heads, one.head_dim) for one in self.attentions}) <= 1

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def qkv_size(self) -> int:
        return self.attention.qkv_size

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer with attention: keys a query sees, itself included; None = all."""
        return tuple(attention.window for attention in self.attentions)

    @cached_property
    def intermediate_size(self) -> int:
        """The largest of the layers."""
        return max((feed.intermediate_size for feed in self.feeds()), default=0)

    def feeds(self) -> Iterator[FeedSpec]:
        """The feed-forward networks that are no experts."""
        return (layer.feed for layer in self.layers if isinstance(layer.feed, FeedSpec))

    @cached_property
    def mixtures(self) -> tuple[MoeSpec, ...]:
        """The experts of each layer that has some."""
        return tuple(layer.feed for layer in self.layers if isinstance(layer.feed, MoeSpec))

    @property
    def longest_on_request(self) -> int:
        """The longest sequence that a setting may ask for: rotary scaling may stretch the trained length."""
        stretched = [rope.factor for rope in self.ropes if rope.kind in ("linear", "dynamic")]
        longest = (
            min(stretched) * self.max_position_embeddings if len(stretched) == len(self.ropes) and stretched else 0
        )
        return max(self.max_position_embeddings, int(longest))
