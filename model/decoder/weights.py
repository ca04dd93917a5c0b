"""A decoder's weights as torch tensors: fused, and copied to the device tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layout.experts import ExpertStack
from ..checkpoint.counted_tensors import CountedTensors, ReadProgress
from ..checkpoint.safetensors import BFLOAT16
from ..checkpoint.tensor_shapes import CheckpointChange, Shapes, TensorSource, expected_shapes, open_source
from ..errors import CheckpointError
from ..families import names
from ..grouped_matrix import GroupedMatrix
from ..quantized.expert_codes import coded_format, load_coded
from ..sharding.layer_split import LayerRange
from ..sharding.shard import WHOLE, Cut, RankShare, cuts_of, spec_of
from ..spec import (
    AttentionSpec,
    DecoderSpec,
    FeedSpec,
    LatentSpec,
    LayerSpec,
    Mixer,
    MoeSpec,
    NormSpec,
    PerLayerInputs,
    RecurrentSpec,
)
from .experts import EXPERT, ExpertWeights, FeedWeights, expert_parts
from .linear import EvenLinear, Linear, linear_form
from .norms import NormWeights as NormWeights


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecurrentWeights:
    """What a recurrent layer has beside its projections. What its `RecurrentSpec` does not have is None."""

    conv: Tensor  # [C, W]
    conv_bias: Tensor | None  # [C]
    decay: Tensor | None  # [H] f32, negative
    step_bias: Tensor | None  # [H] f32
    skip: Tensor | None  # [H] f32
    norm: NormWeights | None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        return _tensors_in(self)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerInputWeights:
    """What a layer does with its `PerLayerInputs`."""

    gate: Linear  # hidden -> width
    up: Linear  # width -> hidden
    norm: NormWeights | None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        return _tensors_in(self)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PerLayerWeights:
    """What the `PerLayerInputs` of all layers are made with."""

    table: Tensor  # [rows, layers * width]
    projection: Linear  # hidden -> layers * width
    norm: NormWeights | None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        return _tensors_in(self)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LatentWeights:
    """What a layer has beside the joined product into the ranks, the norms and the output."""

    query: Linear | None  # q_rank -> H * (nope + rope); None: the joined product has the queries
    keys_values: Tensor  # [H * (nope + value), kv_rank]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        return _tensors_in(self)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """One layer. What its `LayerSpec` does not have is None."""

    pre_mixer: NormWeights | None
    # hidden -> (H + 2 G) * D: queries, keys, values, and H * D more for a gate; or what a recurrent layer reads, or
    # queries, or what they are made of, and latents
    qkv: Linear | None
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    v_norm: NormWeights | None = None
    sinks: Tensor | None  # [H] f32
    output: Linear | None  # H * D -> hidden
    recurrent: RecurrentWeights | None = None
    latent: LatentWeights | None = None
    post_mixer: NormWeights | None
    pre_feed: NormWeights | None
    gate_up: Linear | None  # hidden -> 2 F: gate, up; hidden -> F without a gate
    activation: Tensor | None  # [2] f32, of xIELU
    down: Linear | None  # F -> hidden
    experts: tuple[ExpertWeights, ...]  # instead of the feed; of each rank that is computed here
    post_feed: NormWeights | None
    layer_input: LayerInputWeights | None = None
    output_scale: Tensor | None = None  # [1]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        return _tensors_in(self)


def _tensors_in(
    parts: RecurrentWeights | LatentWeights | LayerWeights | LayerInputWeights | PerLayerWeights,
) -> Iterator[Tensor]:
    for field in fields(parts):
        value = getattr(parts, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Tensor):
                yield part
            elif part is not None:
                yield from part.tensors()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecoderWeights:
    """All weights of a decoder, on one device, in one dtype."""

    embedding: Tensor  # [V, hidden]
    positions: Tensor | None  # [rows, hidden], learned
    embedding_norm: NormWeights | None
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights | None
    head: Linear  # hidden -> V; shares the embedding's memory when tied and not packed
    per_layer: PerLayerWeights | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory; some share memory."""
        yield from (self.embedding, *self.head.tensors())
        if self.positions is not None:
            yield self.positions
        for part in (self.embedding_norm, self.per_layer, self.final_norm, *self.layers):
            if part is not None:
                yield from part.tensors()


