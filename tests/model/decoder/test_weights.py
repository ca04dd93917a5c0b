"""Loading: what a checkpoint may look like, and every way in which it may be wrong, named by file and tensor."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.model.checkpoint import tensor_shapes
from millrace.model.checkpoint.tensor_shapes import open_source
from millrace.model.decoder.weights import load_weights
from millrace.model.errors import CheckpointError
from millrace.model.families.registry import read_spec
from millrace.runtime.startup.load_progress import LoadProgress
from tests.model.checkpoints import make_checkpoint
from tests.model.stepping import greedy, load_decoder

CPU = torch.device("cpu")
TENSOR = "model.layers.1.self_attn.k_proj.weight"
PROMPT = [5, 9, 300, 7]

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", path, has_tokenizer=False)
    return path


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    shutil.copytree(root, tmp_path / "copy")
    return tmp_path / "copy"


def load(root: Path, **options: Any) -> Any:
    return load_weights(root, read_spec(root), CPU, torch.float32, **options)


def tokens(root: Path) -> list[int]:
    return greedy(load_decoder(root), [PROMPT], 8)[0].generated


def test_shards_give_the_model_that_one_file_gives(root: Path, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, has_tokenizer=False, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert tokens(tmp_path) == tokens(root)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = {  # the tensors beside the embedding of a model that says it is tied -> the rows of the output layer come from
    "equal": (lambda tensors: tensors.__setitem__(HEAD, tensors[EMBEDDING].clone()), EMBEDDING),
    "different": (lambda tensors: tensors.__setitem__(HEAD, tensors[EMBEDDING].flip(0).contiguous()), HEAD),
    "head alone": (lambda tensors: tensors.__setitem__(HEAD, tensors.pop(EMBEDDING)), EMBEDDING),
}


@pytest.mark.parametrize("name", TIED)
def test_a_tied_model_is_made_of_the_tensors_that_are_there(name: str, tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path, has_tokenizer=False)
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    change, source = TIED[name]
    _change(tmp_path, change)
    weights = load(tmp_path)
    assert torch.equal(weights.embedding, embedding)
    x = torch.eye(weights.embedding.shape[1])
    assert torch.equal(weights.head(x), (embedding if source == EMBEDDING else embedding.flip(0)).T)


def test_a_head_that_differs_is_told_and_one_of_another_shape_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path, has_tokenizer=False)
    _change(tmp_path, TIED["different"][0])
    source, config = open_source(tmp_path, read_spec(tmp_path), "auto")
    assert not config.head.is_tied and "lm_head.weight in model.safetensors differs" in source.warnings[0]
    _change(tmp_path, lambda tensors: tensors.__setitem__(HEAD, torch.randn(3, 3)))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is \[3, 3\].*vocab_size = "):
        load(tmp_path)


def test_progress_ends_at_the_whole(root: Path) -> None:
    progress = LoadProgress(lambda: 0.0)
    load(root, progress=progress)
    ((name, (done, total)),) = progress.state().files.items()
    size = (root / name).stat().st_size
    assert done == total and size - 10_000 < total < size  # less its header


def test_dummy_weights_need_no_file_and_are_the_same_each_time(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "config.json", tmp_path)
    first, second = (load(tmp_path, load_format="dummy") for _ in range(2))
    assert torch.equal(first.embedding, second.embedding)
    assert 0.019 < float(first.embedding.std()) < 0.021
    assert not torch.equal(first.layers[0].pre_feed.weight, first.embedding[0])


def test_dummy_weights_are_drawn_in_parts_that_differ_and_do_not_depend_on_threads(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(root, load_format="dummy").embedding.flatten()
    monkeypatch.setattr(tensor_shapes, "PART", 100)
    parts = []
    for num_cpus in (1, 7):
        monkeypatch.setattr(os, "cpu_count", lambda num_cpus=num_cpus: num_cpus)
        parts.append(load(root, load_format="dummy").embedding.flatten())
    assert torch.equal(*parts) and torch.equal(parts[0][:100], whole[:100])
    assert not torch.equal(parts[0][100:200], parts[0][:100]) and 0.019 < float(parts[0].std()) < 0.021


def test_weights_are_in_the_dtype_asked_for(root: Path) -> None:
    weights = load_weights(root, read_spec(root), CPU, torch.bfloat16)
    assert weights.embedding.dtype == weights.layers[0].qkv(torch.zeros(2, 64).bfloat16()).dtype == torch.bfloat16


def test_rotary_tables_of_old_checkpoints_are_no_weights(copy: Path) -> None:
    before = tokens(copy)
    _change(copy, lambda tensors: tensors.__setitem__("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)))
    assert tokens(copy) == before


WRONG_TENSORS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(TENSOR), f"tensor {TENSOR} is missing"),
    "extra": (lambda tensors: tensors.__setitem__("model.extra.bias", torch.ones(2)), "tensor model.extra.bias"),
    "transposed": (lambda tensors: _put(tensors, tensors[TENSOR].T), f"tensor {TENSOR} is [64, 32]"),
    "of integers": (lambda tensors: _put(tensors, tensors[TENSOR].to(torch.int8)), f"tensor {TENSOR}: dtype I8"),
    "NaN": (lambda tensors: tensors[TENSOR].__setitem__((1, 1), float("nan")), f"tensor {TENSOR}: holds NaN"),
    "infinite": (lambda tensors: tensors[TENSOR].__setitem__((1, 1), float("-inf")), f"tensor {TENSOR}: holds NaN"),
    "empty": (lambda tensors: _put(tensors, torch.zeros(0, 64)), f"tensor {TENSOR} is [0, 64]"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_a_wrong_tensor_is_named(name: str, copy: Path) -> None:
    change, message = WRONG_TENSORS[name]
    _change(copy, change)
    with pytest.raises(CheckpointError) as caught:
        load(copy)
    assert message in str(caught.value)


def _header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a safetensors header, leaving the data as it is."""
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    text = change(header)
    new = text if isinstance(text, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])


