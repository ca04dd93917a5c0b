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

from .layout.experts import RoutedExperts
from .layout.layer_options import Activation as Activation
from .layout.layer_options import HeadNorms as HeadNorms
from .layout.lora_lists import LoraLists, LoraWeights
from .layout.products import AnyLinear as AnyLinear
from .layout.products import FewRows as FewRows
from .layout.products import RowNorm as RowNorm
from .layout.work_lists import AttentionPlan, AttentionShape
from .reference import kernel_set as torch_kernels
from .reference.recurrent import SequenceRows

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


class SamplingKernels(Protocol):
    """The kernels that edit logits, choose tokens from them and score tokens.

    logits     [L, V]          f32, bf16 or f16, contiguous in V; computed on in f32
    rows       [S, WIDTH] i32  each slot's sampling parameters, as `kernels/layout/sampling_rows.py` packs them
    slots      [L] i32 | i64   the slot of each row of logits; -1 is a padding row
    positions  [L] i32 | i64   the absolute position of the token to choose

    `choose`, `choose_truncated` and `score` read only the beginning of a slot's row, its draw.
    The result for a row depends on that row alone: not on the number, the content or the order of the others. A row is
    *broken* if it has no finite maximum: if it holds NaN or +inf, or only -inf.
    """

    def choose(self, logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """One token for each row: the likeliest at temperature 0, else one drawn by its probability.

        Cuts are ignored. A token is drawn in two steps, both by the maximum of log-probability and
        Gumbel noise: a group of 128 tokens, then one token in it. The noise is a function of seed, position and group
        or token (`gumbel` in `kernels/reference/sampling.py`).

        Returns token ids [L] i64, the lowest of the likeliest at temperature 0; -1 for a broken row, 0 for padding.
        """

    def choose_truncated(self, logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `choose`, from the tokens that the cuts keep, in their order; and the least and the largest logit kept.

        top_k keeps the logits at or above the k-th largest. Of those, renormalised, top_p keeps the fewest of the
        largest whose joint probability reaches top_p, and all equals of the last. min_p keeps tokens at least min_p
        times as likely as the likeliest. The others follow, as
        `_floor` and `_typical_range` in `stages/sample/sampling_math.py` say. So ties are kept whole.

        Returns token ids [L] i64 as `choose` does, and the bounds [L, 2] f32 of the logits kept: -inf and inf where all
        are, in broken rows, in padding, and at temperature 0.
        """

    def edit(
        self,
        logits: Tensor,
        rows: Tensor,
        slots: Tensor,
        positions: Tensor,
        counts: Tensor,
        biased_ids: Tensor,
        bias: Tensor,
        end_ids: Tensor,
        masks: Tensor | None = None,
        mask_rows: Tensor | None = None,
    ) -> Tensor:
        """Applies penalties, the grammar's mask, logit bias and the minimum length, in this order.

        counts      [S, V] i16   occurrences of each token (`sampling_rows.count`); read only where a penalty is set
        biased_ids  [S, K] i32   the first NUM_BIASED of a row count; no id twice
        bias        [S, K] f32   added to the logits of `biased_ids`
        end_ids     [S, E] i32   the first NUM_ENDS of a row get -inf before END_POSITION
        masks       [W', W] i32  bit t % 32 of word t // 32 allows token t; W >= ceil(V / 32)
        mask_rows   [L] i32|i64  the row of `masks` for each row of logits; negative = every token is allowed

        Returns new logits, [L, V] f32. `masks` and `mask_rows` are given together.
        """

    def force(self, chosen: Tensor, forced: Tensor) -> None:
        """Replaces chosen tokens in place.

        chosen  [L] i64   from `choose`; negative = the row is broken
        forced  [L] i32   the token of the row instead, which a broken row does not get; -1 = none; -2 - t = token t,
                          which a broken row gets, too
        """

    def count_tokens(self, counts: Tensor, rows: Tensor, slots: Tensor, token_ids: Tensor) -> None:
        """Counts one token for each of `slots` in place, where the slot has a penalty. No slot occurs twice.

        counts     [S, V] i16   stops at `sampling_rows.MAX_COUNT`
        token_ids  [L] i64
        """

    def score(
        self,
        logits: Tensor,
        row_ids: Tensor,
        token_ids: Tensor,
        num_top: int,
        rows: Tensor | None = None,
        slots: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The log-probability and rank of a token in some rows of logits, and the likeliest tokens there.

        row_ids      [n] i64   into the rows of `logits`, `token_ids`, `slots` and `bounds`
        token_ids    [L] i64
        num_top                k, at most V
        rows, slots            if given, probabilities are those of the draw: at the slot's temperature, unless that is
                               0, and 0 for tokens outside of `bounds` [L, 2] f32, if those are given too

        Returns log-probabilities [n] f32 and ranks [n] i64 (1 is the likeliest) of the tokens; then ids [n, k] i64 and
        log-probabilities [n, k] f32 of the likeliest, the lowest id first among equals. A broken row's are undefined.
        """


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
