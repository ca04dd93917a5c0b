"""The files that sentence-transformers writes beside a model, by its old and its new keys.

`modules.json` lists the modules that a text goes through; each has settings of its own. Everything that would change an
embedding or a score is read here, or refused with file, key and value. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from .errors import CheckpointError, quoted, shown
from .files import read_json, read_text

PoolingKind = Literal["last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

POOLING_KINDS: dict[str, PoolingKind] = {  # pooling_mode -> kind
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
SIMILARITIES: dict[str, Similarity] = {name: name for name in ("cosine", "dot", "euclidean", "manhattan")}
_OLD_MODES = {  # each true or false
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_MODULES = ("Transformer", "Pooling", "Dense", "Dropout", "Normalize", "LogitScore")
# Keys of arguments for transformers that change no number here.
_HARMLESS = frozenset(
    {
        *("model_max_length", "padding", "padding_side", "use_fast", "revision", "token", "cache_dir", "subfolder"),
        *("local_files_only", "trust_remote_code", "attn_implementation", "add_pooling_layer", "device_map"),
        *("low_cpu_mem_usage", "use_safetensors", "dtype", "torch_dtype", "use_cache"),
    }
)
_NO_LENGTH = 10**12  # tokenizer_config.json says 1e30 for "no limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFiles:
    """What the files say; the defaults are those of a checkpoint without any."""

    is_present: bool = False  # there is a modules.json
    folder: str = ""  # of the model's own files
    pooling: PoolingKind | None = None
    pooling_problem: str = ""  # why the files' pooling is not supported; another may be set instead
    includes_prompt: bool = True  # in the pooling
    dense: tuple[str, ...] = ()  # folders of linear layers behind the pooling
    normalizes: bool = True  # embeddings have length 1
    max_tokens: int | None = None  # longer texts are cut
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: put before a text
    default_prompt: str = ""  # put before a text of which nothing else is said
    similarity: Similarity = "cosine"
    truncate_dim: int | None = None  # leading numbers of an embedding that are kept
    activation: str | None = None  # of a cross-encoder's score
    score_tokens: tuple[int | None, int | None] | None = None  # of a decoder that judges pairs: those of yes and no


def transformer_folder(root: Path) -> str:
    """The folder of the model's own files below `root`: "" unless modules.json names another, as old versions do."""
    modules = _modules(root)
    return _folder(root, modules[0]) if modules else ""


def has_modules(root: Path) -> bool:
    """Whether the checkpoint in `root` was saved by sentence-transformers."""
    return bool(_modules(root))


def read_sentence_files(root: Path) -> SentenceFiles:
    """Reads all files below `root`. Raises CheckpointError for what would give other numbers without being obeyed."""
    modules = _modules(root)
    folder = _folder(root, modules[0]) if modules else ""
    settings = _Values.read(root, "config_sentence_transformers.json")
    if not modules:
        return SentenceFiles(activation=settings.text("activation_fn"), max_tokens=_tokenizer_length(root, ""))
    if [_kind(module) for module in modules[1:]] == ["LogitScore"]:  # its prompt is not made by this file's rules
        return SentenceFiles(score_tokens=_score_tokens(root, f"{_folder(root, modules[1])}/config.json"))
    transformer = _transformer(root, folder)
    kind = settings.text("model_type") or "SentenceTransformer"
    if kind not in ("SentenceTransformer", "CrossEncoder"):
        raise settings.wrong("model_type", "supported: SentenceTransformer, CrossEncoder")
    return SentenceFiles(
        is_present=True, folder=folder, **transformer, **_pipeline(root, modules), **_model_settings(settings)
    )


