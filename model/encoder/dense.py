"""Linear layers behind the pooling of an encoder: sentence-transformers' module Dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import CheckpointError, quoted
from ..files import checkpoint_file, read_json

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by the name of torch's class
    "GELU": torch.nn.functional.gelu,
    "Identity": torch.clone,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
    "SiLU": torch.nn.functional.silu,
    "Tanh": torch.tanh,
}


def activation_function(source: str, name: str) -> Callable[[Tensor], Tensor]:
    """The function of a class that a file names by its path. Raises CheckpointError for another."""
    short = name.rpartition(".")[2]
    if short not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise CheckpointError(f"{source}: activation {quoted(name)} is not supported; supported: {known}")
    return ACTIVATIONS[short]


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer:
    """A linear layer with an activation, and possibly a residual connection. Computes in float32."""

    weight: Tensor  # [O, H]
    bias: Tensor | None  # [O]
    residual: Tensor | None  # [O, H]
    has_residual: bool
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def load(cls, root: Path, folder: str, num_inputs: int, device: torch.device) -> DenseLayer:
        """The layer in `folder` below `root`, for vectors of `num_inputs` numbers."""
        name = f"{folder}/config.json"
        values = read_json(root, name) or {}
        source = f"{name} ({root})"
        for key in ("module_input_name", "module_output_name"):
            if values.get(key) not in (None, "sentence_embedding"):
                raise CheckpointError(f"{source}: {key} = {quoted(values[key])}: supported: sentence_embedding")
        tensors = _tensors(root, folder)
        weight, bias, residual = (tensors.get(key) for key in ("linear.weight", "linear.bias", "residual.weight"))
        if weight is None or weight.ndim != 2 or weight.shape[1] != num_inputs:
            shape = None if weight is None else list(weight.shape)
            raise CheckpointError(
                f"{folder}/model.safetensors ({root}): linear.weight has the shape {shape}: must be [n, {num_inputs}]"
            )
        has_residual = values.get("use_residual") is True
        needs = {"linear.bias": values.get("bias", True) is not False and bias is None}
        needs["residual.weight"] = has_residual and weight.shape[0] != num_inputs and residual is None
        for tensor, is_missing in needs.items():
            if is_missing:
                raise CheckpointError(f"{folder}/model.safetensors ({root}): {tensor} is missing")
        activation = activation_function(source, str(values.get("activation_function") or "Tanh"))
        made = [None if each is None else each.to(device, torch.float32) for each in (weight, bias, residual)]
        assert made[0] is not None
        return cls(made[0], made[1], made[2], has_residual, activation)

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0]

    def __call__(self, vectors: Tensor) -> Tensor:
        """[N, H] to [N, O], both f32."""
        made = self.activation(torch.nn.functional.linear(vectors, self.weight, self.bias))
        if not self.has_residual:
            return made
        return made + (vectors if self.residual is None else torch.nn.functional.linear(vectors, self.residual))


def _tensors(root: Path, folder: str) -> Mapping[str, Tensor]:
    name = f"{folder}/model.safetensors"
    path = checkpoint_file(root, name)
    if path is None:
        raise CheckpointError(f"{name} ({root}): is missing; save the model again with safetensors")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{name} ({root}): cannot be read: {error}") from None
    return tensors
