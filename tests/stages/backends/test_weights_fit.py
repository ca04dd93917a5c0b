"""Whether a model fits the memory, before its weights are read."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.model.checkpoint import hub
from millrace.model.checkpoint.tensor_shapes import expected_shapes
from millrace.model.demo import WEIGHTS
from millrace.model.errors import DownloadError
from millrace.model.families.registry import read_spec
from millrace.model.named_tensors import StoredPiece
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.env.log import captured_logs
from millrace.runtime.startup.phases import Phases
from millrace.stages.backends import cache_size
from millrace.stages.backends.torch.loading import _check_fit as check_torch_fit
from millrace.stages.backends.weights_fit import WeightsFit, least_cache_bytes
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.loading import early
from millrace.stages.loading.model import load_model
from millrace.stages.loading.native_model import _streamed_bytes as streamed_bytes
from tests.stages.backends.test_host_memory import MACHINE, MIB, v2, written

GIB = 1 << 30


def test_the_refusal_has_all_numbers_and_the_largest_other_that_fits() -> None:
    fit = WeightsFit(
        name="M-Q4_K_M.gguf",
        device="cpu",
        form="stored",
        weights=18 * GIB,
        packing=GIB,
        cache=2 * GIB,
        free=12 * GIB,
        total=24 * GIB,
        others={"M-Q8_0.gguf": 30 * GIB, "M-Q2_K.gguf": 9 * GIB, "M-IQ1_S.gguf": 6 * GIB, "M-Q3_K_M.gguf": 14 * GIB},
    )
    with pytest.raises(ConfigError) as caught:
        fit.check()
    assert str(caught.value).startswith(
        "M-Q4_K_M.gguf: the weights take 18 GiB as stored, packing them 1 GiB, the smallest KV cache 2 GiB, and cpu "
        "has 12 GiB free of 24 GiB: M-Q2_K.gguf takes 9 GiB and fits; or choose a smaller model, or "
    )
    assert [line.split()[-2:] for line in fit.to_text()[1:]] == [
        *([["not", "fit"]] * 2),
        ["GiB", "fits"],
        ["GiB", "fits"],
        ["not", "fit"],
    ]


def test_where_nothing_fits_the_smallest_other_is_told() -> None:
    fit = WeightsFit(name="", device="cpu", form="bfloat16", weights=9, free=2, others={"a": 7, "b": 5, "c": 10})
    with pytest.raises(ConfigError, match=r"^the weights take 9 B as bfloat16, .*free: b takes 5 B and does not fit e"):
        fit.check()
    WeightsFit(name="", device="cpu", form="bfloat16", weights=9, packing=1, cache=2, free=12).check()


def test_the_least_cache_is_one_sequence_unless_its_size_is_configured() -> None:
    assert least_cache_bytes(EngineConfig(), 100, 33) == 300
    assert least_cache_bytes(EngineConfig(max_model_len="auto"), 100, 33) == 100
    assert least_cache_bytes(EngineConfig(num_gpu_blocks=7), 100, 33) == 0  # checked by its name later
    assert least_cache_bytes(EngineConfig(kv_cache_bytes=7), 100, 33) == 0


def load(model: Path, **settings: object) -> object:
    config = EngineConfig(model=str(model), device="cpu", threads=1, num_cpu_blocks=0, **settings)  # type: ignore[arg-type]
    return load_model(config, Phases(lambda: 0.0), LiveEnv(0))


def sparse_checkpoint(folder: Path) -> int:
    """The bundled model with a feed-forward layer so wide that the file has a terabyte, all of it a hole."""
    shutil.copytree(WEIGHTS, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    width = config["intermediate_size"] = 8 * 10**8
    (folder / "config.json").write_text(json.dumps(config))
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    header.pop("__metadata__", None)
    position = 0
    for name, entry in header.items():
        if "mlp" in name:
            entry["shape"][name.endswith("down_proj.weight")] = width
        size = 2 * entry["shape"][0] * (entry["shape"][1] if len(entry["shape"]) > 1 else 1)
        entry["dtype"], entry["data_offsets"] = "BF16", [position, position + size]
        position += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    return position


def test_a_file_larger_than_memory_is_refused_with_the_numbers_and_not_read(tmp_path: Path) -> None:
    size = sparse_checkpoint(tmp_path)
    assert size > 10**12 and (tmp_path / "model.safetensors").stat().st_blocks < 1000
    with pytest.raises(
        ConfigError, match=r"weights take [\d.]+ TiB as bfloat16.* free of .*: quantization = int4 takes"
    ):
        load(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_blocks < 1000


def test_a_container_too_small_is_refused_before_reading_and_a_larger_one_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE | v2(str(24 * MIB), 20 * MIB)))
    with pytest.raises(
        ConfigError, match=r"the smallest KV cache .*cpu has 4 MiB free of 24 MiB: .*container's memory"
    ):
        load(WEIGHTS)
    written(tmp_path, v2(str(500 * MIB), 20 * MIB))
    with captured_logs() as logs:
        load(WEIGHTS, max_model_len=64, max_num_seqs=4)
    (told,) = [line for line in logs if line["event"] == "memory.fit"]
    assert told["free_bytes"] == 480 * MIB and told["weights_bytes"] > 0 and told["least_cache_bytes"] > 0
    assert [line.split("  ")[0] for line in told["table"]] == [
        "weights as           ".rstrip(),
        "bfloat16 (chosen)",
        "quantization = int8",
        "quantization = int4",
    ]


def test_a_gguf_file_of_the_hub_is_refused_before_it_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"m-Q4_K_M-00001-of-00002.gguf": 500 * MIB, "m-Q4_K_M-00002-of-00002.gguf": 400 * MIB, "README.md": 1}
    sizes |= {"m-Q2_K.gguf": 300 * MIB, "m-Q8_0.gguf": 2 * GIB}
    monkeypatch.setattr(hub, "sizes_on_hub", lambda *_: sizes)
    monkeypatch.setattr(hub, "_snapshot", snapshot_of(tmp_path / "cache"))
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE))
    config = EngineConfig(model="owner/name:Q4_K_M", device="cpu")
    with pytest.raises(ConfigError, match=r"m-Q4_K_M: .* 900 MiB as .* 800 MiB free of .*: m-Q2_K.gguf takes 300"):
        early.resolve(config)


@pytest.mark.parametrize(
    ("settings", "keys", "message"),
    [
        (
            {"dtype": "float32"},
            {},
            r"m: the weights take 2\.\d+ GiB as float32, and cpu has 800 MiB free .*: quantization = int8 takes 5\d\d",
        ),
        ({"quantization": "int8"}, {}, None),
        ({}, {"quantization_config": {"quant_method": "awq"}}, r"m: the weights take 1\.5 GiB as stored, and cpu has"),
        ({}, {"model_type": "bert"}, r"m: the weights take 1\.5 GiB as stored, and cpu has"),
    ],
)
def test_safetensors_of_the_hub_are_refused_before_they_are_downloaded(
    settings: dict[str, Any], keys: dict[str, Any], message: str | None, monkeypatch: Any, tmp_path: Path
) -> None:
    sizes = {"config.json": 600, "model.safetensors": 3 * GIB // 2, "README.md": 1}
    config = json.loads((WEIGHTS / "config.json").read_text()) | {"vocab_size": 600_000_000 // 512} | keys
    config |= {"hidden_size": 512, "tie_word_embeddings": True}
    monkeypatch.setattr(hub, "sizes_on_hub", lambda *_: sizes)
    monkeypatch.setattr(hub, "_snapshot", snapshot_of(tmp_path / "cache", config))
    monkeypatch.setattr(cache_size, "ROOT", written(tmp_path, MACHINE))
    engine = EngineConfig(model="owner/m", device="cpu", **settings)
    with pytest.raises(ConfigError if message else DownloadError, match=message or "all is fetched"):
        early.resolve(engine)


def snapshot_of(root: Path, config: dict[str, Any] | None = None) -> Any:
    """A download that gets config.json alone, and fails for more."""

    def snapshot(*arguments: Any, unreachable: str = "") -> Path:
        offline, patterns = arguments[4], arguments[-1]
        if offline:
            raise DownloadError("not in the cache")
        if any("safetensors" in pattern or "gguf" in pattern for pattern in patterns):
            raise DownloadError("all is fetched")
        root.mkdir()
        (root / "config.json").write_text(json.dumps(config))
        return root

    return snapshot


def test_the_smallest_cache_is_counted_in_the_dtype_of_the_cache() -> None:
    found = {}
    for dtype in ("auto", "fp8"):
        config = EngineConfig(model=str(WEIGHTS), device="cpu", kv_cache_dtype=dtype)
        with captured_logs() as logs:
            check_torch_fit(config, read_spec(WEIGHTS), torch.bfloat16, 64, torch.device("cpu"), GIB)
        (told,) = [line for line in logs if line["event"] == "memory.fit"]
        found[dtype] = told["least_cache_bytes"]
    assert found["auto"] == 2 * found["fp8"] > 0


def test_ranks_are_measured_together_on_a_cpu_and_one_by_one_on_gpus() -> None:
    spec, found = read_spec(WEIGHTS), {}
    for device in ("cpu", "cuda"):
        config = EngineConfig(model=str(WEIGHTS), device=device, tensor_parallel_size=2)
        with captured_logs() as logs:
            check_torch_fit(config, spec, torch.float32, 64, torch.device(device), GIB)
        (told,) = [line for line in logs if line["event"] == "memory.fit"]
        found[device] = told["weights_bytes"], told["least_cache_bytes"]
    sizes = {name: 4 * math.prod(shape) for name, shape in expected_shapes(spec).items()}
    on_each = sum(size for name, size in sizes.items() if "norm" in name or "embed" in name)
    both = sum(sizes.values()) + on_each
    assert (found["cpu"][0], found["cuda"][0]) == (both, both // 2)
    assert found["cpu"][1] == 2 * found["cuda"][1] > 0
    config = EngineConfig(model=str(WEIGHTS), device="cuda", tensor_parallel_size=2)
    with captured_logs(), pytest.raises(ConfigError, match="and cuda:1 has .* free: .*choose a smaller model"):
        check_torch_fit(config, spec, torch.float32, 64, torch.device("cuda:1"), both // 2)


def test_a_streamed_tensor_takes_its_bytes_and_twice_of_them_only_where_parts_are_put_together() -> None:
    parts = {"one": [StoredPiece("a", "f", 6)], "two": [StoredPiece("a", "f", 6), StoredPiece("b", "f", 4)]}
    source = SimpleNamespace(pieces=parts.__getitem__)
    assert [streamed_bytes(source, name) for name in parts] == [6, 20]  # type: ignore[arg-type]
