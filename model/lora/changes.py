"""What one adapter changes in the tensors of a checkpoint. Names and shapes are checked before any tensor is read."""

from __future__ import annotations

from functools import partial

import numpy as np

from .matrices import rounded
from .merged_tensors import Change
from .updates import Floats, merged, merged_embedding
from .weights import (
    B_BIAS,
    BASE,
    BASE_BIAS,
    BIAS,
    EMBEDDING_A,
    EMBEDDING_B,
    MAGNITUDE,
    TOKENS,
    WEIGHT,
    A,
    AdaptedModule,
    AdapterFiles,
    B,
)

DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
WAYS = (A, EMBEDDING_A, TOKENS, WEIGHT)  # a module is changed in one of them


class AdapterChanges:
    """The changes of an adapter by the names of the base's tensors."""

    def __init__(self, files: AdapterFiles, scale: float) -> None:
        """`scale` multiplies the updates. Raises AdapterError."""
        self.files, self.fail, self._scale = files, files.config.fail, scale
        self.changes: dict[str, Change] = {}
        self.replaced: set[str] = set()  # tensors that are another one now
        self.of_tokens: set[str] = set()  # the embedding, if rows of it are replaced, and nothing else
        for module in files.modules.values():
            self._add(module)

    def _add(self, module: AdaptedModule) -> None:
        kinds, config = set(module.tensors), self.files.config
        if len(kinds & {*WAYS}) > 1:
            self.fail(f"{module.label} is changed by {', '.join(sorted(kinds))} at once, which is not served")
        if self._scale != 1.0 and kinds - {A, B, B_BIAS, EMBEDDING_A, EMBEDDING_B, BASE}:
            how = ", ".join(sorted(kinds - {A, B}))
            self.fail(f"{module.label} is changed by {how}, which no scale multiplies: leave out the {self._scale:g}")
        if (MAGNITUDE in kinds) != (config.use_dora and bool(kinds & {A, EMBEDDING_A})):
            self.fail(f"{module.label}: {MAGNITUDE} and use_dora = {config.use_dora} do not fit each other")
        if (B_BIAS in kinds) != (config.lora_bias and A in kinds):
            self.fail(f"{module.label}: {B_BIAS} and lora_bias = {config.lora_bias} do not fit each other")
        self._add_weight(module, kinds)
        self._add_bias(module, kinds)

    def _add_weight(self, module: AdaptedModule, kinds: set[str]) -> None:
        shape = self.files.model.shapes[module.stored]
        steps: list[Change] = []
        is_saved = self._is_saved(module)
        for kind in (BASE, WEIGHT):
            if kind in kinds:
                self.files.check_shape(module, kind, *shape)
                if kind == BASE or not is_saved:
                    steps.append(partial(self._compared, module, kind))
        if WEIGHT in kinds and is_saved:
            steps.append(partial(self._replaced, module, WEIGHT))
            self.replaced.add(module.stored)
        elif A in kinds:
            steps.append(self._linear(module, kinds, shape))
        elif EMBEDDING_A in kinds:
            steps.append(self._embedding(module, kinds, shape))
        elif TOKENS in kinds:
            steps.append(self._tokens(module, shape))
        if steps:
            self.changes[module.stored] = partial(_in_turn, steps)

    def _linear(self, module: AdaptedModule, kinds: set[str], shape: tuple[int, ...]) -> Change:
        files, is_transposed = self.files, module.stored in self.files.model.transposed
        if len(shape) != 2 or module.stored == files.model.embedding:
            self.fail(f"{module.label} has {A} and is no linear layer")
        if files.config.is_transposed and not is_transposed:
            self.fail(f"fan_in_fan_out = True, and {module.label} is stored as [rows, columns] in this model")
        rows, columns = shape[::-1] if is_transposed else shape
        rank = files.shape(module, A)[0]
        files.check_shape(module, A, rank, columns)
        files.check_shape(module, B, rows, rank)
        if MAGNITUDE in kinds:
            files.check_shape(module, MAGNITUDE, rows)
        return partial(self._with_update, module, A, B, is_transposed)

    def _embedding(self, module: AdaptedModule, kinds: set[str], shape: tuple[int, ...]) -> Change:
        files = self.files
        if module.stored != files.model.embedding:
            self.fail(f"{module.label} has {EMBEDDING_A} and is not the embedding")
        rank = files.shape(module, EMBEDDING_A)[0]
        files.check_shape(module, EMBEDDING_A, rank, shape[0])
        files.check_shape(module, EMBEDDING_B, shape[1], rank)
        if MAGNITUDE in kinds:
            files.check_shape(module, MAGNITUDE, shape[1])
        return partial(self._with_update, module, EMBEDDING_A, EMBEDDING_B, False)

    def _tokens(self, module: AdaptedModule, shape: tuple[int, ...]) -> Change:
        is_input = module.stored == self.files.model.embedding
        ids = next(
            (
                ids
                for end, ids in self.files.config.trained_tokens.items()
                if (is_input if end == "" else f".{module.path}".endswith(f".{end}"))
            ),
            None,
        )
        if ids is None:
            self.fail(f"holds rows of {module.path}, for which trainable_token_indices lists no token")
        if max(ids, default=0) >= shape[0]:
            self.fail(f"trainable_token_indices holds {max(ids)}, and {module.path} has {shape[0]} rows")
        self.files.check_shape(module, TOKENS, len(ids), shape[-1])
        if is_input:
            self.of_tokens.add(module.stored)
        return partial(self._with_tokens, module, ids)

    def _add_bias(self, module: AdaptedModule, kinds: set[str]) -> None:
        found = kinds & {B_BIAS, BASE_BIAS, BIAS}
        if not found:
            return
        name = f"{module.stored.removesuffix('.weight')}.bias"
        if name not in self.files.model.shapes:
            self.fail(f"has a bias for {module.label}, and this model has none there, so it cannot be merged")
        for kind in found:
            self.files.check_shape(module, kind, *self.files.model.shapes[name])
        steps: list[Change] = []
        for kind in sorted(found - {B_BIAS}):
            is_trained = self.files.config.bias != "none" or self._is_saved(module)
            steps.append(partial(self._replaced if is_trained else self._compared, module, kind))
            self.replaced |= {name} if is_trained else set()
        if B_BIAS in found:
            steps.append(partial(self._with_bias, module))
        self.changes[name] = partial(_in_turn, steps)

    def _is_saved(self, module: AdaptedModule) -> bool:
        """Whether the module was trained whole: `modules_to_save` names it, or a module that it is in."""
        config = self.files.config
        if config.is_tied and config.modules_to_save and module.stored == self.files.model.head:
            return True
        return any(f".{name}." in f".{module.path}." for name in config.modules_to_save)

    # -- the changes themselves: of the tensor so far, and the base's

    def _with_update(
        self, module: AdaptedModule, first: str, second: str, is_transposed: bool, tensor: Floats, base: Floats
    ) -> Floats:
        files, merge = self.files, merged if first == A else merged_embedding
        a, b = files.array(module, first), files.array(module, second)
        magnitude = files.array(module, MAGNITUDE) if MAGNITUDE in module.tensors else None
        weight = tensor.T if is_transposed else tensor
        found = merge(weight, a, b, module.scale * self._scale, magnitude)
        files.forget(module)
        return np.ascontiguousarray(found.T) if is_transposed else found

    def _with_bias(self, module: AdaptedModule, tensor: Floats, base: Floats) -> Floats:
        return tensor + self.files.array(module, B_BIAS) * np.float32(module.scale * self._scale)

    def _with_tokens(self, module: AdaptedModule, ids: tuple[int, ...], tensor: Floats, base: Floats) -> Floats:
        found = np.array(tensor)
        found[list(ids)] = self.files.array(module, TOKENS)
        return found

    def _replaced(self, module: AdaptedModule, kind: str, tensor: Floats, base: Floats) -> Floats:
        return self.files.array(module, kind)

    def _compared(self, module: AdaptedModule, kind: str, tensor: Floats, base: Floats) -> Floats:
        """The tensor. Raises AdapterError if the adapter's copy of the base is another one than this base."""
        copy, dtype = self.files.array(module, kind), DTYPES[self.files.dtype(module, kind)]
        if not np.array_equal(rounded(copy, dtype), rounded(base, dtype)):
            self.fail(f"its copy of {module.label} differs from this model's: it was trained on another base")
        return tensor


def _in_turn(steps: list[Change], tensor: Floats, base: Floats) -> Floats:
    for step in steps:
        tensor = step(tensor, base)
    return tensor
