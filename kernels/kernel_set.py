"""The interface of a kernel backend: what each kernel takes and returns, and the choice of a backend by name.

A backend is a folder with a module `kernel_set.py` that offers every member of `KernelSet` and `SamplingKernels` under
the protocol's names: `kernels/reference` in plain PyTorch, `kernels/triton` for GPUs. Triton is imported only if it is
chosen.

Letters in shapes:

    T  new tokens of a step           H  query heads                       N  blocks of the cache
    S  sequences; slots               G  key/value heads, H % G == 0       B  tokens of a block
    L  rows of logits                 D  size of a head, or of a row       M  blocks of a row of a block table
    V  tokens in the vocabulary       P  positions of the rotary tables

Floating tensors are f32, bf16 or f16, of one type in a call; sums are in f32.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, Protocol

import torch
from torch import Tensor

from .layer_kernels import ExpertKernels as ExpertKernels
from .layer_kernels import LatentKernels as LatentKernels
from .layer_kernels import LoraKernels as LoraKernels
from .layer_kernels import RecurrentKernels as RecurrentKernels
from .layout.layer_options import Activation as Activation
from .layout.layer_options import HeadNorms as HeadNorms
from .layout.products import AnyLinear as AnyLinear
from .layout.products import FewRows as FewRows
from .layout.products import RowNorm as RowNorm
from .layout.work_lists import AttentionPlan, AttentionShape
from .reference import kernel_set as torch_kernels
from .sampling_kernels import SamplingKernels as SamplingKernels

BackendName = Literal["torch", "triton"]


class BackendUnavailableError(RuntimeError):
    """The chosen backend cannot run here; the message says what is missing and what to do."""


def load(name: BackendName) -> KernelSet:
    """The decoder's kernels of that backend, ready to call.

    Raises BackendUnavailableError if `triton` is chosen where it is not installed, or where there is neither a GPU nor
    its interpreter (TRITON_INTERPRET=1, set before the process starts).
    """
    if name == "torch":
        return torch_kernels
    if name != "triton":
        raise ValueError(f"attention_backend = {name!r}: must be 'torch' or 'triton'")
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError(
            "attention_backend = triton: the package triton is not installed (it exists for Linux only); "
            "install it with `pip install triton`, or choose attention_backend = torch"
        )
    from .triton import kernel_set as triton_kernels
    from .triton.launch import IS_INTERPRETED

    if not (torch.cuda.is_available() or IS_INTERPRETED):
        raise BackendUnavailableError(
            "attention_backend = triton: no CUDA device is visible to torch; choose attention_backend = torch, or, to "
            "check the kernels slowly on a CPU, start the process with TRITON_INTERPRET=1 and dtype = float32"
        )
    return triton_kernels


def load_sampling(name: BackendName) -> SamplingKernels:
    """The sampling kernels of that backend. `load` checks whether they can run here."""
    if name == "torch":
        return torch_kernels
    from .triton import kernel_set as triton_kernels

    return triton_kernels


def load_lora(name: BackendName) -> LoraKernels:
    """The LoRA kernels of that backend. `load` checks whether they can run here."""
    if name == "torch":
        from .reference import lora_slots

        return lora_slots
    from .triton.lora import launches

    return launches


def load_experts(name: BackendName) -> ExpertKernels:
    """The kernels of experts of that backend. `load` checks whether they can run here."""
    if name == "torch":
        from .reference import experts

        return experts
    from .triton.experts import launches

    return launches


def load_recurrent(name: BackendName) -> RecurrentKernels:
    """The kernels of recurrent layers of that backend. `load` checks whether they can run here."""
    if name == "torch":
        from .reference import recurrent

        return recurrent
    from .triton.recurrent import launches

    return launches


def load_latents(name: BackendName) -> LatentKernels:
    """The kernels of attention over latents of that backend. `load` checks whether they can run here."""
    if name == "torch":
        from .reference import latents

        return latents
    from .triton.latents import launches

    return launches


class KernelSet(Protocol):
    """The kernels of a decoder: norms, activations, rotary positions and cache write, attention, block copies.

    A result is a new, contiguous tensor unless the docstring says otherwise.
    """

    @property
    def name(self) -> BackendName:
        """The backend's name, as `load` takes it."""

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Scales each row to unit mean square, then by `weight`.

        x       [T, D] or [T, H, D]   contiguous in D
        weight  [D] or [H, D]         as x: rounds to x's type before the weight as well, as transformers' Llama does;
                                      f32: rounds at the end only; None = 1

        Returns the shape and type of x.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then `rms_norm(residual)`.

        x, residual  [T, D]   contiguous in D
        weight       [D]      as x

        Returns [T, D] as x.
        """

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Shifts each row to mean 0, scales it to variance 1, then by `weight`, and adds `bias`; rounds at the end.

        x             [T, D] or [T, H, D]   contiguous in D
        weight, bias  [D] or [H, D]         as x, or f32; None = 1, and 0

        Returns the shape and type of x.
        """

    def gated(self, gate_up: Tensor, activation: Activation, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
        """`activation(gate) * up` of a fused projection; rounds at the end, with SiLU before the product as well.

        gate_up     [T, 2F]   gate first
        activation            not xielu; swiglu_clamped is `gate * sigmoid(alpha * gate) * (up + 1)` of a gate of at
                              most `limit`, and of up within +-`limit`

        Returns [T, F] as gate_up.
        """

    def activated(self, x: Tensor, activation: Activation, params: Tensor | None = None) -> Tensor:
        """`activation(x)`, rounded at the end.

        x           [T, F]
        activation           not swiglu_clamped
        params      [2] f32  of xielu: `p * x**2 + x / 2` for x > 0, else `n * (expm1(min(x, -1e-6)) - x) + x / 2`; a
                             checkpoint has the inverse softplus of p and of n - 1/2

        Returns [T, F] as x.
        """

    def norm_linear(self, x: Tensor, norm: RowNorm | None, linear: AnyLinear, few: FewRows | None = None) -> Tensor:
        """`linear(norm(x))`, rounded between as the two calls round.

        x     [T, K]   contiguous in K
        norm           None = x itself
        few            how a kernel of few rows computes it, if this backend has some; None = `linear` does

        Returns [T, N] as x.
        """

    def gated_linear(
        self,
        x: Tensor,
        norm: RowNorm | None,
        linear: AnyLinear,
        activation: Activation,
        alpha: float = 1.702,
        limit: float = 7.0,
        few: FewRows | None = None,
    ) -> Tensor:
        """`gated(linear(norm(x)), activation, alpha, limit)`. The linear has 2F outputs; returns [T, F] as x."""

    def activated_linear(
        self,
        x: Tensor,
        norm: RowNorm | None,
        linear: AnyLinear,
        activation: Activation,
        params: Tensor | None = None,
        few: FewRows | None = None,
    ) -> Tensor:
        """`activated(linear(norm(x)), activation, params)`. Returns [T, F] as x."""

    def linear_add(self, residual: Tensor, x: Tensor, linear: AnyLinear, few: FewRows | None = None) -> Tensor:
        """`residual` [T, N] + `linear(x)`, rounded once. May overwrite `residual`, so use the result instead."""

    def attention_prologue(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        query_factors: Tensor | None = None,
    ) -> Tensor:
        """Norms of heads, rotary positions and the cache write: between a layer's fused projection and its attention.

        The pairs that rotate are the two halves of a head's first D_rot numbers (`rotate_half`, NeoX).

        qkv             [T, H + 2G, D]       queries, keys, values; contiguous in D; may be overwritten, so its content
                                             is undefined afterwards
        norms                                of queries and keys; None = heads are not normed
        cos, sin        [P, D_rot / 2] f32   D_rot <= D; the rest of each head is not rotated; never written to; both
                                             None = no head is rotated
        positions       [T] i64              row of the tables, 0 <= position < P
        k/v_cache       [N, G, B, D]         as qkv, or float8_e4m3fn; one layer's view of the cache; any strides
        slot_mapping    [T] i64              block * B + offset in the block; negative = nothing is written
        k/v_scale       [G] f32              for a float8_e4m3fn cache only: numbers are divided by it, then clamped to
                                             +-448
        query_factors   [P] f32              the queries of position p are multiplied by factor p at last; None = 1

        Returns the queries, [T, H, D] as qkv, contiguous in D; they may share its memory.
        """

    def plan_attention(
        self,
        shape: AttentionShape,
        lengths: Tensor,
        query_starts: Tensor | None,
        num_tokens: int,
        num_processors: int | None = None,
    ) -> AttentionPlan | None:
        """What the attention calls of one step share, made once a step and passed to them as `plan`.

        shape                           of the model's layers, with each of their windows
        lengths         [S] i32         tokens in the cache, the new ones included; 0 is a padding row
        query_starts    [S + 1] i32     as in `paged_attention`; None for `paged_decode`
        num_tokens                      rows of q
        num_processors                  multiprocessors to share the work among; None = the device's

        Returns None if the backend needs no plan. A plan holds for these `lengths` and `query_starts` only.
        """

    def paged_decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None = None,
        *,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        chunk: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Attention of one new token per sequence over its cached tokens.

        q             [S, H, D]      contiguous in D
        k/v_cache     [N, G, B, D]   as q, or float8_e4m3fn; one layer's view of the cache; any strides
        block_tables  [S, M] i32     block ids in token order; entries past the length are never followed
        lengths       [S] i32        tokens in the cache, the new one included; 0 is a padding row
        scale                        multiplies q @ k before the softmax, usually D ** -0.5; above 0 for Triton
        window                       sees only the last `window` tokens, the new one included; None = sees all
        soft_cap                     scores become soft_cap * tanh(score / soft_cap); None = no cap
        sinks         [H] f32        one more score a head in the softmax, without a value; not capped; None = none
        alibi         [H] f32        alibi * (key position - query position) is added to scores; None = 0
                      [H, P] f32     what is added to the scores of the key at each position
        chunk                        sees only tokens of its own chunk, as in positions // chunk; None = sees all
        k/v_scale     [G] f32        keys and values are the cache's numbers times this; None = 1
        plan                         from `plan_attention` for this step; None = made for this call

        Returns [S, H, D] as q; padding rows are zero. The content of unused cache slots, NaN included, has no effect.
        """

    def prologue_decode(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        query_factors: Tensor | None,
        block_tables: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None = None,
        *,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        chunk: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """`paged_decode` of the queries that `attention_prologue` returns: one new token per sequence.

        The arguments are those of the two. The new token of sequence s is row s of qkv, and the last of its `lengths`;
        its slot is where its block table says. Triton does both in one launch for few sequences.

        Returns [S, H, D] as qkv; padding rows are zero.
        """

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None = None,
        *,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        chunk: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Causal attention of each sequence's new tokens over its cached tokens: prefill, chunks, decode, any mix.

        q                         [T, H, D]      new tokens of all sequences, one after another; contiguous in D
        k/v_cache                 [N, G, B, D]   as in `paged_decode`; the new keys and values are already in it
        block_tables              [S, M] i32     block ids in token order; entries past the length are never followed
        query_starts              [S + 1] i32    sequence s owns rows [query_starts[s], query_starts[s + 1]) of q
        lengths                   [S] i32        tokens in the cache, the new ones included; 0 is a padding row
        scale                                    as in `paged_decode`
        window                                   a token sees only the last `window` tokens, itself included; None = all
        soft_cap, sinks, alibi, chunk            as in `paged_decode`
        k/v_scale, plan                          as in `paged_decode`

        With n new tokens, token j sees the cache positions [0, lengths[s] - n + j].

        Returns [T, H, D] as q; rows of padding sequences, and rows past query_starts[S], are zero.
        """

    def copy_blocks(self, data: Tensor, axis: int, sources: Tensor, destinations: Tensor) -> None:
        """Copies whole blocks of the cache, all layers.

        data                   [..., N, ...]  contiguous; axis `axis` counts blocks
        sources, destinations  [C] i64        block `destinations[i]` becomes a copy of block `sources[i]`; no block is
                                              in both
        """
