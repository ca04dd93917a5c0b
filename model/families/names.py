"""Where the tensors of a decoder lie in its checkpoint: names, rows of fused matrices, orders of rows.

The decoders know *canonical* tensors, under the names that Llama's checkpoints have and a few more; `tensors_of` lists
them with their shapes. A family says where each comes from with a `Names`: canonical stem -> stem in the checkpoint, or
`Rows` of a tensor there. A stem is a name without `.weight` or `.bias`, with `*` for the number of the layer, and a
second one for that of an expert; a whole name says where only a weight or a bias lies. A family leaves out the stems
that have their canonical name.

Rotary positions: the decoders rotate number i of a head with number i + half. A checkpoint that rotates neighbours
(2i, 2i + 1) has the rows of queries and keys in another order, and `halves` puts them right. Scores do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import (
    AttentionSpec,
    DecoderSpec,
    FeedSpec,
    LatentSpec,
    LayerSpec,
    MoeSpec,
    NormSpec,
    PerLayerInputs,
    RecurrentSpec,
)

Shape = tuple[int, ...]
Stems = tuple[str, str, str]  # of gate, up and down
Index = slice | NDArray[np.int64]
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"
POSITIONS, EMBEDDING_NORM = "model.embed_positions", "model.embed_layernorm"
LAYER = "model.layers.*"
PRE_MIXER, POST_MIXER = f"{LAYER}.input_layernorm", f"{LAYER}.post_mixer_layernorm"
PRE_FEED, POST_FEED = f"{LAYER}.post_attention_layernorm", f"{LAYER}.post_feed_layernorm"
Q, K, V, OUTPUT = (f"{LAYER}.self_attn.{name}_proj" for name in "qkvo")
Q_NORM, K_NORM, SINKS = (f"{LAYER}.self_attn.{name}" for name in ("q_norm", "k_norm", "sinks"))
# Of latents: products into the ranks, with their norms, and out of them
Q_DOWN, KV_DOWN = f"{LAYER}.self_attn.q_a_proj", f"{LAYER}.self_attn.kv_a_proj_with_mqa"
Q_DOWN_NORM, KV_DOWN_NORM = f"{LAYER}.self_attn.q_a_layernorm", f"{LAYER}.self_attn.kv_a_layernorm"
Q_UP, KV_UP = f"{LAYER}.self_attn.q_b_proj", f"{LAYER}.self_attn.kv_b_proj"
DENSE = GATE, UP, DOWN = f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj"
ACTIVATION = f"{LAYER}.mlp.act_alpha"  # the two numbers of xIELU
ROUTER, CHOICE_BIAS = f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate.e_score_correction_bias"
ROUTER_NORM, EXPERT_SCALE = f"{LAYER}.mlp.gate_norm", f"{LAYER}.mlp.expert_scale"
OWN_NORMS = PRE_EXPERTS, POST_EXPERTS, POST_DENSE = (
    f"{LAYER}.pre_experts_layernorm",
    f"{LAYER}.post_experts_layernorm",
    f"{LAYER}.post_dense_layernorm",
)
OUTPUT_SCALE = f"{LAYER}.output_scale"
# What each layer gets of a token besides the residual: the table and W of `PerLayerInputs`, then a layer's part
PER_LAYER, PER_LAYER_PROJECTION, PER_LAYER_NORM = (
    f"model.per_layer.{name}" for name in ("embed_tokens", "projection", "norm")
)
INPUT_GATE, INPUT_UP, INPUT_NORM = (f"{LAYER}.per_layer.{name}" for name in ("gate_proj", "up_proj", "norm"))
EXPERT = f"{LAYER}.mlp.experts.*"
EXPERT_GATE, EXPERT_UP, EXPERT_DOWN = f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj", f"{EXPERT}.down_proj"
SHARED_EXPERT = f"{LAYER}.mlp.shared_experts"
SHARED = SHARED_GATE, SHARED_UP, SHARED_DOWN = (
    f"{SHARED_EXPERT}.gate_proj",
    f"{SHARED_EXPERT}.up_proj",
    f"{SHARED_EXPERT}.down_proj",
)
SHARED_ROUTER = f"{LAYER}.mlp.shared_expert_gate"
OUTPUT_GATE = f"{LAYER}.self_attn.gate_proj"
# Of a recurrent layer: what the convolution reads, gate, step and rate of a head; then the vectors, a number a head
MIXED, MIX_GATE, MIX_STEP, MIX_RATE = (f"{LAYER}.recurrent.{name}_proj" for name in ("in", "gate", "step", "rate"))
MIX_CONV, MIX_NORM, MIX_OUTPUT = (f"{LAYER}.recurrent.{name}" for name in ("conv", "norm", "out_proj"))
DECAY, STEP_BIAS, SKIP = (f"{LAYER}.recurrent.{name}" for name in ("decay", "step_offset", "skip"))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a checkpoint's tensor that become a canonical tensor, or a part of it."""

    stem: str
    rows: Index | None = None  # of the tensor, in the canonical order; None = all, in its order
    is_transposed: bool = False  # stored [columns, rows], as GPT-2's Conv1D; `rows` counts after transposing
    apply: Callable[[NDArray[Any]], NDArray[Any]] | None = None  # to the numbers in float32
    suffix: str | None = None  # of the tensor's name, with its dot; None = that of the canonical tensor
    shape: Shape | None = None  # as stored, of a tensor whose numbers are read one after another; None = as canonical
    num_stacked: int = 0  # experts that the tensor holds, [E, ...]; the rest says what is taken of one; 0 = no axis E
    own: int | None = None  # the expert that is taken, which the canonical name says