def _modules(root: Path) -> list[dict[str, Any]]:
    """The modules in modules.json, or none."""
    text = read_text(root, "modules.json")
    if text is None:
        return []
    source = f"modules.json ({root})"
    try:
        modules = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{source}: must hold a list of modules")
    for module in modules:
        if _kind(module) not in _MODULES:
            raise CheckpointError(
                f"{source}: module {shown(_kind(module))!r} is not supported, and embeddings would be wrong without "
                f"it; supported: {', '.join(_MODULES)}"
            )
    if modules and _kind(modules[0]) != "Transformer":
        raise CheckpointError(f"{source}: the first module is {_kind(modules[0])}: must be Transformer")
    return modules


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type")).rpartition(".")[2]


def _folder(root: Path, module: Mapping[str, Any]) -> str:
    path = module.get("path", "")
    parts = PurePosixPath(path).parts if isinstance(path, str) else None
    if parts is None or ".." in parts or PurePosixPath(path).is_absolute():
        raise CheckpointError(f"modules.json ({root}): path = {quoted(path)}: must be a folder of the checkpoint")
    return "/".join(parts)


class _Values:
    """The values of one JSON file. An error names file, key and value."""

    def __init__(self, root: Path, name: str, values: Mapping[str, Any]) -> None:
        self.values = values
        self._source = f"{name} ({root})"

    @classmethod
    def read(cls, root: Path, name: str) -> _Values:
        return cls(root, name, read_json(root, name) or {})

    def wrong(self, key: str, right: str) -> CheckpointError:
        return CheckpointError(f"{self._source}: {key} = {quoted(self.values.get(key))}: {right}")

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "must be text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return default if value is None else value

    def count(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != value:
            raise self.wrong(key, "must be a number of at least 1")
        return None if value >= _NO_LENGTH else int(value)

    def object(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "must be an object")
        return value or {}


# -- the model and its tokenizer


def _transformer(root: Path, folder: str) -> dict[str, Any]:
    prefix = f"{folder}/" if folder else ""
    names = [name for name in _TRANSFORMER_FILES if read_json(root, prefix + name)]
    values = _Values.read(root, prefix + (names[0] if names else _TRANSFORMER_FILES[0]))
    _check_task(values)
    length = None
    for key in ("processor_kwargs", "tokenizer_args"):
        length = length or _Values(root, f"{prefix}{names[0]}: {key}" if names else "", values.object(key)).count(
            "model_max_length"
        )
    length = length or values.count("max_seq_length")
    lengths = [length or _tokenizer_length(root, prefix), _processing_length(values)]
    return {
        "max_tokens": min((each for each in lengths if each is not None), default=None),
        "lower_case": values.flag("do_lower_case", False),
    }


def _tokenizer_length(root: Path, prefix: str) -> int | None:
    value = (read_json(root, f"{prefix}tokenizer_config.json") or {}).get("model_max_length")
    is_length = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < _NO_LENGTH
    return int(value) if is_length and value is not None else None


def _check_task(values: _Values) -> None:
    """Refuses other inputs and outputs of the model than text to the last hidden states, or to a class."""
    task = values.text("transformer_task") or "feature-extraction"
    outputs = {
        "feature-extraction": ("last_hidden_state", "token_embeddings"),
        "sequence-classification": ("logits", "scores"),
    }
    if task not in outputs:
        raise values.wrong("transformer_task", f"supported: {', '.join(outputs)}")
    states, name = outputs[task]
    modalities = values.object("modality_config")
    if "message" in modalities:
        raise values.wrong("modality_config", "texts as messages of a chat template are not supported; text is")
    if modalities and modalities.get("text") != {"method": "forward", "method_output_name": states}:
        raise values.wrong("modality_config", f"supported for text: method forward, method_output_name {states}")
    if values.text("module_output_name") not in (None, name):
        raise values.wrong("module_output_name", f"supported: {name}")
    for key in ("query_length", "document_length", "query_expansion"):
        if values.values.get(key) is not None:
            raise values.wrong(key, "not supported, and texts would be read otherwise without it")
    for key in ("model_kwargs", "model_args", "processor_kwargs", "tokenizer_args", "config_kwargs", "config_args"):
        if set(values.object(key)) - _HARMLESS:
            raise values.wrong(key, f"supported keys: {', '.join(sorted(_HARMLESS))}")


def _processing_length(values: _Values) -> int | None:
    """The length in `processing_kwargs`; its other keys must not change the ids of a text."""
    lengths: list[int] = []
    for part, keys in values.object("processing_kwargs").items():
        known = part in ("text", "common") and isinstance(keys, Mapping)
        rest = {k: v for k, v in keys.items() if k not in ("padding", "return_tensors", "max_length")} if known else {}
        if not known or rest.pop("truncation", True) not in (True, "longest_first") or rest:
            raise values.wrong("processing_kwargs", "supported: text with max_length, padding, truncation true")
        length = _Values(Path(), "", keys).count("max_length")
        lengths += [] if length is None else [length]
    return min(lengths, default=None)


# -- the modules behind it


def _pipeline(root: Path, modules: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"normalizes": False}
    dense: list[str] = []
    for place, module in enumerate(modules[1:], 1):
        kind, folder = _kind(module), _folder(root, module)
        is_late = found["normalizes"] or (kind == "Pooling") != (place == 1)
        if kind == "Transformer" or (is_late and kind != "Normalize"):
            order = ", ".join(_kind(each) for each in modules)
            raise CheckpointError(
                f"modules.json ({root}): {shown(order)}: supported: Transformer, Pooling, any Dense, and Normalize last"
            )
        if kind == "Pooling":
            found |= _pooling(root, f"{folder}/config.json")
        elif kind == "Dense":
            dense.append(folder)
        elif kind == "Normalize":
            values = _Values.read(root, f"{folder}/config.json")
            for key in ("module_input_name", "module_output_name"):
                if values.text(key) not in (None, "sentence_embedding"):
                    raise values.wrong(key, "supported: sentence_embedding")
            found["normalizes"] = True
    return found | {"dense": tuple(dense)}


def _score_tokens(root: Path, name: str) -> tuple[int | None, int | None]:
    values = _Values.read(root, name).values
    yes, no = (each if type(each) is int else None for each in map(values.get, ("true_token_id", "false_token_id")))
    return yes, no


def _pooling(root: Path, name: str) -> dict[str, Any]:
    values = _Values.read(root, name)
    if not values.values:
        raise CheckpointError(f"{name} ({root}): is missing or empty; modules.json names it for the pooling")
    modes = values.values.get("pooling_mode")
    key = "pooling_mode"
    if modes is None:
        chosen = [mode for old, mode in _OLD_MODES.items() if values.flag(old, False)]
        unknown = [old for old in values.values if old.startswith("pooling_mode_") and old not in _OLD_MODES]
        key = unknown[0] if unknown else next((old for old in _OLD_MODES if values.flag(old, False)), key)
        modes = [*chosen, *unknown] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in POOLING_KINDS:
        problem = f"{name} ({root}): {key} = {quoted(modes)}: exactly one of {', '.join(POOLING_KINDS)} is supported"
        return {"pooling_problem": f"{problem}; say which with pooling = last, mean or cls"}
    return {"pooling": POOLING_KINDS[modes[0]], "includes_prompt": values.flag("include_prompt", True)}


def _model_settings(values: _Values) -> dict[str, Any]:
    prompts = values.object("prompts")
    if not all(isinstance(text, str | None) for text in prompts.values()):
        raise values.wrong("prompts", "must be texts by name")
    prompts = {name: text or "" for name, text in prompts.items()}
    default = values.text("default_prompt_name")
    if default is not None and default not in prompts:
        raise values.wrong("default_prompt_name", f"must be one of {', '.join(map(shown, prompts)) or 'no prompts'}")
    similarity = values.text("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise values.wrong("similarity_fn_name", f"supported: {', '.join(SIMILARITIES)}")
    return {
        "prompts": prompts,
        "default_prompt": "" if default is None else prompts[default],
        "similarity": SIMILARITIES[similarity],
        "truncate_dim": values.count("truncate_dim"),
        "activation": values.text("activation_fn"),
    }
