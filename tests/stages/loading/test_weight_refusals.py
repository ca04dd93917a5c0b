"""Every refusal about weights has the file, the method or tensor, the numbers, and the next step."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model.demo import WEIGHTS
from millrace.model.errors import ModelError
from millrace.model.families.registry import read_spec
from millrace.runtime.env.cpus import ComputeThreads
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.startup.phases import Phases
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.loading import model
from millrace.stages.loading.early import EarlyLoading, OpenedModel
from millrace.stages.loading.model_impl import check_dtype, check_uneven

CONFIG = json.loads((WEIGHTS / "config.json").read_text())
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NOT_READ = (
    "config.json",
    "read are awq, gptq, compressed-tensors, fp8, fbgemm_fp8, modelopt (FP8, NVFP4), bitsandbytes",
    "serve the unquantized checkpoint, with quantization = int4 or int8 on a CPU, or a GGUF file of the model",
)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
PACKED = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": GROUP, "targets": ["Linear"]}}}


def folder(path: Path, config: dict[str, Any] | None, files: dict[str, bytes]) -> str:
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(CONFIG | config))
    for name, content in files.items():
        (path / name).write_bytes(content)
    return str(path)


def refusal(model: str, **settings: Any) -> str:
    try:
        opening = EarlyLoading(EngineConfig(model=model, device="cpu", threads=1, **settings), Phases(lambda: 0.0))
        try:
            native = opening.result().native_model
            assert native is not None and native.result() is None, "it was loaded"
        finally:
            opening.close()
    except (ConfigError, ModelError) as error:
        return str(error)
    raise AssertionError("it was loaded")


def weights(change: str = "") -> bytes:
    """The bundled model's file, changed."""
    raw = (WEIGHTS / WHOLE).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    if change == "cut":
        return raw[:-7]
    if change == "nan":
        begin, end = header["model.norm.weight"]["data_offsets"]
        data[begin:end] = np.full((end - begin) // 2, 0x7FC0, np.uint16).tobytes()
    if change == "extra":
        header["model.layers.0.mlp.router.weight"] = header.pop("model.layers.0.mlp.up_proj.weight")
    if change == "dtype":
        header["model.norm.weight"]["dtype"] = "I16"
    if change == "huge header":
        return struct.pack("<Q", len(raw)) + raw[8:]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def quantized(**values: Any) -> dict[str, Any]:
    return {"quantization_config": values}


METHODS = ("aqlm", "hqq", "vptq", "quanto", "torchao", "spqr", "eetq")
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, bytes], dict[str, Any], tuple[str, ...]]] = {
    **{
        method: (quantized(quant_method=method), {}, {}, (f"quant_method = '{method}'", *NOT_READ))
        for method in METHODS
    },
    "AWQ gemv": (
        quantized(**AWQ | {"version": "gemv"}),
        {},
        {},
        ("config.json", "'gemv': only gemm is read; the same"),
    ),
    "GPTQ 5 bits": (quantized(**GPTQ | {"bits": 5}), {}, {}, ("bits = 5", "with 2, 3, 4 and 8", NOT_READ[2])),
    "GPTQ marlin": (
        quantized(**GPTQ, checkpoint_format="marlin_24"),
        {},
        {},
        ("checkpoint_format = 'marlin_24'", "only gptq and gptq_v2", NOT_READ[2]),
    ),
    "sparse 2:4": (
        quantized(**PACKED, format="marlin-24"),
        {},
        {},
        ("format = 'marlin-24' is not read", "pack-quantized", NOT_READ[2]),
    ),
    "MLX": (
        {"quantization": {"bits": 4, "group_size": 64}},
        {WHOLE: weights()},
        {},
        ("'mlx' weights of 4 bits",),
    ),
    "pickle .bin": (
        {},
        {"pytorch_model.bin": b"x"},
        {},
        ("pytorch_model.bin", "run code", "convert the checkpoint"),
    ),
    "pickle .pth": ({}, {"weights.pth": b"x"}, {}, ("weights.pth", "run code", "convert the checkpoint")),
    "remote code": (
        {"auto_map": {"AutoModel": "a.B"}},
        {WHOLE: weights()},
        {},
        ("auto_map", "remove the key"),
    ),
    "adapter": (
        None,
        {"adapter_config.json": b'{"peft_type": "LORA", "r": 8, "base_model_name_or_path": "a/b"}'},
        {},
        ("LORA adapter of rank 8 for a/b", "serve"),
    ),
    "no weights": ({}, {}, {}, (f"no {WHOLE} and no {INDEX}",)),
    "missing shard": (
        {},
        {INDEX: b'{"weight_map": {"a": "m-1.safetensors"}}'},
        {},
        ("m-1.safetensors", f"{INDEX} names this shard, but there is no such file"),
    ),
    "cut file": ({}, {WHOLE: weights("cut")}, {}, (WHOLE, "at byte 4038000 of 4037993", "fetch the file again")),
    "huge header": (
        {},
        {WHOLE: weights("huge header")},
        {},
        (WHOLE, "claims 4038000 bytes of a file of 4038000"),
    ),
    "not finite": ({}, {WHOLE: weights("nan")}, {}, ("model.norm.weight", "NaN or infinity", "fetch the file again")),
    "missing tensor": (
        {},
        {WHOLE: weights("extra")},
        {},
        ("tensor model.layers.0.mlp.up_proj.weight is missing", "config.json (llama) requires"),
    ),
    "dtype": ({}, {WHOLE: weights("dtype")}, {}, (WHOLE, "tensor model.norm.weight: dtype I16", "supported: F64, F32")),
    "layers": ({"num_hidden_layers": 2}, {WHOLE: weights()}, {}, ("num_hidden_layers: must be 4", "not 2")),
    "shape": (
        {"intermediate_size": 16},
        {WHOLE: weights()},
        {},
        (WHOLE, "mlp.gate_proj.weight is [512, 192], and config.json requires [16, 192]: intermediate_size = 16"),
    ),
    "another method's tensors": (
        quantized(**AWQ),
        {WHOLE: weights()},
        {},
        ("config.json says awq, 4 bits", "no tensor ends in .qweight"),
    ),
    "load_format of a folder": (
        {},
        {WHOLE: weights()},
        {"load_format": "gguf"},
        ("load_format = gguf", "holds safetensors weights; use auto or safetensors"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_that_are_not_read_are_refused_with_the_next_step(name: str, tmp_path: Path) -> None:
    config, files, settings, words = CASES[name]
    found = refusal(folder(tmp_path / "m", config, files), **settings)
    for word in words:
        assert word in found


GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(("dtype", "own"), [("float16", "bfloat16"), ("half", "float32"), ("auto", "float16")])
def test_float16_is_refused_for_families_with_activations_beyond_it(dtype: Any, own: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA | {"dtype": own}))
    spec = read_spec(tmp_path)
    with pytest.raises(ConfigError, match=r"activations of gemma3.* exceed 65504, .* use dtype = bfloat16 or float32$"):
        check_dtype(EngineConfig(dtype=dtype), spec)
    check_dtype(EngineConfig(dtype="bfloat16"), spec)


@pytest.mark.parametrize(
    ("settings", "mend"), [({"enable_lora": True}, "merge_adapter"), ({"kv_cache_dtype": "fp8"}, "auto")]
)
def test_what_takes_all_caches_to_be_alike_is_refused_for_layers_that_share_them(
    settings: dict[str, Any], mend: str
) -> None:
    shape = read_spec(WEIGHTS)
    check_uneven(EngineConfig(**settings), shape)
    shared = replace(shape.layers[0], mixer=replace(shape.attention, kv_of=0))
    shape = replace(shape, layers=(shape.layers[0], shared))
    check_uneven(EngineConfig(), shape)
    with pytest.raises(ConfigError, match=rf"{next(iter(settings))} = .* layers differ in keys and values; use {mend}"):
        check_uneven(EngineConfig(**settings), shape)


def test_float16_is_refused_for_such_a_model_through_transformers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(read_spec(WEIGHTS), family="gemma4_text")
    monkeypatch.setattr(model, "_read_through_transformers", lambda *_: spec)
    config = EngineConfig(model=str(tmp_path), dtype="float16", device="cpu")
    opened = OpenedModel(tmp_path, ComputeThreads(1, (), ""), None, why_through_transformers="no family")
    with pytest.raises(ConfigError, match="activations of gemma4_text exceed 65504"):
        model._load(config, opened, Phases(lambda: 0.0), LiveEnv(0))


@pytest.mark.parametrize("name", ["tensor_parallel_size", "emulate_tp"])
@pytest.mark.parametrize(("why", "what"), [("no family", "runs through transformers"), (None, "is an encoder")])
def test_ranks_are_refused_for_a_model_that_is_not_cut(tmp_path: Path, name: str, why: str | None, what: str) -> None:
    config = EngineConfig(model=str(tmp_path), device="cpu", **{name: 2})  # type: ignore[arg-type]
    opened = OpenedModel(tmp_path, ComputeThreads(1, (), ""), None, why_through_transformers=why or "")
    with pytest.raises(ConfigError, match=f"{name} = 2: .* {what}; use 1"):
        model._load(config, opened, Phases(lambda: 0.0), LiveEnv(0))


def test_a_gguf_file_by_another_name_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    shutil.copy(WEIGHTS / WHOLE, tmp_path / "m.gguf")
    assert "m.gguf: does not begin with GGUF, so it is no GGUF file; fetch the file again" in refusal(
        str(tmp_path / "m.gguf")
    )
    (tmp_path / "m.bin").touch()
    assert "m.bin: is a file; name the directory that holds config.json, or a .gguf file" in refusal(
        str(tmp_path / "m.bin")
    )
