"""Random LoRA adapters in PEFT's format, for measuring. Several differ in their scale only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....model.lora.adapter import adaptable_matrices
from ....model.spec import DecoderSpec
from ....stages.errors import ConfigError
from .load import Rng


def write_adapters(root: Path, spec: DecoderSpec, num: int, rank: int, rng: Rng) -> tuple[list[str], int]:
    """Writes adapters of all linears into folders of `root`. Returns their names, and the weights of each.

    Their files are one file, so that many take little space. Raises `ConfigError` for a model without such linears.
    """
    matrices = adaptable_matrices(spec)
    if not matrices:
        raise ConfigError("bench lora: the linears of this model take no adapters at run time")
    names = [f"adapter-{number}" for number in range(1, num + 1)]
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * (1 + number / 64), "task_type": "CAUSAL_LM"}
        config["target_modules"] = sorted({stem.rpartition(".")[2] for stem in matrices})
        (root / name / "adapter_config.json").write_text(json.dumps(config))
        file = root / name / "adapter_model.safetensors"
        if number == 0:
            _write_tensors(file, matrices, rank, rng)
        else:
            os.link(root / names[0] / file.name, file)
    return names, sum(rank * (rows + columns) for rows, columns in matrices.values())


def _write_tensors(file: Path, matrices: dict[str, tuple[int, int]], rank: int, rng: Rng) -> None:
    from safetensors.numpy import save_file

    def normal(rows: int, columns: int) -> NDArray[Any]:
        return (rng.standard_normal((rows, columns), np.float32) / 32).astype(np.float16)

    tensors = {}
    for stem, (rows, columns) in matrices.items():
        tensors[f"base_model.model.{stem}.lora_A.weight"] = normal(rank, columns)
        tensors[f"base_model.model.{stem}.lora_B.weight"] = normal(rows, rank)
    save_file(tensors, file)
