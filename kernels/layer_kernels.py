"""The interfaces of the kernels that some layers need besides: of LoRA, experts, recurrent states and latents.

Letters in shapes: see `kernel_set.py`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .layout.experts import RoutedExperts
from .layout.layer_options import Activation
from .layout.lora_lists import LoraLists, LoraWeights
from .layout.work_lists import AttentionPlan
from .reference.recurrent import SequenceRows


class LoraKernels(Protocol):
    """The kernels of LoRA for adapters in device slots: see `layout/lora_lists.py`.

    All read what differs between steps from memory, so that a CUDA graph serves every mix of adapters.
    """

    def group_tokens(self, adapters: Tensor, lists: LoraLists) -> None:
        """Lists the tokens of a step by adapter, made once a step and passed to the three kernels below as `lists`.

        adapters  [T] i32   the adapter slot of each token; 0 = the base model
        lists               for T tokens: see `kernels/layout/lora_lists.py`; overwritten
        """

    def lora_shrink(self, x: Tensor, weights: LoraWeights, lists: LoraLists) -> Tensor:
        """The first half of an update: A x of the tokens of adapters.

        x        [T, K]   contiguous in K
        weights           as x

        Returns partial sums [C, T, P * R] f32, C = `num_sums`, each token's at its place in `lists.order`; undefined
        beyond the rank of a part, and for tokens of the base model.
        """

    def lora_add(self, out: Tensor, sums: Tensor, weights: LoraWeights, lists: LoraLists) -> None:
        """The second half: adds B (A x) to the tokens of adapters in place, rounded once.

        out   [T, M]   contiguous in M: the product of the linear, or a residual with it
        sums           of `lora_shrink`
        """

    def lora_gated(
        self,
        product: Tensor,
        sums: Tensor,
        weights: LoraWeights,
        lists: LoraLists,
        activation: Activation,
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> Tensor:
        """As `lora_add` to `product` [T, 2F], then `gated`, for all tokens in one launch.

        product  [T, 2F]   gate first; may be overwritten

        Returns [T, F] as product.
        """


class ExpertKernels(Protocol):
    """The kernels of layers with experts."""

    def routed_experts(self, x: Tensor, logits: Tensor, experts: RoutedExperts) -> Tensor:
        """The experts that tokens are routed to, each token's added by weight in the order of rank.

        x        [T, K]       contiguous in K
        logits   [T, E] f32   of the router, its bias included; see `kernels/reference/experts.py`

        An expert's output is rounded to x's type, then multiplied by its weight and added in f32. Triton reads no
        number on the host, and does not let a row's bits depend on the others with `is_batch_invariant`.

        Returns [T, K] f32.
        """


class RecurrentKernels(Protocol):
    """The kernels of recurrent layers, over states by slot, which they change in place.

    A sequence that begins with its first token reads zeros, whatever its slot holds. One without tokens in the step
    leaves its slot alone. Behind the tokens of the last sequence a step may have others, of none: what is returned for
    those are some finite numbers.
    """

    def causal_conv(self, x: Tensor, tails: Tensor, weight: Tensor, bias: Tensor | None, step: SequenceRows) -> Tensor:
        """A convolution over the last W tokens, each channel for itself.

        x        [T, C]             the step's tokens; contiguous in C
        tails    [slots, W - 1, C]  the tokens before, by slot, oldest first; replaced by those before the next step
        weight   [C, W]             the newest token's is the last
        bias     [C] or None

        Returns [T, C] f32.
        """

    def recur(
        self,
        states: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        step: SequenceRows,
    ) -> Tensor:
        """A linear recurrence with a matrix as its state, for each head.

        H heads of values in groups over G heads of keys. For each token, with its own numbers:
        state = exp(log_decay) * state + outer(k, u); out = q @ state.
        u = v, as in Mamba-2; with `beta`, u = beta * (v - k @ state), the delta rule, where the state has decayed
        already.

        states     [slots, H, K, V]  f32, replaced by those after the step
        q, k       [T, G, K]         f32
        v          [T, H, V]         f32
        log_decay  [T, H]            f32, at most 0
        beta       [T, H] or None    f32

        Returns [T, H, V] f32.
        """

    def delta_inputs(
        self,
        mixed: Tensor,
        step: Tensor,
        rate: Tensor,
        decay: Tensor,
        step_bias: Tensor,
        groups: int,
        key_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the delta rule reads, all in f32.

        mixed            [T, 2 G K + H V] f32   queries, keys and values from the convolution, before SiLU
        step, rate       [T, H]                 of the layer's products; any strides over rows
        decay, step_bias [H] f32                decay below 0

        Returns q, k [T, G, K], of length K ** -0.5 and 1; v [T, H, V]; log_decay [T, H] = decay * softplus(step +
        step_bias); beta [T, H] = sigmoid(rate).
        """

    def mamba_inputs(
        self,
        mixed: Tensor,
        step: Tensor,
        decay: Tensor,
        step_bias: Tensor,
        step_limit: tuple[float, float],
        groups: int,
        key_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What Mamba-2 reads, all in f32. As `delta_inputs`, but for

        mixed       [T, H V + 2 G K] f32   values, keys and queries
        step_limit                         of softplus(step + step_bias), at least and at most

        Returns q, k [T, G, K]; x [T, H, V] the values; v [T, H, V] = x times the step; log_decay [T, H].
        """

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, is_gated_first: bool) -> Tensor:
        """An RMS norm over each of N groups, and a gate by SiLU, after the norm or before it.

        x       [T, N, D] f32
        gate    [T, N * D]      any strides over rows
        weight  [D], or [N * D]

        Returns [T, N * D] as gate.
        """


class LatentKernels(Protocol):
    """The kernels of attention over latents in its absorbed form: see `kernels/reference/latents.py`.

    R  numbers of a latent       E  numbers of the rotated key       W  numbers of a head's value
    A  numbers of a head's query and key that are not rotated
    """

    def latent_prologue(
        self,
        q: Tensor,
        latents: Tensor,
        rotated: Tensor,
        key_up: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Queries for the cache, [T, H, R + E] as q, and the cache write of the new tokens.

        q             [T, H, A + E]      the last E numbers of a head are rotated, in halves; contiguous in a head
        latents       [T, R]             as q, normed
        rotated       [T, E]             as q, not yet rotated; any strides over rows
        key_up        [H, A, R]          as q
        cos, sin      [P, E / 2] f32
        positions     [T] i64
        cache         [N, 1, B, R + E]   as q, one layer's; any strides
        slot_mapping  [T] i64            as in `attention_prologue`
        """

    def latent_attention(
        self,
        q: Tensor,
        cache: Tensor,
        rank: int,
        block_tables: Tensor,
        query_starts: Tensor | None,
        lengths: Tensor,
        scale: float,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Attention of `paged_attention`, or of `paged_decode` without `query_starts`, whose values are latents.

        q      [T, H, R + E]      of `latent_prologue`
        cache  [N, 1, B, R + E]   keys, whose first R = `rank` numbers are values
        plan                      for an `AttentionShape` with R as its `head_dim`, and E as its `extra_dim`

        Returns [T, H, R or more]: the first R numbers of a head count.
        """

    def latent_values(self, seen: Tensor, value_up: Tensor) -> Tensor:
        """What each head sees, [T, H * W], of the latents that it sees.

        seen      [T, H, R or more]   the first R numbers count
        value_up  [H, W, R]           as seen
        """
