"""Merging adapters into a checkpoint while it is loaded: `--merge-adapter PATH[=scale]`, for every kind that PEFT has.

What is merged is what unmerged PEFT computes. So where embedding and output layer are one tensor and an adapter changes
one of them, they become two. The sums are float32, whatever dtype the checkpoint has, and are then cast once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint.safetensors import Checkpoint
from ..checkpoint.stored_tensors import StoredTensors
from ..checkpoint.whole_model import WholeModel
from ..errors import AdapterError, quoted
from ..spec import DecoderSpec
from .changes import AdapterChanges
from .merged_tensors import Change, MergedTensors
from .weights import AdapterFiles


@dataclass(frozen=True, slots=True)
class Merging:
    """Adapters to merge into a model, in their order; what `open_source` takes as `change`."""

    adapters: Sequence[tuple[Path, float]]  # folder and scale
    model_name: str = ""  # of the model, for messages

    def __call__(self, checkpoint: StoredTensors, spec: DecoderSpec) -> tuple[StoredTensors, DecoderSpec]:
        """The checkpoint with the adapters in it, and its spec. Raises AdapterError before a weight is read."""
        if not isinstance(checkpoint, Checkpoint):
            raise AdapterError(
                f"{checkpoint.root}: adapters are merged into plain safetensors only; merge before quantization: start "
                "from the bfloat16 checkpoint"
            )
        model = WholeModel(spec)
        changes: dict[str, list[Change]] = {}
        changed_by: dict[str, str] = {}  # names of tensors -> of adapters
        replaced: set[str] = set()
        of_tokens, untied_by = "", ""  # of adapters: the last that trains rows of the embedding, and that splits it
        for root, scale in self.adapters:
            one = AdapterChanges(AdapterFiles(root, model, root.name, model_name=self.model_name), scale)
            if clashing := (one.replaced & changes.keys()) | (replaced & one.changes.keys()):
                name = min(clashing)
                one.fail(f"and adapter {quoted(changed_by[name])} both change {name}, and one replaces it")
            for name, change in one.changes.items():
                changes.setdefault(name, []).append(change)
            changed_by |= dict.fromkeys(one.changes, root.name)
            replaced |= one.replaced
            was_tied = spec.head.is_tied
            spec = _with_own_head(checkpoint, spec, model, one)
            untied_by = root.name if was_tied and not spec.head.is_tied else untied_by
            of_tokens = root.name if one.of_tokens else of_tokens
            if of_tokens and untied_by:
                raise AdapterError(
                    f"adapters {quoted(of_tokens)} and {quoted(untied_by)}: the first trains rows of tokens, and the "
                    "second changes the embedding or the output layer, which are one in this model; merge one of them"
                )
        return MergedTensors(checkpoint, changes, model.fused), spec


def _with_own_head(
    checkpoint: Checkpoint, spec: DecoderSpec, model: WholeModel, adapter: AdapterChanges
) -> DecoderSpec:
    """`spec` with an output layer of its own, if it was the embedding and the adapter changes one of both.

    New numbers for some tokens' rows of the embedding are for both.
    """
    embedding, head = model.embedding, model.head
    changed = adapter.changes.keys() & {embedding, head}
    if head in changed and not spec.head.exists:
        adapter.fail("changes the output layer, which this checkpoint was saved without")
    if not changed - adapter.of_tokens or not spec.head.exists:
        return spec
    if spec.head.is_tied and adapter.of_tokens:
        adapter.fail("trains rows of the embedding and changes the output layer, which are one in this model")
    if head not in checkpoint.names:
        checkpoint.share(head, embedding)
    return replace(spec, head=replace(spec.head, is_tied=False))
