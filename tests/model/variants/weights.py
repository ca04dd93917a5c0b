"""Variants of the files that hold weights. Those that are refused name file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.model.variants.runs import Variant

Tensors = dict[str, torch.Tensor]
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
K_PROJ, Q_PROJ = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight"
TIED = {"tie_word_embeddings": True}


def changed(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """A change of the tensors; what `change` returns, if it is a dict, replaces them."""

    def apply(root: Path) -> None:
        tensors = load_file(root / WHOLE)
        result = change(tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in (result if isinstance(result, dict) else tensors).items()},
            root / WHOLE,
        )

    return apply


def plus(**tensors: torch.Tensor) -> Callable[[Path], None]:
    return changed(lambda all_of: {**all_of, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}})


def renamed(rename: Callable[[str], str]) -> Callable[[Path], None]:
    return changed(lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})


def sharded(*parts: Callable[[Tensors], Mapping[str, torch.Tensor]], folder: str = "") -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        tensors = load_file(root / WHOLE)
        (root / WHOLE).unlink()
        (root / folder).mkdir(exist_ok=True)
        weight_map = {}
        for number, part in enumerate(parts):
            name = f"{folder}model-{number}.safetensors"
            save_file(dict(part(tensors)), root / name)
            weight_map |= dict.fromkeys(part(tensors), name)
        (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return apply


def stale_index(**weight_map: Any) -> Callable[[Path], None]:
    return lambda root: (root / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def with_header(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        content = (root / WHOLE).read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = change(content[8 : 8 + size])
        (root / WHOLE).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])

    return apply


def all_as(dtype: torch.dtype) -> Callable[[Path], None]:
    return changed(lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})


def half(number: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for at, (name, tensor) in enumerate(tensors.items()) if at % 2 == number}


def without(*names: str) -> Callable[[Path], None]:
    return changed(lambda tensors: [tensors.pop(name) for name in names])


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return changed(lambda tensors: tensors.__setitem__(name, make(tensors[name])))


def poisoned(value: float) -> Callable[[Path], None]:
    return changed(lambda tensors: tensors[K_PROJ].__setitem__((1, 1), value))


ones = torch.ones

FILES = [
    Variant("whole"),
    Variant("shards", change=sharded(half(0), half(1))),
    Variant("shards in a folder", change=sharded(half(0), half(1), folder="parts/")),
    Variant("an index of shards that are gone", change=stale_index(a="model-1.safetensors")),
    Variant("an index of another form", change=stale_index(a=5)),
    Variant("a tensor in two shards", change=sharded(dict, lambda tensors: {K_PROJ: tensors[K_PROJ]})),
    Variant("another tensor in the last shard", change=sharded(dict, lambda tensors: {K_PROJ: tensors[K_PROJ] * 2})),
    Variant("another tensor in the first shard", change=sharded(lambda tensors: {K_PROJ: tensors[K_PROJ] * 2}, dict)),
    Variant("tensors at odd places", change=with_header(lambda header: header + b" ")),
    Variant("a long header", change=with_header(lambda header: header + b" " * 4096)),
    Variant("another order", change=changed(lambda tensors: dict(reversed(tensors.items())))),
    Variant(
        "other metadata", change=with_header(lambda header: header.replace(b'"format":"pt"', b'"format":"pt","x":"y"'))
    ),
    Variant("a pickle beside", change=lambda root: (root / "pytorch_model.bin").write_bytes(b"cos\n")),
    Variant(
        "an index without shards",
        change=lambda root: [(root / WHOLE).unlink(), stale_index()(root)],
        refused="weight_map: must map",
    ),
    Variant(
        "a shard that is gone",
        change=lambda root: [(root / WHOLE).rename(root / "x"), stale_index(a="model-1.safetensors")(root)],
        refused="model-1.safetensors",
    ),
]

NAMES = [
    Variant("no prefix", change=renamed(lambda name: name.removeprefix("model."))),
    Variant("no prefix, tied", "qwen2", change=renamed(lambda name: name.removeprefix("model."))),
    Variant("a prefix everywhere", change=renamed(lambda name: name if name.startswith("model.") else f"model.{name}")),
    Variant(
        "some with a prefix", change=renamed(lambda name: name.removeprefix("model.") if "q_proj" in name else name)
    ),
    Variant("a name with and without prefix", change=plus(norm__weight=ones(32)), refused="norm.weight"),
    Variant(
        "another decoder's names",
        change=renamed(lambda name: name.replace("model.", "transformer.")),
        refused="num_hidden_layers: must be 0",
    ),
]

BESIDES = [
    Variant("a buffer of whole numbers", change=plus(model__position_ids=torch.arange(64)[None])),
    Variant("flags", change=plus(model__layers__0__self_attn__mask=ones(4).bool())),
    Variant("an empty tensor", change=plus(model__extra=torch.zeros(0, 4))),
    Variant("rotary tables", change=plus(model__layers__0__self_attn__rotary_emb__inv_freq=ones(4))),
    Variant("rotary tables of the model", change=plus(model__rotary_emb__inv_freq=ones(4))),
    Variant("another head", change=plus(v_head__summary__weight=ones(1, 32), score__weight=ones(2, 32))),
    Variant("a bias", change=plus(model__layers__0__self_attn__q_proj__bias=ones(32)), refused="q_proj.bias"),
    Variant(
        "a further layer",
        change=plus(model__layers__2__mlp__up_proj__weight=ones(48, 32)),
        refused="num_hidden_layers: must be 3",
    ),
    Variant(
        "a norm of another family",
        change=plus(model__layers__0__self_attn__q_norm__weight=ones(8)),
        refused="q_norm.weight is not part of",
    ),
]

DTYPES = [
    Variant("bfloat16", change=all_as(torch.bfloat16)),
    Variant("float16", change=all_as(torch.float16)),
    Variant("float64", change=all_as(torch.float64)),
    Variant("one in float64", change=put(K_PROJ, torch.Tensor.double)),
    Variant(
        "norms in float32",
        change=changed(
            lambda tensors: {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}
        ),
    ),
    Variant("one in int8", change=put(K_PROJ, torch.Tensor.char), refused=f"{K_PROJ}: dtype I8 is not supported"),
    Variant(
        "one in float8",
        change=put(K_PROJ, lambda tensor: tensor.to(torch.float8_e4m3fn)),
        refused=f"{K_PROJ}: dtype F8_E4M3 is not supported",
    ),
    Variant("not a number", change=poisoned(float("nan")), refused=f"tensor {K_PROJ}: holds NaN"),
    Variant("infinity", change=poisoned(float("inf")), refused=f"tensor {K_PROJ}: holds NaN or infinity"),
]

HEADS = [
    Variant("tied, both equal", "qwen2", change=changed(lambda t: t.__setitem__(HEAD, t[EMBEDDING].clone()))),
    Variant("tied, both different", "qwen2", change=changed(lambda t: t.__setitem__(HEAD, t[EMBEDDING].flip(0)))),
    Variant("tied, head alone", "qwen2", change=changed(lambda t: t.__setitem__(HEAD, t.pop(EMBEDDING)))),
    Variant(
        "tied, equal in another dtype",
        "qwen2",
        change=changed(
            lambda t: (
                [t.__setitem__(EMBEDDING, t[EMBEDDING].half().float()), t.__setitem__(HEAD, t[EMBEDDING].half())]
            )
        ),
    ),
    Variant(
        "tied, one number differs",
        "qwen3",
        change=changed(lambda t: [t.__setitem__(HEAD, t[EMBEDDING].clone()), t[HEAD].__setitem__((5, 3), 9.0)]),
    ),
    Variant("tied, none", "qwen2", change=without(EMBEDDING), refused=f"tensor {EMBEDDING} is missing"),
    Variant(
        "tied, head of another size", "qwen2", change=plus(lm_head__weight=ones(3, 32)), refused=f"{HEAD} is [3, 32]"
    ),
    Variant("untied, both equal", change=changed(lambda t: t.__setitem__(HEAD, t[EMBEDDING].clone()))),
    Variant("untied, no head", change=without(HEAD), refused=f"tensor {HEAD} is missing"),
    Variant("untied, no embedding", change=without(EMBEDDING), refused=f"tensor {EMBEDDING} is missing"),
    Variant("one missing", change=without(K_PROJ), refused=f"tensor {K_PROJ} is missing"),
    Variant("one transposed", change=put(K_PROJ, torch.t), refused=f"{K_PROJ} is [32, 16]"),
    Variant("one flattened", change=put(Q_PROJ, torch.flatten), refused=f"{Q_PROJ} is [1024]"),
]

WEIGHTS = [*FILES, *NAMES, *BESIDES, *DTYPES, *HEADS]
