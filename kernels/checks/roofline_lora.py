"""The least bytes and operations of the kernels of LoRA; see `roofline.py`.

A step of `num_tokens` tokens with adapters, each of `num_adapters` of rank `rank` in all parts of a linear. An adapter
is read once, however many tokens have it.
"""

from __future__ import annotations

from ..layout.lora_lists import TILE
from .roofline import LaunchCost

SUM, INDEX = 4, 4  # bytes of an f32 and an i32


def group_tokens(num_tokens: int, num_tiles: int) -> LaunchCost:
    """Reads the adapter of each token, and writes the order and the tiles."""
    return LaunchCost(INDEX * (2 * num_tokens + TILE * num_tiles + 2), 0)


def lora_shrink(
    num_tokens: int, num_adapters: int, num_parts: int, rank: int, num_inner: int, element_size: int
) -> LaunchCost:
    """Reads the inputs and A, and writes a sum for each token and rank."""
    width = num_parts * rank
    num_bytes = (num_tokens + num_adapters * width) * num_inner * element_size + num_tokens * width * SUM
    return LaunchCost(num_bytes, 2 * num_tokens * width * num_inner)


def lora_add(
    num_tokens: int, num_adapters: int, num_parts: int, rank: int, num_outputs: int, element_size: int
) -> LaunchCost:
    """Reads the sums, B and the outputs, and writes these."""
    num_bytes = (
        2 * num_tokens + num_adapters * rank
    ) * num_outputs * element_size + num_tokens * num_parts * rank * SUM
    return LaunchCost(num_bytes, 2 * num_tokens * rank * num_outputs)


def lora_gated(num_tokens: int, num_adapters: int, rank: int, num_inner: int, element_size: int) -> LaunchCost:
    """As `lora_add` to a product of gate and up, of which half as many numbers are written. Operations of SiLU."""
    added = lora_add(num_tokens, num_adapters, 2, rank, 2 * num_inner, element_size)
    unwritten = num_tokens * num_inner * element_size
    return LaunchCost(added.num_bytes - unwritten, added.num_flops + 5 * num_tokens * num_inner)
