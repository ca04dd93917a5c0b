"""The least time that steps can take: what they must read and compute, over what the device reads and computes.

Weights are read once a step, but for an untied input embedding, of which a step reads rows; keys and values once a
token of context. The matrix products come before and behind attention, so the two floors add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.kernels.checks.roofline import seen_pairs
from tests.bench.shapes import SHAPES

GPU_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": SHAPES["qwen3-0.6b"],
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
ELEMENT_BYTES = 2  # bfloat16, weights and cache


@dataclass(frozen=True, slots=True)
class Device:
    """What a device does at its best, as measured."""

    bytes_per_s: float
    flops_per_s: float


H200 = Device(4.3e12, 790e12)  # a copy, and a bfloat16 product of 8192 squared: published, not ours
# The others: the same shares of what their data sheets say, 0.9 of the memory's rate and 0.8 of the arithmetic's.
CARDS = {
    "H200": H200,
    "H100": Device(3.0e12, 790e12),  # SXM: an H200 with less memory, and slower
    "H100 NVL": Device(3.5e12, 670e12),
    "H100 PCIe": Device(1.8e12, 600e12),
    "A100-SXM4-80GB": Device(1.83e12, 250e12),
    "A100 80GB": Device(1.74e12, 250e12),  # PCIe
    "A100": Device(1.4e12, 250e12),  # with 40 GB
}


def card_of(name: str, rows: Iterable[Mapping[str, Any]] = ()) -> Device:
    """What times are held against on a card of that name: the table's, else what the part `card` has measured, else an
    H200's. A slice of a card is not the card."""
    known = [key for key in CARDS if key in name and "MIG" not in name]
    if known:
        return CARDS[max(known, key=len)]
    ceilings: dict[str, float] = {}
    for row in (row["row"] for row in rows if row["part"] == "card" and "row" in row):
        ceilings |= {key: row[key] for key in ("bytes_per_s", "flops_per_s") if key in row}
    return Device(**ceilings) if len(ceilings) == 2 else H200


def num_streamed(shape: dict[str, Any]) -> int:
    """Weights that a step reads, norms left out."""
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    queries, groups = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    layer = hidden * (queries + 2 * groups) + queries * hidden + 3 * hidden * shape["intermediate_size"]
    return int(shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden)


def kv_bytes(shape: dict[str, Any]) -> int:
    """Keys and values of one token, all layers."""
    numbers = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return int(numbers * ELEMENT_BYTES)


def decode_floor_s(shape: dict[str, Any], num_rows: int, context: float, device: Device = H200) -> float:
    """A step of `num_rows` sequences that have `context` tokens each."""
    weights = num_streamed(shape)
    products = max(ELEMENT_BYTES * weights / device.bytes_per_s, 2 * weights * num_rows / device.flops_per_s)
    return products + num_rows * context * kv_bytes(shape) / device.bytes_per_s


def prefill_floor_s(shape: dict[str, Any], num_tokens: int, device: Device = H200) -> float:
    """A step that is one prompt: its products and, behind them, its attention by arithmetic; one row of logits."""
    head = shape["vocab_size"] * shape["hidden_size"]
    products = 2 * (num_streamed(shape) - head) * num_tokens + 2 * head
    width = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    attention = 4 * seen_pairs(num_tokens, num_tokens) * width
    read = ELEMENT_BYTES * num_streamed(shape) / device.bytes_per_s
    return max(read, products / device.flops_per_s) + attention / device.flops_per_s


def stream_floor_s(shape: dict[str, Any], requests: Sequence[tuple[int, int]], device: Device = H200) -> float:
    """Requests of (prompt, answer) tokens that all begin at once: their prompts, and then a step for each token of the
    longest answer, of the sequences that still run."""
    prompts = sum(prefill_floor_s(shape, num_prompt, device) for num_prompt, _ in requests)
    steps = 0.0
    for step in range(1, max(num_answer for _, num_answer in requests)):
        lengths = [num_prompt + step for num_prompt, num_answer in requests if num_answer > step]
        steps += decode_floor_s(shape, len(lengths), sum(lengths) / len(lengths), device)
    return prompts + steps