Source = str | Rows | tuple[Rows, ...]  # parts are stacked by rows, and need `rows` or one row each
Names = Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class Target:
    """A canonical tensor."""

    name: str
    shape: Shape
    norm: NormSpec | None = None  # of a norm's weight or bias


def tensors_of(spec: DecoderSpec) -> Iterator[Target]:
    """Every canonical tensor of a decoder, in the order of layers."""
    hidden, positions = spec.hidden_size, spec.embedding.positions
    yield Target(f"{EMBEDDING}.weight", (spec.vocab_size, hidden))
    if positions is not None:
        yield Target(f"{POSITIONS}.weight", (positions.rows, hidden))
    yield from _norm(EMBEDDING_NORM, hidden, spec.embedding.norm)
    per_layer = spec.embedding.per_layer
    if per_layer is not None:
        size = spec.num_layers * per_layer.width
        yield Target(f"{PER_LAYER}.weight", (per_layer.rows, size))
        yield Target(f"{PER_LAYER_PROJECTION}.weight", (size, hidden))
        yield from _norm(PER_LAYER_NORM, per_layer.width, per_layer.norm)
    for index, layer in enumerate(spec.layers):
        for target in (*_layer(layer, hidden), *_layer_input(per_layer, hidden)):
            yield Target(target.name.replace("*", str(index)), target.shape, target.norm)
    yield from _norm(FINAL_NORM, hidden, spec.final_norm)
    if spec.head.exists and not spec.head.is_tied:
        yield Target(f"{HEAD}.weight", (spec.vocab_size, hidden))
    if spec.head.exists and spec.head.has_bias:
        yield Target(f"{HEAD}.bias", (spec.vocab_size,))


def _layer(layer: LayerSpec, hidden: int) -> Iterator[Target]:
    yield from _norm(PRE_MIXER, hidden, layer.pre_mixer)
    if isinstance(layer.mixer, AttentionSpec):
        yield from _attention(layer.mixer, hidden)
    elif isinstance(layer.mixer, LatentSpec):
        yield from _latent(layer.mixer, hidden)
    elif isinstance(layer.mixer, RecurrentSpec):
        yield from _recurrent(layer.mixer, hidden)
    yield from _norm(POST_MIXER, hidden, layer.post_mixer)
    yield from _norm(PRE_FEED, hidden, layer.pre_feed)
    if isinstance(layer.feed, FeedSpec):
        yield from _feed(layer.feed, hidden, DENSE)
    elif layer.feed is not None:
        yield from _experts(layer.feed, hidden)
    yield from _norm(POST_FEED, hidden, layer.post_feed)
    if layer.has_output_scale:
        yield Target(OUTPUT_SCALE, (1,))


def _layer_input(per_layer: PerLayerInputs | None, hidden: int) -> Iterator[Target]:
    if per_layer is not None:
        yield from _linear(INPUT_GATE, per_layer.width, hidden, has_bias=False)
        yield from _linear(INPUT_UP, hidden, per_layer.width, has_bias=False)
        yield from _norm(INPUT_NORM, hidden, per_layer.norm)


def _attention(attention: AttentionSpec, hidden: int) -> Iterator[Target]:
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    value_dim = attention.value_dim or dim
    sizes = {Q: heads * dim, K: kv_heads * dim, V: kv_heads * value_dim}
    for stem in qkv_of(attention):
        yield from _linear(stem, sizes[stem], hidden, attention.has_qkv_bias)
    if attention.qk_norm is not None:
        norm = attention.qk_norm
        is_whole = norm.over == "row" or norm.has_weight_per_head
        for stem, count in ((Q_NORM, heads), (K_NORM, kv_heads))[: 1 if attention.kv_of is not None else 2]:
            yield from _norm(stem, count * dim if is_whole else dim, norm.norm)
    if attention.has_sinks:
        yield Target(SINKS, (heads,))
    if attention.has_output_gate:
        yield from _linear(OUTPUT_GATE, heads * value_dim, hidden, attention.has_qkv_bias)
    yield from _linear(OUTPUT, hidden, heads * value_dim, attention.has_output_bias)