WRONG_HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "overlap": (lambda header: _shift(header, -64), f"tensor {TENSOR}: begins at byte"),
    "hole": (lambda header: _shift(header, 64), f"tensor {TENSOR}: begins at byte"),
    "reversed": (lambda header: header[TENSOR]["data_offsets"].reverse(), f"tensor {TENSOR}: data_offsets"),
    "negative": (lambda header: header[TENSOR].update(data_offsets=[-8, 0]), f"tensor {TENSOR}: data_offsets"),
    "floating": (lambda header: header[TENSOR].update(data_offsets=[0.0, 1.0]), f"tensor {TENSOR}: data_offsets"),
    "not a list": (lambda header: header[TENSOR].update(data_offsets=8), f"tensor {TENSOR}: data_offsets"),
    "past the end": (lambda header: header[TENSOR].update(data_offsets=[0, 2**62]), f"tensor {TENSOR}"),
    "wrong size": (lambda header: header[TENSOR].update(shape=[32, 65]), f"tensor {TENSOR}: [32, 65]"),
    "huge shape": (lambda header: header[TENSOR].update(shape=[2**62, 2**62]), f"tensor {TENSOR}: [4611"),
    "negative shape": (lambda header: header[TENSOR].update(shape=[-32, -64]), f"tensor {TENSOR}: shape"),
    "shape of text": (lambda header: header[TENSOR].update(shape="32"), f"tensor {TENSOR}: shape"),
    "unknown dtype": (lambda header: header[TENSOR].update(dtype="F7"), f"tensor {TENSOR}: dtype 'F7'"),
    "no dtype": (lambda header: header[TENSOR].pop("dtype"), f"tensor {TENSOR}: dtype None"),
    "no object": (lambda header: header.update({TENSOR: 5}), f"tensor {TENSOR}: data_offsets"),
    "twice": (lambda header: b'{"a": 1, ' + json.dumps(header).encode()[1:-1] + b', "a": 2}', "names a twice"),
    "not JSON": (lambda header: b"{" * 50, "not valid JSON"),
    "deep": (lambda header: b"[" * 100_000, "not valid JSON"),
    "not UTF-8": (lambda header: b'{"\xff": 1}', "not valid JSON"),
    "an array": (lambda header: b"[]", "not a JSON object"),
    "without tensors": (lambda header: b"{}", "its tensors end at byte"),
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_a_wrong_header_is_refused_with_its_file(name: str, copy: Path) -> None:
    change, message = WRONG_HEADERS[name]
    _header(copy / "model.safetensors", change)
    with pytest.raises(CheckpointError) as caught:
        load(copy)
    assert message in str(caught.value) and "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 10**7])
