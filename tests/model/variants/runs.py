"""Runs one checkpoint in the native library and in transformers, float32 in both."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.model import NativeModel
from millrace.model.decoder.native_decoder import NativeDecoder
from millrace.model.decoder.rope import rope_tables
from millrace.model.decoder.step_inputs import StepInputs
from millrace.runtime.startup.phases import Phases
from millrace.stages import EngineConfig
from millrace.stages.loading.early import EarlyLoading
from tests.model.checkpoints import make_checkpoint

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
OWN = {"llama": {"rope_parameters": None}, "mistral": {"head_dim": 8}, "qwen2": {}, "qwen3": {"head_dim": 8}}
PROMPT = [(17 * index + 5) % 96 for index in range(40)]


class Gone(Enum):
    """The value of a key that the file lacks."""

    GONE = "absent"

    def __str__(self) -> str:
        return self.value


GONE = Gone.GONE

Folder = Callable[[Path], Any]


@dataclass(frozen=True)
class Variant:
    """A change of a small checkpoint, and what comes of it: the logits of transformers, or a refusal."""

    name: str
    family: str = "llama"
    keys: dict[str, Any] = field(default_factory=dict)  # of config.json
    change: Folder | None = None  # of the folder
    made: dict[str, Any] = field(default_factory=dict)  # of the model in it
    refused: str = ""  # part of the message; "": not refused
    oracle_keys: dict[str, Any] | None = None  # of config.json, where transformers does not read `keys`
    num_tokens: int = len(PROMPT)
    is_stepwise: bool = False  # transformers gets one token at a time, as when it generates
    settings: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """One small checkpoint for each family and set of overrides, made when first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = cache(self._make)

    def copy(self, variant: Variant, to: Path) -> Path:
        shutil.copytree(self._made(variant.family, json.dumps(variant.made)), to)
        patch(to, variant.keys)
        if variant.change is not None:
            variant.change(to)
        return to

    def _make(self, family: str, overrides: str) -> Path:
        path = self.folder / f"{family}-{len(list(self.folder.iterdir()))}"
        made = {**SHAPE, **OWN[family], **json.loads(overrides)}
        make_checkpoint(family, path, has_tokenizer=False, **made)
        (path / "generation_config.json").unlink()
        return path


def patch(root: Path, keys: dict[str, Any]) -> None:
    file = root / "config.json"
    values = {**json.loads(file.read_text()), **keys}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not GONE}))


def native_logits(root: Path, num_tokens: int, **settings: Any) -> NDArray[np.float32]:
    """The logits of every token of the prompt. Raises as the start of an engine does."""
    config = EngineConfig(model=str(root), device="cpu", threads=1, dtype="float32", **settings)
    opening = EarlyLoading(config, Phases(time.monotonic))
    try:
        opened = opening.result()
        assert opened.native_model is not None and opened.shape is not None, opened.why_not_native
        model = opened.native_model.result()
    finally:
        opening.close()
    assert isinstance(model, NativeModel), model
    num_positions = min(opened.max_model_len, 1024)
    model.set_positions([rope_tables(rope, num_positions) for rope in opened.shape.ropes], num_positions)
    cache = NativeCache.uniform(model.shape, num_blocks=-(-num_tokens // 16), block_size=16, dtype="float32")
    ids = np.array(prompt(num_tokens), np.int64)
    places = np.arange(num_tokens)
    return NativeDecoder(model).forward(
        StepInputs(
            input_ids=ids,
            positions=places,
            slot_mapping=places,
            block_tables=np.arange(cache.num_blocks, dtype=np.int32)[None],
            query_starts=np.array([0, num_tokens], np.int32),
            lengths=np.array([num_tokens], np.int32),
            logits_rows=places,
            num_decode=0,
        ),
        cache,
    )


def prompt(num_tokens: int) -> list[int]:
    return (PROMPT * (num_tokens // len(PROMPT) + 1))[:num_tokens]


def oracle_logits(root: Path, num_tokens: int, *, is_stepwise: bool = False) -> NDArray[np.float32]:
    """The same by transformers. Raises if it cannot load the checkpoint, or has to invent a tensor."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        root, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"], report["missing_keys"]
    ids = torch.tensor([prompt(num_tokens)])
    seen: list[torch.Tensor] = []
    keys_and_values = None
    with torch.inference_mode():
        for step in ids.split(1 if is_stepwise else num_tokens, dim=1):
            answer = model(step, **({} if keys_and_values is None else {"past_key_values": keys_and_values}))
            keys_and_values = answer.past_key_values
            seen.append(answer.logits[0].float())
    return torch.cat(seen).numpy()
