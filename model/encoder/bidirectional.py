"""Encoder models, which attend in both directions: BERT and similar models, through transformers.

They compute a hidden state for each token or, as cross-encoders, one score for a pair of texts. Only safetensors are
loaded, and checked before transformers reads them. No code of a checkpoint is run. Importing this module imports
transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from ..checkpoint.safetensors import Checkpoint
from ..errors import CheckpointError, shown
from ..files import read_json, refuse_code
from ..sentence_files import SentenceFiles
from .dense import DenseLayer, activation_function
from .encoder_sizes import check_encoder_sizes

_PADDED = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})  # positions start after the pad token's id


@dataclass(frozen=True, slots=True, eq=False)
class Bidirectional:
    """A loaded encoder. It holds no state of a batch."""

    model: torch.nn.Module
    is_cross_encoder: bool
    hidden_size: int
    vocab_size: int
    max_tokens: int  # of a text, special tokens included
    pad_token_id: int
    has_types: bool  # whether it takes token types, 0 or 1 for the two texts of a pair
    activation: Callable[[Tensor], Tensor]  # of a cross-encoder: turns its logit into a score
    dense: Sequence[DenseLayer]  # behind the pooling, in order
    dtype: torch.dtype

    @classmethod
    def load(
        cls, checkpoint: Path, files: SentenceFiles, device: torch.device, dtype: torch.dtype | None = None
    ) -> Bidirectional:
        """The model in `checkpoint`, in `dtype` or that of the checkpoint.

        Raises CheckpointError for a checkpoint that is damaged, or whose results would be wrong.
        """
        root = checkpoint / files.folder
        values = read_json(root, "config.json") or {}
        refuse_code(root, "config.json", values)
        check_encoder_sizes(root, values, Checkpoint(root))  # which checks headers, and rejects pickles
        config = _read_config(root)
        is_cross_encoder = _is_cross_encoder(values)
        if is_cross_encoder and config.num_labels != 1:
            raise CheckpointError(
                f"config.json ({root}): {config.num_labels} labels: only models that score with one label are supported"
            )
        chosen = dtype or _dtype(config)
        model = _load(root, config, is_cross_encoder, chosen).to(device).eval()
        accepted = inspect.signature(model.forward).parameters
        dense: list[DenseLayer] = []
        for folder in files.dense:
            width = dense[-1].num_outputs if dense else config.hidden_size
            dense.append(DenseLayer.load(checkpoint, folder, width, device))
        return cls(
            model=model,
            is_cross_encoder=is_cross_encoder,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_tokens=_max_tokens(files, config),
            pad_token_id=config.pad_token_id or 0,
            has_types="token_type_ids" in accepted and getattr(config, "type_vocab_size", 0) > 1,
            activation=_activation(root, files, values),
            dense=dense,
            dtype=chosen,
        )

    @torch.inference_mode()
    def hidden_states(self, input_ids: Tensor, mask: Tensor, type_ids: Tensor) -> Tensor:
        """Hidden states of N texts, padded to P tokens: [N, P, hidden].

        All arguments are [N, P] i64; `mask` is 0 for padding.
        """
        states: Tensor = self.model(**self._inputs(input_ids, mask, type_ids)).last_hidden_state
        return states

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding."""
        return self.dense[-1].num_outputs if self.dense else self.hidden_size

    @torch.inference_mode()
    def scores(self, input_ids: Tensor, mask: Tensor, type_ids: Tensor) -> Tensor:
        """A cross-encoder's scores of N pairs, [N] f32. Arguments as for `hidden_states`."""
        logits: Tensor = self.model(**self._inputs(input_ids, mask, type_ids)).logits
        return self.activation(logits[:, 0].float())

    def _inputs(self, input_ids: Tensor, mask: Tensor, type_ids: Tensor) -> dict[str, Tensor]:
        types = {"token_type_ids": type_ids} if self.has_types else {}
        return {"input_ids": input_ids, "attention_mask": mask, **types}


def _is_cross_encoder(values: Mapping[str, Any]) -> bool:
    return any(str(name).endswith("ForSequenceClassification") for name in values.get("architectures") or [])


def _read_config(root: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any type, after the key that led to it
        raise CheckpointError(f"config.json ({root}): {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0])


def _load(root: Path, config: Any, is_cross_encoder: bool, dtype: torch.dtype) -> torch.nn.Module:
    kind = AutoModelForSequenceClassification if is_cross_encoder else AutoModel
    try:
        model, report = kind.from_pretrained(
            root,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # of any type: a size that contradicts another, a tensor of another shape
        raise CheckpointError(f"{root}: transformers cannot load it: {_first_line(error)}") from None
    # The class always has a pooler; an untrained one is not used here.
    missing = sorted(name for name in report["missing_keys"] if is_cross_encoder or not name.startswith("pooler."))
    if missing:
        raise CheckpointError(
            f"{root}: tensor {missing[0]} is missing, which config.json ({config.model_type}) requires"
        )
    loaded: torch.nn.Module = model
    return loaded


def _dtype(config: Any) -> torch.dtype:
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _max_tokens(files: SentenceFiles, config: Any) -> int:
    """The longest text in tokens: the size of the position table, or the length that training cut texts to."""
    longest = int(config.max_position_embeddings)
    if config.model_type in _PADDED:
        longest -= config.pad_token_id + 1
    return min(longest, files.max_tokens or longest)


def _activation(root: Path, files: SentenceFiles, values: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """The activation by sentence-transformers' name; Sigmoid if the checkpoint names none."""
    if files.activation is not None:
        return activation_function(f"config_sentence_transformers.json ({root})", files.activation)
    said = (values.get("sentence_transformers") or {}).get("activation_fn")
    name = said or values.get("sbert_ce_default_activation_function") or "Sigmoid"
    return activation_function(f"config.json ({root})", str(name))
