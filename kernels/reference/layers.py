"""Norms and activations in plain PyTorch, on any device. The twins are in `kernels/triton/layers.py`.

The protocol in `kernels/kernel_set.py` says what each kernel takes and returns; the docstrings here say what is special
to this backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout.layer_options import Activation


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `KernelSet.rms_norm`. Takes x of any rank, [..., D], with any strides over rows."""
    size = x.shape[-1]
    if weight is not None and weight.dtype != x.dtype:
        return F.rms_norm(x.float(), (size,), None, eps).mul_(weight).to(x.dtype)
    if x.numel() == size and x.dtype != torch.float32 and x.device.type == "cpu":
        # For a single row the calls dominate, and `F.rms_norm` makes ten of them on a CPU. The mean of (x, -x) is 0,
        # so its layer norm (one call) is the RMS norm of x: 38 us against 67 in bf16 at D = 576 on one 2.5 GHz core.
        # f32 is excluded, as it differs in the last bit.
        normed = F.layer_norm(torch.cat((x, -x), -1), (2 * size,), None, None, eps)[..., :size]
    else:
        normed = F.rms_norm(x, (size,), None, eps)
    return normed.contiguous() if weight is None else weight * normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `KernelSet.add_rms_norm`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See `KernelSet.layer_norm`. Takes x of any rank, as `rms_norm`."""
    size = x.shape[-1:]
    if all(factor is None or (factor.dim() == 1 and factor.dtype == x.dtype) for factor in (weight, bias)):
        return F.layer_norm(x, size, weight, bias, eps)
    normed = F.layer_norm(x.float(), size, None, None, eps)
    if weight is not None:
        normed.mul_(weight)
    if bias is not None:
        normed.add_(bias)
    return normed.to(x.dtype)


def gated(gate_up: Tensor, activation: Activation, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """See `KernelSet.gated`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    gate, up = gate.float(), up.float()
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        out = gate * torch.sigmoid(alpha * gate)
    else:
        out = _function(activation, "gated")(gate)
    return out.mul_(up).to(gate_up.dtype)


def activated(x: Tensor, activation: Activation, params: Tensor | None = None) -> Tensor:
    """See `KernelSet.activated`."""
    if activation != "xielu":
        return _function(activation, "activated")(x)  # each rounds once, at its end
    assert params is not None
    alpha_p, alpha_n = params.unbind()
    wide = x.float()
    negative = (torch.expm1(wide.clamp(max=-1e-6)) - wide) * alpha_n
    return (torch.where(wide > 0, alpha_p * wide * wide, negative) + 0.5 * wide).to(x.dtype)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}


def _function(activation: Activation, kernel: str) -> Callable[[Tensor], Tensor]:
    if activation not in _FUNCTIONS:
        raise ValueError(f"activation = {activation!r}: {kernel} takes {', '.join(_FUNCTIONS)} and " + _OTHERS[kernel])
    return _FUNCTIONS[activation]


_OTHERS = {"gated": "swiglu_clamped", "activated": "xielu"}
