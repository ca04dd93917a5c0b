"""Encoder models, which attend in both directions, as BERT does: any that transformers has built in.

They compute a hidden state for each token or, as cross-encoders, one score for a pair of texts. Only safetensors are
loaded, and checked before transformers reads them; `probe.py` then tests the model. No code of a checkpoint is run.
Importing this module imports transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
)

from ..checkpoint.model_kind import architectures
from ..checkpoint.safetensors import Checkpoint
from ..errors import CheckpointError
from ..files import checkpoint_file, read_json, refuse_code
from ..sentence_files import SentenceFiles
from .dense import DenseLayer, activation_function
from .encoder_sizes import check_encoder_sizes
from .probe import first_line, probe

NO_LIMIT = 4096  # tokens of a text where neither a position table nor a file names a limit


@dataclass(frozen=True, slots=True, eq=False)
class Bidirectional:
    """A loaded encoder. It holds no state of a batch."""

    model: torch.nn.Module
    is_cross_encoder: bool
    vocab_size: int
    max_tokens: int  # of a text, special tokens included
    pad_token_id: int
    inputs: frozenset[str]  # names of the tensors that it takes
    has_types: bool  # whether it knows token types, 0 or 1 for the two texts of a pair
    activation: Callable[[Tensor], Tensor]  # of a cross-encoder: turns its logit into a score
    dtype: torch.dtype
    hidden_size: int = 0
    allows_padding: bool = True  # False: the texts of a batch must have one length
    dense: Sequence[DenseLayer] = ()  # behind the pooling, in order

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
        chosen = dtype or _dtype(config)
        _check_supported(root, config, is_cross_encoder, chosen)
        model = _load(root, config, is_cross_encoder, chosen).to(device).eval()
        text_config = config.get_text_config()
        made = cls(
            model=model,
            is_cross_encoder=is_cross_encoder,
            vocab_size=_vocab_size(model, text_config),
            max_tokens=_max_tokens(files, model, text_config),
            pad_token_id=_pad_token_id(text_config),
            inputs=frozenset(inspect.signature(model.forward).parameters),
            has_types=(getattr(text_config, "type_vocab_size", 0) or 0) > 1,
            activation=_activation(root, files, values),
            dtype=chosen,
        )
        return made._probed(root, device)._with_dense(checkpoint, files.dense, device)

    def _probed(self, root: Path, device: torch.device) -> Bidirectional:
        """Itself with what a test run finds. Raises CheckpointError if that shows wrong results."""

        def run(ids: Tensor, mask: Tensor) -> Tensor:
            made = self._run(ids.to(device), mask.to(device), torch.zeros_like(ids, device=device))
            return made.cpu().float()

        source = f"{root}: transformers' {type(self.model).__name__}"
        with torch.inference_mode():
            found = probe(run, source, self.vocab_size, self.pad_token_id, self.max_tokens, self.dtype)
        return replace(self, hidden_size=found.width, allows_padding=found.allows_padding)

    def _with_dense(self, checkpoint: Path, folders: Sequence[str], device: torch.device) -> Bidirectional:
        layers: list[DenseLayer] = []
        for folder in folders:
            width = layers[-1].num_outputs if layers else self.hidden_size
            layers.append(DenseLayer.load(checkpoint, folder, width, device))
        return replace(self, dense=layers)

    @torch.inference_mode()
    def hidden_states(self, input_ids: Tensor, mask: Tensor, type_ids: Tensor) -> Tensor:
        """Hidden states of N texts, padded to P tokens: [N, P, hidden].

        All arguments are [N, P] i64; `mask` is 0 for padding, of which there is none unless `allows_padding`.
        """
        return self._run(input_ids, mask, type_ids)

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding."""
        return self.dense[-1].num_outputs if self.dense else self.hidden_size

    @torch.inference_mode()
    def scores(self, input_ids: Tensor, mask: Tensor, type_ids: Tensor) -> Tensor:
        """A cross-encoder's scores of N pairs, [N] f32. Arguments as for `hidden_states`."""
        return self.activation(self._run(input_ids, mask, type_ids)[:, 0].float())

    def _run(self, input_ids: Tensor, mask: Tensor, type_ids: Tensor) -> Tensor:
        """Hidden states [N, P, hidden], or a cross-encoder's logits [N, 1]."""
        inputs = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": type_ids}
        if not self.has_types:
            del inputs["token_type_ids"]
        made = self.model(**{name: tensor for name, tensor in inputs.items() if name in self.inputs})
        output: Tensor = made.logits if self.is_cross_encoder else made.last_hidden_state
        return output