def qkv_of(attention: AttentionSpec) -> tuple[str, ...]:
    """The projections of an attention's input, in the order of their rows in one matrix: stems."""
    if attention.kv_of is not None:
        return (Q,)
    return (Q, K) if attention.is_k_v else (Q, K, V)


def _latent(mixer: LatentSpec, hidden: int) -> Iterator[Target]:
    if mixer.q_rank is None:
        yield from _linear(Q, mixer.query_size, hidden, mixer.has_bias)
    else:
        yield from _linear(Q_DOWN, mixer.q_rank, hidden, mixer.has_bias)
        yield from _norm(Q_DOWN_NORM, mixer.q_rank, mixer.norm)
        yield from _linear(Q_UP, mixer.query_size, mixer.q_rank, False)
    yield from _linear(KV_DOWN, mixer.kv_rank + mixer.rope_dim, hidden, mixer.has_bias)
    yield from _norm(KV_DOWN_NORM, mixer.kv_rank, mixer.norm)
    yield from _linear(KV_UP, mixer.num_heads * (mixer.nope_dim + mixer.value_dim), mixer.kv_rank, False)
    yield from _linear(OUTPUT, hidden, mixer.num_heads * mixer.value_dim, mixer.has_output_bias)


def projections(mixer: RecurrentSpec) -> dict[str, int]:
    """The projections of a recurrent layer's input, in the order of their rows in one matrix: stem -> rows."""
    heads, channels = mixer.num_value_heads, mixer.conv_channels
    if mixer.kind == "short_conv":
        return {MIXED: 3 * channels}  # two gates, before and after the convolution, and what it reads
    rate = {MIX_RATE: heads} if mixer.kind == "gdn" else {}
    return {MIX_GATE: mixer.inner_size, MIXED: channels, MIX_STEP: heads} | rate


def _recurrent(mixer: RecurrentSpec, hidden: int) -> Iterator[Target]:
    heads = mixer.num_value_heads
    for stem, size in projections(mixer).items():
        yield from _linear(stem, size, hidden, mixer.has_bias)
    yield from _linear(MIX_CONV, mixer.conv_channels, mixer.conv_width, mixer.has_conv_bias)
    if mixer.kind != "short_conv":
        yield from (Target(stem, (heads,)) for stem in (DECAY, STEP_BIAS))
    if mixer.kind == "mamba2":
        yield Target(SKIP, (heads,))
    if mixer.norm is not None:
        yield from _norm(MIX_NORM, mixer.value_dim if mixer.norm_group is None else mixer.inner_size, mixer.norm)
    yield from _linear(MIX_OUTPUT, hidden, mixer.inner_size, mixer.has_bias)


def _feed(feed: FeedSpec, hidden: int, stems: Stems) -> Iterator[Target]:
    """`stems`: of gate, up and down."""
    inner, (gate, up, down) = feed.intermediate_size, stems
    if feed.is_gated:
        yield from _linear(gate, inner, hidden, feed.has_bias)
    yield from _linear(up, inner, hidden, feed.has_bias)
    yield from _linear(down, hidden, inner, feed.has_bias)
    if feed.activation == "xielu":
        yield Target(ACTIVATION, (2,))


def _experts(moe: MoeSpec, hidden: int) -> Iterator[Target]:
    yield from _linear(ROUTER, moe.num_experts, hidden, moe.router.has_bias)
    if moe.router.has_choice_bias:
        yield Target(CHOICE_BIAS, (moe.num_experts,))
    yield from _norm(ROUTER_NORM, hidden, moe.router.input_norm)
    if moe.router.has_expert_scale:
        yield Target(EXPERT_SCALE, (moe.num_experts,))
    for stem in OWN_NORMS:
        yield from _norm(stem, hidden, moe.own_norms)
    for feed, stems in _networks(moe):
        yield from _feed(feed, hidden, stems)
    if moe.has_shared_gate:
        yield Target(f"{SHARED_ROUTER}.weight", (1, hidden))


def feeds_of(layer: LayerSpec) -> Iterator[tuple[FeedSpec, Stems]]:
    """The feed-forward networks of a layer, each with its stems of gate, up and down: one, or those of experts."""
    if isinstance(layer.feed, FeedSpec):
        yield layer.feed, DENSE
    elif layer.feed is not None:
        yield from _networks(layer.feed)


