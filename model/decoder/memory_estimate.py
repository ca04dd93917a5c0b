"""The memory of a decoder in bytes: its weights, and an estimate of a step's working memory on a CPU.

On a GPU the working memory is measured by running the largest step. On a CPU that would take seconds of each start.
"""

from __future__ import annotations

import torch

from ...kernels.reference.attention_f32 import SCORED_ROWS
from ..spec import AttentionSpec, DecoderSpec, MoeSpec
from .linear import WidenedLinear
from .weights import DecoderWeights

QUERY_TILE = 256  # as in kernels/reference/attention.py: queries whose mask is made at a time
INDEX_BYTES = 40  # of a token of a step: id, position, block, offset and slot


def weights_bytes(weights: DecoderWeights) -> int:
    """Memory of all tensors of the weights; shared memory counts once."""
    sizes: dict[int, int] = {}
    for tensor in weights.tensors():
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        else:  # NOTE: oneDNN's form has no storage; its padding of a few rows is not counted
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def step_bytes(
    config: DecoderSpec, weights: DecoderWeights, num_tokens: int, max_model_len: int, *, is_kv_fp8: bool = False
) -> int:
    """The peak memory of `Decoder.forward` with the torch kernels on a CPU, without logits.

    For a step of `num_tokens` new tokens, in sequences of up to `max_model_len` tokens. At most 10 % above the count of
    torch's profiler for steps of 64 tokens and more. Scratch memory inside oneDNN and SDPA is in neither.
    """
    size = weights.embedding.element_size()
    wide = 4 if isinstance(weights.head, WidenedLinear) else size
    stream = (
        2 * config.hidden_size * size + INDEX_BYTES + 4 * max((rope.dim for rope in config.ropes), default=0)
    )  # residual, x, positions, angles
    if config.embedding.per_layer is not None:  # the inputs, and two that they are the sum of
        stream += 3 * config.num_layers * config.embedding.per_layer.width * size
    experts = [_of_experts(config, moe, size, wide) for moe in dict.fromkeys(config.mixtures)]
    feed = max(3 * config.intermediate_size * wide, *experts, 0)
    by_token = max(feed, _recurrent_bytes(config, wide))
    attend = (
        _attention_bytes(config, one, size, wide, num_tokens, max_model_len, is_kv_fp8=is_kv_fp8)
        for one in set(config.attentions)
    )
    return num_tokens * stream + max(num_tokens * by_token, *attend)


def _attention_bytes(
    config: DecoderSpec,
    layer: AttentionSpec,
    size: int,
    wide: int,
    num_tokens: int,
    max_model_len: int,
    *,
    is_kv_fp8: bool,
) -> int:
    """Bytes of a step in the attention of a layer, from its projection on."""
    context = min(max_model_len, (layer.window or max_model_len) + num_tokens)
    cached = layer.num_kv_heads * layer.head_dim
    heads = layer.num_heads * layer.head_dim + (cached if layer.kv_of is None else 0)  # queries and keys of a token
    qkv = layer.qkv_size + (heads if layer.qk_norm is not None else 0)
    if layer.is_k_v or layer.v_norm is not None:  # values, and a copy with them
        qkv += heads + 2 * cached
    project = config.hidden_size * wide + layer.qkv_size * (wide + size)
    rotate = qkv * size + 8 * heads  # four halves of each head in float32
    for latent in config.latents[:1]:
        joined = (latent.q_rank or 0) + latent.query_size + latent.cached.head_dim
        project = config.hidden_size * wide + joined * (wide + size)
        rotate = (joined + 2 * heads) * size  # queries, and twice what they become for the cache
    attend = (qkv + layer.num_heads * layer.head_dim) * size
    gathered = config.cache_parts * context * cached * size
    hidden = _mask_bytes(layer, size, num_tokens, context)
    if is_kv_fp8:  # keys and values in f32, and two copies in 8 bits during the second gather
        gathered = 10 * context * cached
        rows = min(num_tokens * layer.num_heads, max(SCORED_ROWS, layer.num_heads))
        hidden = 4 * 4 * rows * context  # scores before and after the cap, and two copies of the probabilities
    return max(num_tokens * max(project, rotate), num_tokens * attend + gathered + hidden)


def _recurrent_bytes(config: DecoderSpec, size: int) -> int:
    """Bytes of a token in the largest recurrent layer: its projections, then in f32 the convolution's sums and inputs,
    queries, keys and values in order, and outputs. The copies of states are not counted: see `recurrent_copies`.
    """
    return max(
        (
            (one.conv_channels + one.inner_size) * size + 4 * (4 * one.conv_channels + 3 * one.inner_size)
            for one in config.recurrent_layers.values()
        ),
        default=0,
    )


def recurrent_copies(config: DecoderSpec, num_rows: int) -> int:
    """Bytes of the copies of states, of one layer at a time, in a step of `num_rows` sequences."""
    return 3 * 4 * num_rows * max((one.matrix_size for one in config.recurrent_layers.values()), default=0)


def _of_experts(config: DecoderSpec, moe: MoeSpec, size: int, wide: int) -> int:
    """Bytes of a token in a layer of experts, if all tokens go to the same: see `Experts`."""
    pairs = 4 * moe.top_k * config.hidden_size * size  # inputs and outputs by expert, outputs joined and by token
    beside = [moe.expert, *(feed for feed in (moe.shared, moe.dense_beside) if feed is not None)]
    inner = 3 * max(feed.intermediate_size for feed in beside) * wide
    own = 0 if moe.own_norms is None else 3 * config.hidden_size * size  # what the norms return
    return pairs + inner + own + 3 * 4 * config.hidden_size  # the sum, and two that are added to it, in float32


def _mask_bytes(layer: AttentionSpec, size: int, num_tokens: int, context: int) -> int:
    """The causal mask of a tile of queries: ages (i64) and flags while it is made, then a copy a head of the group.

    The mask of the previous tile counts too.
    """
    repeated = layer.group * size
    making = max(9 + size, size + repeated)
    before = repeated if num_tokens > QUERY_TILE else 0
    return min(num_tokens, QUERY_TILE) * context * (making + before)