def _is_cross_encoder(values: Mapping[str, Any]) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in architectures(values))


def _read_config(root: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any type, after the key that led to it
        raise CheckpointError(f"config.json ({root}): {first_line(error)}") from None


def _check_supported(root: Path, config: Any, is_cross_encoder: bool, dtype: torch.dtype) -> None:
    """Refuses what a test on short texts would not find, or could not name."""
    source = f"config.json ({root})"
    if is_cross_encoder and config.num_labels != 1:
        raise CheckpointError(
            f"{source}: {config.num_labels} labels: only models that score with one label are supported"
        )
    if config.is_encoder_decoder and (is_cross_encoder or not _has_class_of_encoder(config)):
        raise CheckpointError(
            f"{source}: {config.model_type} has an encoder and a decoder, and no class in transformers is its "
            "encoder alone; embeddings are supported for encoders, decoders and T5"
        )
    if getattr(config, "attention_type", None) == "block_sparse":
        raise CheckpointError(
            f"{source}: attention_type = block_sparse: a long text's numbers would depend on the texts before it; set "
            "original_full"
        )
    if config.model_type.startswith("gemma") and dtype == torch.float16:
        raise CheckpointError(
            f"{source}: {config.model_type} has numbers beyond float16's range; set dtype = bfloat16 or float32"
        )
    if checkpoint_file(root, "adapter_config.json") is not None:
        raise CheckpointError(
            f"adapter_config.json ({root}): adapters are not supported; merge it with peft (merge_and_unload, "
            "save_pretrained) and serve the merged folder, or remove the file to serve the model without it"
        )


def _has_class_of_encoder(config: Any) -> bool:
    """Whether it is the config of an encoder and a decoder of which a class has the encoder alone, as T5."""
    kind = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None)
    return kind is not None and kind.__name__.endswith("EncoderModel")


def _load(root: Path, config: Any, is_cross_encoder: bool, dtype: torch.dtype) -> torch.nn.Module:
    kind = AutoModelForSequenceClassification if is_cross_encoder else AutoModel
    if _has_class_of_encoder(config):
        kind = AutoModelForTextEncoding
    config.return_dict, config.use_cache = True, False
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
        raise CheckpointError(f"{root}: transformers cannot load it: {first_line(error)}") from None
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


def _pad_token_id(config: Any) -> int:
    token = getattr(config, "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else 0  # padding is masked, whatever stands there


def _vocab_size(model: Any, config: Any) -> int:
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else int(model.get_input_embeddings().weight.shape[0])


def _max_tokens(files: SentenceFiles, model: Any, config: Any) -> int:
    """The longest text in tokens: the size of the position table, or the length that training cut texts to."""
    said = [files.max_tokens, getattr(config, "max_position_embeddings", None)]
    # Positions of some tables start after the padding token's id, as RoBERTa's do.
    tables = [each for name, each in model.named_modules() if name.rpartition(".")[2] == "position_embeddings"]
    padded = [each for each in tables if getattr(each, "padding_idx", None) is not None]
    said += [each.weight.shape[0] - each.padding_idx - 1 for each in padded]
    return min((each for each in said if isinstance(each, int) and each > 0), default=NO_LIMIT)


def _activation(root: Path, files: SentenceFiles, values: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """The activation by sentence-transformers' name; Sigmoid if the checkpoint names none."""
    if files.activation is not None:
        return activation_function(f"config_sentence_transformers.json ({root})", files.activation)
    said = (values.get("sentence_transformers") or {}).get("activation_fn")
    name = said or values.get("sbert_ce_default_activation_function") or "Sigmoid"
    return activation_function(f"config.json ({root})", str(name))
