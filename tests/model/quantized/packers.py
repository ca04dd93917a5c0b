"""Packs random numbers as each quantized format stores them, beside the weight [N, K] that they stand for.

Written from the formats' descriptions, one number after the other, as a check on the unpackers' array code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]  # by suffix
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds each of eight columns


@dataclass(frozen=True)
class Packed:
    """A packed layer."""

    tensors: Tensors
    weight: np.ndarray  # [N, K] f32


def words_of(codes: np.ndarray, bits: int) -> torch.Tensor:
    """[R, C bits / 32] i32 of codes [R, C]: each row is one long number, whose lowest bits are the first code."""
    num_bytes = 4 * -(-codes.shape[1] * bits // 32)
    rows = [sum(int(code) << (index * bits) for index, code in enumerate(line)) for line in codes]
    raw = b"".join(row.to_bytes(num_bytes, "little") for row in rows)
    return torch.from_numpy(np.frombuffer(raw, "<i4").reshape(len(codes), -1).copy())


def scales_of(dice: np.random.Generator, *shape: int) -> np.ndarray:
    return (dice.uniform(0.01, 0.1, shape)).astype(np.float16).astype(np.float32)


def awq(dice: np.random.Generator, rows: int, columns: int) -> Packed:
    group = 32
    codes = dice.integers(0, 16, (columns, rows))
    zeros, scales = dice.integers(0, 16, (columns // group, rows)), scales_of(dice, columns // group, rows)

    def packed(numbers: np.ndarray) -> torch.Tensor:
        words = np.zeros((len(numbers), rows // 8), np.uint32)
        for index in range(rows):
            words[:, index // 8] |= (numbers[:, index] << (4 * AWQ_PLACES[index % 8])).astype(np.uint32)
        return torch.from_numpy(words.view(np.int32))

    groups = np.arange(columns) // group
    weight = ((codes - zeros[groups]) * scales[groups]).T
    tensors = {".qweight": packed(codes), ".qzeros": packed(zeros), ".scales": torch.from_numpy(scales).half()}
    return Packed(tensors, weight.astype(np.float32))


def gptq(bits: int, *, is_v2: bool = False, has_order: bool = False, is_symmetric: bool = False) -> Packer:
    def pack(dice: np.random.Generator, rows: int, columns: int) -> Packed:
        num_groups = columns // 32
        codes = dice.integers(0, 1 << bits, (columns, rows))
        zeros = dice.integers(0, 1 << bits, (num_groups, rows))
        zeros = np.full_like(zeros, 1 << (bits - 1)) if is_symmetric else zeros
        scales = scales_of(dice, num_groups, rows)
        groups = np.arange(columns) // 32
        groups = dice.permutation(groups) if has_order else groups
        stored_zeros = zeros if is_v2 else (zeros - 1) % (1 << bits)
        tensors = {
            ".qweight": words_of(codes.T, bits).T.contiguous(),
            ".qzeros": words_of(stored_zeros, bits),
            ".scales": torch.from_numpy(scales).half(),
        }
        if has_order:
            tensors[".g_idx"] = torch.from_numpy(groups.astype(np.int32))
        weight = ((codes - zeros[groups]) * scales[groups]).T
        return Packed(tensors, weight.astype(np.float32))

    return pack


def ct_packed(bits: int, *, has_zeros: bool = False, has_order: bool = False, group: int | None = 32) -> Packer:
    def pack(dice: np.random.Generator, rows: int, columns: int) -> Packed:
        num_groups = 1 if group is None else columns // group
        middle = 1 << (bits - 1)
        codes = dice.integers(-middle, middle, (rows, columns))
        zeros = dice.integers(-middle, middle, (rows, num_groups)) if has_zeros else np.zeros((rows, num_groups), int)
        scales = scales_of(dice, rows, num_groups)
        groups = np.arange(columns) // (columns // num_groups)
        groups = dice.permutation(groups) if has_order else groups
        tensors = {
            ".weight_packed": words_of(codes + middle, bits),
            ".weight_scale": torch.from_numpy(scales).bfloat16(),
            ".weight_shape": torch.tensor([rows, columns]),
        }
        scales = tensors[".weight_scale"].float().numpy()
        if has_zeros:
            tensors[".weight_zero_point"] = words_of((zeros + middle).T, bits).T.contiguous()
        if has_order:
            tensors[".weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return Packed(tensors, ((codes - zeros[:, groups]) * scales[:, groups]).astype(np.float32))

    return pack


def ct_int8_zeros(dice: np.random.Generator, rows: int, columns: int) -> Packed:
    """Signed bytes in groups of 64 with a zero point each."""
    codes, zeros = dice.integers(-128, 128, (rows, columns)), dice.integers(-128, 128, (rows, columns // 64))
    scales = scales_of(dice, rows, columns // 64)
    groups = np.arange(columns) // 64
    tensors = {".weight": torch.from_numpy(codes.astype(np.int8)), ".weight_scale": torch.from_numpy(scales)}
    tensors[".weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    return Packed(tensors, ((codes - zeros[:, groups]) * scales[:, groups]).astype(np.float32))


def ct_int8(dice: np.random.Generator, rows: int, columns: int) -> Packed:
    codes, scales = dice.integers(-128, 128, (rows, columns)), scales_of(dice, rows, 1)
    tensors = {".weight": torch.from_numpy(codes.astype(np.int8)), ".weight_scale": torch.from_numpy(scales)}
    return Packed(tensors, (codes * scales).astype(np.float32))


def fp8(kind: str, suffix: str = ".weight_scale") -> Packer:
    """`kind`: a scale for the tensor, a row, or a block of 128 x 128."""

    def pack(dice: np.random.Generator, rows: int, columns: int) -> Packed:
        weight = torch.from_numpy(dice.standard_normal((rows, columns)).astype(np.float32)).to(torch.float8_e4m3fn)
        if kind == "block":
            scales = torch.from_numpy(scales_of(dice, -(-rows // 128), -(-columns // 128)))
            whole = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        else:
            scales = torch.from_numpy(scales_of(dice, *((rows, 1) if kind == "row" else ())))
            whole = scales
        return Packed({".weight": weight, suffix: scales}, (weight.float() * whole).numpy())

    return pack


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def nvfp4(dice: np.random.Generator, rows: int, columns: int) -> Packed:
    """Of compressed-tensors, which divides by the number of the matrix."""
    packed = modelopt_nvfp4(dice, rows, columns).tensors
    whole = torch.tensor([37.5])
    factors = (packed[".weight_scale"].float() / whole).repeat_interleave(16, 1).numpy()
    numbers = fp4_numbers(packed[".weight"].numpy())
    names = {".weight_packed": packed[".weight"], ".weight_scale": packed[".weight_scale"]}
    return Packed(names | {".weight_global_scale": whole}, (numbers * factors).astype(np.float32))


def fp4_numbers(packed: np.ndarray) -> np.ndarray:
    """[N, K] f32 of bytes [N, K / 2]."""
    codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)
    numbers = [(-1 if code & 8 else 1) * E2M1[code & 7] for code in codes.reshape(-1)]
    return np.array(numbers, np.float32).reshape(codes.shape)


def modelopt_nvfp4(dice: np.random.Generator, rows: int, columns: int) -> Packed:
    packed = dice.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    scales = torch.from_numpy(scales_of(dice, rows, columns // 16) * 100).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.0213)
    tensors = {".weight": torch.from_numpy(packed), ".weight_scale": scales, ".weight_scale_2": whole}
    factors = (scales.float() * whole).repeat_interleave(16, 1).numpy()
    return Packed(tensors | {".input_scale": torch.tensor(0.5)}, (fp4_numbers(packed) * factors).astype(np.float32))


# appendix E of the paper of QLoRA
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nf4(*, is_nested: bool, has_own_table: bool = False) -> Packer:
    def pack(dice: np.random.Generator, rows: int, columns: int) -> Packed:
        table = np.array(np.sort(dice.uniform(-1, 1, 16)) if has_own_table else NF4, np.float32)
        codes = dice.integers(0, 16, rows * columns)
        num_blocks = rows * columns // 64
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [rows, columns], "dtype": "bfloat16"}
        tensors = {
            ".weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8)).reshape(-1, 1),
            ".weight.quant_map": torch.from_numpy(table),
        }
        if is_nested:
            outer, inner = scales_of(dice, -(-num_blocks // 256)), np.sort(dice.uniform(-1, 1, 256)).astype(np.float32)
            stored = dice.integers(0, 256, num_blocks).astype(np.uint8)
            state |= {"nested_blocksize": 256, "nested_offset": 0.0625}
            maxima = inner[stored] * outer[np.arange(num_blocks) // 256] + np.float32(0.0625)
            tensors[".weight.absmax"] = torch.from_numpy(stored)
            tensors[".weight.nested_absmax"] = torch.from_numpy(outer)
            tensors[".weight.nested_quant_map"] = torch.from_numpy(inner)
        else:
            maxima = scales_of(dice, num_blocks)
            tensors[".weight.absmax"] = torch.from_numpy(maxima)
        text = json.dumps(state).encode()
        tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
        weight = (table[codes] * maxima[np.arange(rows * columns) // 64]).astype(np.float32)
        return Packed(tensors, weight.reshape(rows, columns))

    return pack


def ct_mxfp4(dice: np.random.Generator, rows: int, columns: int) -> Packed:
    packed = dice.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    exponents = dice.integers(110, 130, (rows, columns // 32)).astype(np.uint8)
    factors = (2.0 ** (exponents.astype(np.float64) - 127)).repeat(32, 1)
    tensors = {".weight_packed": torch.from_numpy(packed), ".weight_scale": torch.from_numpy(exponents)}
    return Packed(tensors, (fp4_numbers(packed) * factors).astype(np.float32))


def llm_int8(dice: np.random.Generator, rows: int, columns: int) -> Packed:
    codes, maxima = dice.integers(-127, 128, (rows, columns)).astype(np.int8), scales_of(dice, rows)
    tensors = {".weight": torch.from_numpy(codes), ".SCB": torch.from_numpy(maxima)}
    return Packed(tensors, codes.astype(np.float32) * (maxima[:, None] / np.float32(127)))


Packer = Callable[[np.random.Generator, int, int], Packed]


def group(**weights: Any) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors with one group."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


PACKERS: dict[str, tuple[dict[str, Any], Packer]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "gptq-2": ({"quant_method": "gptq", "bits": 2, "sym": False}, gptq(2)),
    "gptq-3": ({"quant_method": "gptq", "bits": 3, "sym": False}, gptq(3)),
    "gptq-4-order": ({"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True}, gptq(4, has_order=True)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "sym": False}, gptq(8)),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, is_v2=True),
    ),
    "gptq-v2-named-v1": ({"quant_method": "gptq", "bits": 4, "sym": True}, gptq(4, is_v2=True, is_symmetric=True)),
    "gptq-v1-named-v2": (
        {"quant_method": "gptq", "bits": 4, "sym": True, "checkpoint_format": "gptq_v2"},
        gptq(4, is_symmetric=True),
    ),
    "ct-int4": (group(num_bits=4) | {"format": "pack-quantized"}, ct_packed(4)),
    "ct-int4-rows": (group(num_bits=4) | {"format": "pack-quantized"}, ct_packed(4, group=None)),
    "ct-int4-zeros-order": (
        group(num_bits=4) | {"format": "pack-quantized"},
        ct_packed(4, has_zeros=True, has_order=True),
    ),
    "ct-int3": (group(num_bits=3) | {"format": "pack-quantized"}, ct_packed(3)),
    "ct-int8-packed": (group(num_bits=8) | {"format": "pack-quantized"}, ct_packed(8, has_zeros=True)),
    "ct-int8": (group(num_bits=8) | {"format": "int-quantized"}, ct_int8),
    "ct-int8-zeros": (group(num_bits=8) | {"format": "int-quantized"}, ct_int8_zeros),
    "ct-mxfp4": (group(num_bits=4, type="float") | {"format": "mxfp4-pack-quantized"}, ct_mxfp4),
    "ct-fp8": (group(num_bits=8, type="float") | {"format": "float-quantized"}, fp8("row")),
    "ct-nvfp4": (group(num_bits=4, type="float") | {"format": "nvfp4-pack-quantized"}, nvfp4),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8("block", ".weight_scale_inv")),
    "fp8-tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8("tensor")),
    "fp8-modelopt-rows": ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8("row")),
    "nvfp4-modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8("row")),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(is_nested=False)),
    "nf4-nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(is_nested=True)),
    "fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(is_nested=False, has_own_table=True)),
    "llm-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
}