def load_weights(
    root: Path,
    spec: DecoderSpec,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "safetensors",
    progress: ReadProgress | None = None,
    *,
    is_batch_invariant: bool = False,
    free_bytes: int | None = None,
    change: CheckpointChange | None = None,
    shard: RankShare | None = None,
    stacks_experts: bool = False,
    layers: LayerRange | None = None,
) -> DecoderWeights:
    """The weights of the checkpoint in `root`; with load_format "dummy" seeded random weights, without reading a file.

    Raises CheckpointError naming file and tensor for a missing, extra, misshapen or non-finite tensor. `progress` is
    told the bytes of each tensor that is read. With `is_batch_invariant` a row's products do not depend on the other
    rows, see `EvenLinear`. `free_bytes` is the device's free memory before loading, which limits larger, faster forms;
    None = no limit. `change`: as for `open_source`. `shard`: the share of a rank, of whose decoder `spec_of` has the
    sizes; None = the whole model. `stacks_experts`: see `ExpertStack`; their linears are then of no packed form.
    `layers`: those of a rank of a pipeline, whose linears have the form that all layers would have; None = all. With a
    `shard` beside them, the head is whole in the first share.
    """
    source, spec = open_source(root, spec, load_format, change)
    loader = _Loader(source, spec, device, dtype, shard, layers)
    if progress is not None:
        loader.source = CountedTensors(source, loader.read_shapes(), progress)
    num_weights = loader.total_bytes // dtype.itemsize
    loader.form = linear_form(device, dtype, num_weights, free_bytes, is_batch_invariant=is_batch_invariant)
    loader.stacks_experts = stacks_experts
    return loader.load()