def _networks(moe: MoeSpec) -> Iterator[tuple[FeedSpec, Stems]]:
    for expert in range(moe.num_experts):
        gate, up, down = (of_expert(stem, expert) for stem in (EXPERT_GATE, EXPERT_UP, EXPERT_DOWN))
        yield moe.expert, (gate, up, down)
    if moe.shared is not None:
        yield moe.shared, SHARED
    if moe.dense_beside is not None:
        yield moe.dense_beside, DENSE


def of_expert(name: str, expert: int) -> str:
    """The name of an expert's tensor or stem, of which the layer may be open: `EXPERT_GATE` and the like."""
    return name.replace("experts.*", f"experts.{expert}")


def _linear(stem: str, rows: int, columns: int, has_bias: bool) -> Iterator[Target]:
    yield Target(f"{stem}.weight", (rows, columns))
    if has_bias:
        yield Target(f"{stem}.bias", (rows,))


def _norm(stem: str, size: int, norm: NormSpec | None) -> Iterator[Target]:
    if norm is not None and norm.weight != "none":
        yield Target(f"{stem}.weight", (size,), norm)
    if norm is not None and norm.has_bias:
        yield Target(f"{stem}.bias", (size,), norm)


# -- orders of rows, for `Rows.rows`


def halves(num_heads: int, head_dim: int, rotary_dim: int | None = None) -> NDArray[np.int64]:
    """The rows of heads whose neighbours rotate together, in the order in which halves do.

    Of each head's first `rotary_dim` rows (None = all) first the even ones, then the odd ones; the rest stays.
    """
    rotated = head_dim if rotary_dim is None else rotary_dim
    head = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, head_dim)])
    rows: NDArray[np.int64] = (np.arange(num_heads)[:, None] * head_dim + head).reshape(-1)
    return rows


def interleaved(attention: AttentionSpec, rotary_dim: int) -> Names:
    """Queries and keys of a checkpoint that rotates the neighbours in the first `rotary_dim` rows of a head."""
    dim = attention.head_dim
    return {
        Q: Rows(Q, halves(attention.num_heads, dim, rotary_dim)),
        K: Rows(K, halves(attention.num_kv_heads, dim, rotary_dim)),
    }


def interleaved_latents(mixer: LatentSpec) -> Names:
    """Queries and rotated keys of a checkpoint that rotates neighbours, behind the numbers that do not rotate."""
    rotated, queries = halves(1, mixer.rope_dim), Q if mixer.q_rank is None else Q_UP
    head = np.concatenate([np.arange(mixer.nope_dim), mixer.nope_dim + rotated])
    rows = (np.arange(mixer.num_heads)[:, None] * len(head) + head).reshape(-1)
    keys = np.concatenate([np.arange(mixer.kv_rank), mixer.kv_rank + rotated])
    return {queries: Rows(queries, rows), KV_DOWN: Rows(KV_DOWN, keys)}


def stacked(*sizes: int) -> list[slice]:
    """The rows of parts that lie one after another."""
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def fused_qkv(attention: AttentionSpec, *, is_by_group: bool = False) -> tuple[Index, Index, Index]:
    """The rows of queries, keys and values in one matrix.

    One after another, [q; k; v]. With `is_by_group` the queries of each key/value head come before its key and value,
    [G, H / G + 2, D]; without groups of heads that is [H, 3, D].
    """
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    if not is_by_group:
        q, k, v = stacked(heads * dim, kv_heads * dim, kv_heads * dim)
        return q, k, v
    rows = np.arange((heads + 2 * kv_heads) * dim).reshape(kv_heads, heads // kv_heads + 2, dim)
    return rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)


def fused_gate_up(spec: DecoderSpec) -> Names:
    """Gate and up as the halves of one matrix, `gate_up_proj`."""
    return split(f"{LAYER}.mlp.gate_up_proj", (GATE, UP), tuple(stacked(*[spec.intermediate_size] * 2)))


def split(stem: str, targets: tuple[str, ...], rows: tuple[Index, ...], *, is_transposed: bool = False) -> Names:
    """The canonical stems `targets` as rows of one fused tensor."""
    return {target: Rows(stem, index, is_transposed) for target, index in zip(targets, rows, strict=True)}


# -- recurrent layers


def conv_rows(mixer: RecurrentSpec, stem: str, order: Index | None = None) -> Rows:
    """The weight of a convolution, [C, W], stored as [C, 1, W]; `order`: of the channels."""
    channels, width = mixer.conv_channels, mixer.conv_width

    def squeezed(numbers: NDArray[Any]) -> NDArray[Any]:
        return numbers.reshape(channels, width)[slice(None) if order is None else order]

    return Rows(stem, apply=squeezed, shape=(channels, 1, width))


def negative_exp(numbers: NDArray[Any]) -> NDArray[Any]:
    """-exp(x): the decay of a state, of which checkpoints store the logarithm."""
    decay: NDArray[Any] = -np.exp(numbers)
    return decay