def test_a_header_length_that_cannot_be_is_refused(length: int, copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="its header claims"):
        load(copy)


def test_a_file_cut_anywhere_is_refused(copy: Path) -> None:
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    for size in [0, 7, 8, 9, *range(4096, len(whole), 65_536), len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load(copy)
    file.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="is cut or has grown"):
        load(copy)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_other_weight_formats_are_refused_unread(name: str, root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "config.json", tmp_path)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    with pytest.raises(CheckpointError, match=f"unsupported weight format: {name}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "model.gguf"])
def test_other_weight_formats_beside_safetensors_are_ignored(
    name: str, root: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy)
    (copy / name).write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    assert tokens(copy) == tokens(root) and not (copy / "marker").exists()


def test_no_weights_at_all_is_said(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "model-00001-of-00002.safetensors"}}, "index.json names this shard"),
        ({"weight_map": {}}, "weight_map: must map"),
        ({"weight_map": {"a": "../x.safetensors"}}, "weight_map: a: must be the name"),
        ({"weight_map": {"a": "model.bin"}}, "weight_map: a: must be the name"),
        ({}, "weight_map: must map"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(index: dict[str, Any], message: str, copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "x.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load(copy)


def test_of_a_tensor_in_two_shards_the_last_is_used(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file({TENSOR: tensors[TENSOR] * 2}, copy / "b.safetensors")
    (copy / "model.safetensors").rename(copy / "a.safetensors")
    names = {"x": "a.safetensors", "y": "b.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    source, _ = open_source(copy, read_spec(copy), "auto")
    assert source.warnings == [f"tensor {TENSOR} is in a.safetensors and b.safetensors; the last is used"]
    assert (source.array(TENSOR) == (tensors[TENSOR] * 2).numpy()).all()


def test_an_index_beside_a_whole_file_is_not_used(copy: Path, root: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    source, _ = open_source(copy, read_spec(copy), "auto")
    assert "is not used" in source.warnings[0] and tokens(copy) == tokens(root)


def test_only_regular_files_are_opened(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="must be a regular file, not a FIFO"):
        load(copy)
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match="must be a regular file, not a directory"):
        load(copy)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_out_of_the_checkpoint_is_refused_whether_it_leads_anywhere_or_not(copy: Path, exists: bool) -> None:
    file, outside = copy / "model.safetensors", copy.parent / "outside"
    file.rename(outside if exists else copy.parent / "elsewhere")
    file.symlink_to(outside)
    with pytest.raises(CheckpointError) as caught:
        load(copy)
    assert (
        str(caught.value)
        == f"model.safetensors ({copy}): a link that leads out of the checkpoint; copy the file in its place, or trust "
        "this folder's links with allow_links_outside"
    )


def test_the_links_of_a_hub_cache_are_followed(root: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in root.iterdir():
        shutil.copy(file, blobs / f"sha-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"sha-{file.name}")
    assert tokens(snapshot) == tokens(root)


def _put(tensors: Tensors, tensor: torch.Tensor) -> None:
    tensors[TENSOR] = tensor.contiguous()


def _shift(header: dict[str, Any], by: int) -> None:
    header[TENSOR]["data_offsets"] = [offset + by for offset in header[TENSOR]["data_offsets"]]


def _change(root: Path, change: Callable[[Tensors], Any]) -> None:
    file = root / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