class _Loader:
    """Builds the layers in order, so that only one fused tensor at a time exists besides the result."""

    def __init__(
        self,
        source: TensorSource,
        spec: DecoderSpec,
        device: torch.device,
        dtype: torch.dtype,
        shard: RankShare | None,
        layers: LayerRange | None = None,
    ) -> None:
        self.layers = layers or LayerRange(0, spec.num_layers, spec.num_layers)
        self.source, self.whole = source, spec
        self.spec = spec if shard is None else spec_of(spec, shard)
        self.cuts: dict[str, Cut] = {} if shard is None else cuts_of(spec, shard)
        if layers is not None:
            self.cuts = {name: cut for name, cut in self.cuts.items() if not name.startswith(f"{names.HEAD}.")}
        self.has_head = self.layers.is_last and (layers is None or shard is None or shard.rank == 0)
        self.shapes = {  # of what is held
            name: self._cut(name).shape(shape)
            for name, shape in expected_shapes(spec).items()
            if self._cut(name).is_held
        }
        self.device, self.dtype = device, dtype
        self.total_bytes = sum(math.prod(shape) for shape in self.shapes.values()) * dtype.itemsize
        self.form: Callable[..., Linear] = Linear
        self.stacks_experts = False

    def load(self) -> DecoderWeights:
        spec, held = self.spec, self.layers
        nothing = torch.empty((0, spec.hidden_size), dtype=self.dtype, device=self.device)
        embedding = self._tensor(f"{names.EMBEDDING}.weight") if self._has_embedding else nothing
        is_first = held.is_first
        has_positions = is_first and spec.embedding.positions is not None
        positions = self._tensor(f"{names.POSITIONS}.weight") if has_positions else None
        embedding_norm = self._norm(names.EMBEDDING_NORM, spec.embedding.norm) if is_first else None
        layers = tuple(self._layer(index, spec.layers[index]) for index in range(held.begin, held.end))
        return DecoderWeights(
            embedding=embedding,
            positions=positions,
            embedding_norm=embedding_norm,
            layers=layers,
            final_norm=self._norm(names.FINAL_NORM, spec.final_norm) if held.is_last else None,
            head=self._head(embedding) if self.has_head else Linear(nothing),
            per_layer=None if spec.embedding.per_layer is None else self._per_layer(spec.embedding.per_layer),
        )

    def read_shapes(self) -> Shapes:
        """The shapes in the checkpoint of the tensors that are read."""
        shapes, held = expected_shapes(self.whole), self.layers
        if held.is_first and held.is_last:
            return shapes
        stem = names.LAYER.partition("*")[0]
        own = tuple(f"{stem}{index}." for index in range(held.begin, held.end))
        head = names.HEAD if self.has_head else "-"
        ends: tuple[str, ...] = (
            names.EMBEDDING if self._has_embedding else "-",
            head,
            names.FINAL_NORM if held.is_last else "-",
        )
        if held.is_first:
            ends = (*ends, names.POSITIONS, names.EMBEDDING_NORM)
        return {name: shape for name, shape in shapes.items() if name.startswith((*own, *ends))}

    @property
    def _has_embedding(self) -> bool:
        """Whether the embedding is needed, perhaps for a head that has its numbers."""
        head = self.spec.head
        return self.layers.is_first or (self.has_head and not (head.exists and not head.is_tied))

    def _per_layer(self, spec: PerLayerInputs) -> PerLayerWeights:
        return PerLayerWeights(
            table=self._tensor(f"{names.PER_LAYER}.weight"),
            projection=self._linear(names.PER_LAYER_PROJECTION),
            norm=self._norm(names.PER_LAYER_NORM, spec.norm),
        )

    def _layer_input(self, spec: PerLayerInputs, name: Callable[[str], str]) -> LayerInputWeights:
        return LayerInputWeights(
            gate=self._linear(name(names.INPUT_GATE)),
            up=self._linear(name(names.INPUT_UP)),
            norm=self._norm(name(names.INPUT_NORM), spec.norm),
        )

    def _head(self, embedding: Tensor) -> Linear:
        """The output layer; one that the checkpoint lacks is never used."""
        head = self.spec.head
        has_own = head.exists and not head.is_tied
        weight = self._tensor(f"{names.HEAD}.weight") if has_own else embedding[self._cut(f"{names.HEAD}.weight").rows]
        return (
            self.form(weight, self._tensor(f"{names.HEAD}.bias"))
            if head.exists and head.has_bias
            else self.form(weight)
        )

    def _layer(self, index: int, layer: LayerSpec) -> LayerWeights:
        def name(stem: str) -> str:
            return stem.replace("*", str(index))

        feed, parts, per_layer = layer.feed, self._mixer(layer.mixer, name), self.spec.embedding.per_layer
        dense = self._feed(feed, *map(name, names.DENSE)) if isinstance(feed, FeedSpec) else None
        return LayerWeights(
            pre_mixer=self._norm(name(names.PRE_MIXER), layer.pre_mixer),
            **parts,
            post_mixer=self._norm(name(names.POST_MIXER), layer.post_mixer),
            pre_feed=self._norm(name(names.PRE_FEED), layer.pre_feed),
            gate_up=None if dense is None else dense.gate_up,
            activation=self._tensor(name(names.ACTIVATION), dtype=torch.float32)
            if isinstance(feed, FeedSpec) and feed.activation == "xielu"
            else None,
            down=None if dense is None else dense.down,
            experts=(self._experts(feed, name),) if isinstance(feed, MoeSpec) else (),
            post_feed=self._norm(name(names.POST_FEED), layer.post_feed),
            layer_input=None if per_layer is None else self._layer_input(per_layer, name),
            output_scale=self._tensor(name(names.OUTPUT_SCALE)) if layer.has_output_scale else None,
        )

    def _feed(self, feed: FeedSpec, gate: str, up: str, down: str) -> FeedWeights:
        """A feed-forward network with these stems."""
        return FeedWeights(self._linear(gate, up) if feed.is_gated else self._linear(up), self._linear(down))

    def _experts(self, moe: MoeSpec, name: Callable[[str], str]) -> ExpertWeights:
        """The experts of the layer whose number `name` gives to stems. The router is in float32."""
        router = name(names.ROUTER)
        bias = self._tensor(f"{router}.bias", dtype=torch.float32) if moe.router.has_bias else None
        form = EvenLinear if self.form is EvenLinear else Linear
        experts, stack = self._each_expert(moe, name)
        own_norms = [self._norm(name(stem), moe.own_norms) for stem in names.OWN_NORMS]
        return ExpertWeights(
            router=form(self._tensor(f"{router}.weight", dtype=torch.float32), bias),
            choice_bias=self._tensor(name(names.CHOICE_BIAS), dtype=torch.float32)
            if moe.router.has_choice_bias
            else None,
            router_norm=self._norm(name(names.ROUTER_NORM), moe.router.input_norm),
            expert_scale=self._tensor(name(names.EXPERT_SCALE), dtype=torch.float32)
            if moe.router.has_expert_scale
            else None,
            own_norms=() if moe.own_norms is None else tuple(norm for norm in own_norms if norm is not None),
            experts=experts,
            stack=stack,
            shared=None if moe.shared is None else self._feed(moe.shared, *map(name, names.SHARED)),
            shared_router=self._linear(name(names.SHARED_ROUTER)) if moe.has_shared_gate else None,
            dense_beside=None if moe.dense_beside is None else self._feed(moe.dense_beside, *map(name, names.DENSE)),
        )

    def _each_expert(
        self, moe: MoeSpec, name: Callable[[str], str]
    ) -> tuple[tuple[FeedWeights, ...], ExpertStack | None]:
        """The experts, and the tensors that their weights are parts of, if they are stacked."""
        stems = [[name(names.of_expert(stem, expert)) for stem in EXPERT] for expert in range(moe.num_experts)]
        if not self.stacks_experts:
            return tuple(self._feed(moe.expert, *each) for each in stems), None
        found = expert_parts(moe, name)
        if (coded := self._coded_stack(found)) is not None:
            return (), coded
        stack = {field: self._empty_stack(each) if each[0][0] in self.shapes else None for field, each in found.items()}
        form, experts = EvenLinear if self.form is EvenLinear else Linear, []
        for expert in range(moe.num_experts):
            parts = {field: None if whole is None else whole[expert] for field, whole in stack.items()}
            for field, part in parts.items():
                if part is not None:
                    self._fill(found[field][expert], part)
            gate_up, gate_up_bias, down, down_bias = parts.values()
            assert gate_up is not None and down is not None
            experts.append(FeedWeights(form(gate_up, gate_up_bias), form(down, down_bias)))
        return tuple(experts), ExpertStack(**stack)  # type: ignore[arg-type]  # the weights are there

    def _coded_stack(self, found: dict[str, list[list[str]]]) -> ExpertStack | None:
        """The experts in the codes of their file; None: they are to be unpacked. `found`: names by field and expert."""
        formats = {field: coded_format(self.source, found[field]) for field in ("gate_up", "down")}
        if None in formats.values() or self.cuts:
            return None
        stack: dict[str, Any] = {"gate_up_bias": None, "down_bias": None}
        for field, each in found.items():
            if (form := formats.get(field)) is not None:
                stack[field] = load_coded(self.source, each, form, self.device)
            elif each[0][0] in self.shapes:
                stack[field] = self._empty_stack(each)
                for names_of_one, part in zip(each, stack[field], strict=True):
                    self._fill(names_of_one, part)
        return ExpertStack(**stack)

    def _empty_stack(self, found: list[list[str]]) -> Tensor:
        """Memory for tensors of all experts, each of several joined along their rows."""
        shapes = [self.shapes[name] for name in found[0]]
        size = (len(found), sum(shape[0] for shape in shapes), *shapes[0][1:])
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _mixer(self, mixer: Mixer, name: Callable[[str], str]) -> dict[str, Any]:
        """The fields of `LayerWeights` that belong to the mixer."""
        parts: dict[str, Any] = dict.fromkeys(("qkv", "q_norm", "k_norm", "sinks", "output"))
        if isinstance(mixer, RecurrentSpec):
            joined = self._linear(*map(name, names.projections(mixer)))
            output = self._linear(name(names.MIX_OUTPUT))
            return parts | {"qkv": joined, "output": output, "recurrent": self._recurrent(mixer, name)}
        if mixer is None:
            return parts
        if isinstance(mixer, LatentSpec):
            return parts | self._latent(mixer, name)
        assert isinstance(mixer, AttentionSpec), "missing() refuses others"
        qk_norm = None if mixer.qk_norm is None else mixer.qk_norm.norm
        stems = (*names.qkv_of(mixer), *((names.OUTPUT_GATE,) if mixer.has_output_gate else ()))
        return {
            "qkv": self._linear(*map(name, stems)),
            "q_norm": self._norm(name(names.Q_NORM), qk_norm),
            "k_norm": None if mixer.kv_of is not None else self._norm(name(names.K_NORM), qk_norm),
            "v_norm": None if mixer.v_norm is None else NormWeights(mixer.v_norm, None, None),
            "sinks": self._tensor(name(names.SINKS), dtype=torch.float32) if mixer.has_sinks else None,
            "output": self._linear(name(names.OUTPUT)),
        }

    def _latent(self, mixer: LatentSpec, name: Callable[[str], str]) -> dict[str, Any]:
        is_direct = mixer.q_rank is None
        query = None if is_direct else self._linear(name(names.Q_UP))
        return {
            "qkv": self._linear(name(names.Q if is_direct else names.Q_DOWN), name(names.KV_DOWN)),
            "q_norm": None if is_direct else self._norm(name(names.Q_DOWN_NORM), mixer.norm),
            "k_norm": self._norm(name(names.KV_DOWN_NORM), mixer.norm),
            "output": self._linear(name(names.OUTPUT)),
            "latent": LatentWeights(query=query, keys_values=self._tensor(f"{name(names.KV_UP)}.weight")),
        }

    def _recurrent(self, mixer: RecurrentSpec, name: Callable[[str], str]) -> RecurrentWeights:
        def vector(stem: str, *, exists: bool) -> Tensor | None:
            return self._tensor(name(stem), dtype=torch.float32) if exists else None

        has_matrix = mixer.kind != "short_conv"
        return RecurrentWeights(
            conv=self._tensor(f"{name(names.MIX_CONV)}.weight"),
            conv_bias=self._tensor(f"{name(names.MIX_CONV)}.bias") if mixer.has_conv_bias else None,
            decay=vector(names.DECAY, exists=has_matrix),
            step_bias=vector(names.STEP_BIAS, exists=has_matrix),
            skip=vector(names.SKIP, exists=mixer.kind == "mamba2"),
            norm=self._norm(name(names.MIX_NORM), mixer.norm),
        )

    def _norm(self, stem: str, spec: NormSpec | None) -> NormWeights | None:
        if spec is None:
            return None
        dtype = torch.float32 if spec.is_exact or spec.weight == "one_plus" else self.dtype
        weight = None if spec.weight == "none" else self._tensor(f"{stem}.weight", dtype=dtype)
        return NormWeights(spec, weight, self._tensor(f"{stem}.bias", dtype=dtype) if spec.has_bias else None)

    def _linear(self, *stems: str) -> Linear:
        """Several projections of one input as one `Linear`: their rows concatenated."""
        has_bias = f"{stems[0]}.bias" in self.shapes
        weight = self._tensor(*(f"{stem}.weight" for stem in stems))
        return self.form(weight, self._tensor(*(f"{stem}.bias" for stem in stems)) if has_bias else None)

    def _tensor(self, *found: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of the checkpoint, or several joined along their rows, on the device; None = the model's dtype."""
        dtype = dtype or self.dtype
        num_rows = sum(self.shapes[name][0] for name in found)
        joined = torch.empty((num_rows, *self.shapes[found[0]][1:]), dtype=dtype, device=self.device)
        self._fill(found, joined)
        return joined

    def _fill(self, found: Sequence[str], joined: Tensor) -> None:
        """Copies tensors of the checkpoint to the rows of one, in their order."""
        for name, part in zip(found, joined.split_with_sizes([self.shapes[name][0] for name in found]), strict=True):
            self._copy(name, part)
            self.source.forget(name)
            if not all(map(math.isfinite, torch.stack(torch.aminmax(part)).tolist())):
                stored = self.source.stored_name(name)
                raise CheckpointError(f"tensor {stored}: holds NaN or infinity as {joined.dtype}; fetch the file again")

    def _copy(self, name: str, part: Tensor) -> None:
        """Copies a tensor to the device: as it is, or unpacked from rows of a mapped file, some at a time."""
        matrix = self.source.grouped(name) if self.source.packing and self._cut(name) is WHOLE else None
        if not isinstance(matrix, GroupedMatrix) or not matrix.is_mapped:
            part.copy_(_as_tensor(self._held(name)))
            return
        for first, numbers in matrix.unpacked():
            part[first : first + len(numbers)].copy_(torch.from_numpy(numbers))

    def _held(self, name: str) -> NDArray[Any]:
        """The numbers of a tensor that are held, of which a mapped file reads no others."""
        array, cut = self.source.array(name), self._cut(name)
        return array if cut is WHOLE else array[(cut.rows, cut.columns)[: array.ndim]]

    def _cut(self, name: str) -> Cut:
        return self.cuts.get(name, WHOLE)


def _as_tensor(array: NDArray[Any]) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor
