"""Adapters that are damaged, of another model, or made to do harm: each is refused in one line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millrace.model.checkpoint.whole_model import WholeModel
from millrace.model.errors import AdapterError
from millrace.model.families.registry import read_spec
from millrace.model.lora.adapter import read_adapter
from millrace.model.lora.patterns import full_matches, matches
from millrace.model.lora.weights import AdapterFiles
from millrace.model.spec import DecoderSpec
from tests.model.lora.peft_formats import PREFIX, write_adapter, write_base

TENSORS = "adapter_model.safetensors"
QUERY = f"{PREFIX}model.layers.2.self_attn.q_proj"
BOMB = r"([\w.]+)+!"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DecoderSpec]:
    folder = write_base("llama", tmp_path_factory.mktemp("bases") / "llama")
    return folder, read_spec(folder)


def refusal(folder: Path, spec: DecoderSpec) -> str:
    """The error of an adapter, which is one line that names it."""
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, spec, "float32", name="x")
    text = str(caught.value)
    assert text.startswith("adapter 'x'") and "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"use_foo": 1}, "config key 'use_foo' is not known to this server; it may change what the adapter computes"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not served; LORA is"),
        ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS'"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base's weights as well; save it converted"),
        ({"init_lora_weights": "olora"}, "changed the base's weights as well"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is not served"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters is not served"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is not served"),
        ({"use_qalora": True}, "use_qalora is not served"),
        ({"fan_in_fan_out": True}, "stored otherwise than the adapter assumes"),
        ({"r": 5}, "lora_A of layer 0 down_proj is [4, 48], and its config says rank 5"),
        ({"r": 10**9}, "r = 1000000000: must be a whole number from 1 to 4096"),
        ({"r": True}, "r = True: must be a whole number"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan: must be a number"),
        ({"alpha_pattern": {"q_proj": "9" * 999}}, "alpha_pattern = '999"),
        ({"target_modules": ["k_proj"]}, "changes model.layers.0.mlp.down_proj, which its target_modules leave out"),
        ({"exclude_modules": ["v_proj"]}, "v_proj, which its target_modules leave out"),
        ({"layers_to_transform": 1}, "changes model.layers.0.mlp.down_proj, which its target_modules leave out"),
        ({"target_modules": "(" * 1001}, "a pattern of 1001 characters; at most 1000 are read"),
        ({"rank_pattern": dict.fromkeys(map(str, range(1001)), 8)}, "holds 1001 patterns; at most 1000 are read"),
        ({"target_modules": "(q_proj"}, "a pattern of module names is no regular expression: missing )"),
        ({"use_dora": True}, "use_dora is not served at run time; merge it with --merge-adapter"),
        ({"lora_bias": True}, "lora_bias is not served at run time"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save holds lm_head; run-time adapters change linear layers"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices: run-time adapters change linear layers only"),
        ({"bias": "all"}, "bias = all: run-time adapters change no biases"),
    ],
)  # fmt: skip
def test_a_key_that_changes_the_computation_is_refused(
    base: tuple[Path, DecoderSpec], tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    assert said in refusal(write_adapter("plain", base[0], tmp_path, **keys), base[1])


@pytest.mark.parametrize("keys", [{"use_foo": None}, {"use_foo": False}, {"use_foo": {}}, {"lora_dropout": 0.5}])
def test_a_key_that_is_off_or_of_training_changes_nothing(
    base: tuple[Path, DecoderSpec], tmp_path: Path, keys: dict[str, Any]
) -> None:
    without = read_adapter(write_adapter("plain", base[0], tmp_path / "without"), base[1], "float32")
    read = read_adapter(write_adapter("plain", base[0], tmp_path / "with", **keys), base[1], "float32")
    assert read.digest == without.digest


def _change(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[dict[str, np.ndarray]], None]:
    def apply(tensors: dict[str, np.ndarray]) -> None:
        tensor = change(tensors.pop(name))
        if tensor is not None:
            tensors[name] = np.ascontiguousarray(tensor)

    return apply


A, B = f"{QUERY}.lora_A.weight", f"{QUERY}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_change(B, lambda b: b[:16]), "lora_B of layer 2 q_proj is [16, 4], this model needs [32, 4]"),
        (_change(A, lambda a: a.T), "lora_A of layer 2 q_proj is [32, 4], and its config says rank 4"),
        (_change(A, lambda a: a[:0]), "lora_A of layer 2 q_proj is [0, 32]"),
        (_change(A, lambda a: a.reshape(-1)), "lora_A of layer 2 q_proj is [128]"),
        (_change(B, lambda b: None), "layer 2 q_proj has only one of lora_A and lora_B"),
        (_change(B, lambda b: b * np.float32(np.nan)), "lora_B of layer 2 q_proj holds NaN or infinity"),
        (_change(A, lambda a: a.astype(np.int32)), "lora_A of layer 2 q_proj is of dtype I32"),
        (lambda t: t.update({f"{QUERY}.lora_C.weight": t[A]}), "changes model.layers.2.self_attn.q_proj.lora_C, which"),
        (lambda t: t.update({f"{QUERY}.lora_A.bias2": t[A]}), "is of no known kind; it may change"),
        (lambda t: t.update({"model.x.lora_A.weight": t[A]}), "tensor model.x.lora_A.weight is of no known kind"),
        (lambda t: t.update({f"{PREFIX}../../etc/passwd.weight": t[A]}), "changes ../../etc/passwd, which this model"),
        (lambda t: t.update({f"{PREFIX}visual.proj.lora_A.weight": t[A]}), "changes visual.proj, which this model has"),
        (lambda t: t.update({f"{QUERY}\n.lora_A.weight": t[A]}), "q_proj\\n.lora_A.weight' is of no known kind"),
        (lambda t: t.clear(), "holds no tensor that this model uses"),
    ],
)
def test_tensors_that_fit_nothing_are_refused(
    base: tuple[Path, DecoderSpec], tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    write_adapter("plain", base[0], tmp_path)
    tensors = dict(load_file(tmp_path / TENSORS))
    change(tensors)
    save_file(tensors, tmp_path / TENSORS)
    assert said in refusal(tmp_path, base[1])


def test_a_pickle_is_refused_by_name_and_not_opened(base: tuple[Path, DecoderSpec], tmp_path: Path) -> None:
    write_adapter("plain", base[0], tmp_path)
    (tmp_path / TENSORS).rename(tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.bin").chmod(0)
    assert refusal(tmp_path, base[1]) == "adapter 'x': adapter_model.bin is a pickle; convert it to safetensors"


@pytest.mark.parametrize("name", [TENSORS, "adapter_config.json"])
def test_a_link_out_of_the_folder_is_not_followed(base: tuple[Path, DecoderSpec], tmp_path: Path, name: str) -> None:
    folder = write_adapter("plain", base[0], tmp_path / "x")
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    assert "a link that leads out of the checkpoint" in refusal(folder, base[1])


def test_a_file_that_is_no_file_is_not_waited_for(base: tuple[Path, DecoderSpec], tmp_path: Path) -> None:
    import os

    folder = write_adapter("plain", base[0], tmp_path)
    (folder / TENSORS).unlink()
    os.mkfifo(folder / TENSORS)
    assert "must be a regular file, not a FIFO" in refusal(folder, base[1])


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ((10 << 30).to_bytes(8, "little") + b"{}", "its header claims 10737418240 bytes of a file of"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not a JSON object"),
        (b"", "is too short for a safetensors file"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "are not [begin, end)"),
    ],
)
def test_a_damaged_header_is_refused(base: tuple[Path, DecoderSpec], tmp_path: Path, raw: bytes, said: str) -> None:
    folder = write_adapter("plain", base[0], tmp_path)
    (folder / TENSORS).write_bytes(raw)
    assert said in refusal(folder, base[1])


def test_a_header_of_ten_gigabytes_in_a_sparse_file_is_not_read(base: tuple[Path, DecoderSpec], tmp_path: Path) -> None:
    folder = write_adapter("plain", base[0], tmp_path)
    with (folder / TENSORS).open("wb") as file:
        file.write((10 << 30).to_bytes(8, "little"))
        file.truncate((10 << 30) + 8)
    assert "and at most 8388608 are read" in refusal(folder, base[1])


def test_a_file_that_is_cut_while_it_is_read_ends_the_adapter_alone(
    base: tuple[Path, DecoderSpec], tmp_path: Path
) -> None:
    folder = write_adapter("plain", base[0], tmp_path)
    files = AdapterFiles(folder, WholeModel(base[1]), "x")
    with (folder / TENSORS).open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(AdapterError, match=f"adapter 'x': {TENSORS}: was cut while it was read"):
        for module in files.modules.values():
            files.array(module, "lora_B")


@pytest.mark.parametrize("text", ["[]", "{", '{"r": ' + "[" * 5000, "\xff"])
def test_a_configuration_that_is_no_object_is_refused(
    base: tuple[Path, DecoderSpec], tmp_path: Path, text: str
) -> None:
    folder = write_adapter("plain", base[0], tmp_path)
    (folder / "adapter_config.json").write_text(text, "latin-1")
    assert "adapter_config.json" in refusal(folder, base[1])


@pytest.mark.parametrize("keys", [{"target_modules": BOMB}, {"rank_pattern": {BOMB: 8}}])
def test_a_pattern_of_exponential_time_is_ended(
    base: tuple[Path, DecoderSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    monkeypatch.setattr("millrace.model.lora.patterns.LIMIT_S", 0.2)
    began = time.monotonic()
    said = refusal(write_adapter("plain", base[0], tmp_path, **keys), base[1])
    assert "take more than 0.2 s to match; list the names instead" in said
    assert time.monotonic() - began < 10


def test_a_pattern_that_takes_memory_without_bound_is_ended(base: tuple[Path, DecoderSpec], tmp_path: Path) -> None:
    pattern = "((((((((((x{1000}){1000}){1000}){1000}){1000}){1000}){1000}){1000}){1000}){1000})|.*"
    folder = write_adapter("plain", base[0], tmp_path, target_modules=pattern)
    try:
        read_adapter(folder, base[1], "float32")
    except AdapterError as error:
        assert "pattern" in str(error)


def test_the_configuration_of_peft_is_read_as_it_is_written(base: tuple[Path, DecoderSpec], tmp_path: Path) -> None:
    folder = write_adapter("plain", base[0], tmp_path)
    keys = json.loads((folder / "adapter_config.json").read_text())
    assert len(keys) > 35 and read_adapter(folder, base[1], "float32").rank == keys["r"]


def test_plain_patterns_match_as_regular_expressions_from_a_dot_on_do() -> None:
    names = ["a.b.q_proj", "q_proj", "xq_proj", "a.bxq_proj", "a-b", ""]
    plain = ["q_proj", "b.q_proj", ".q_proj", "a.b", "", "b", "proj", "......"]

    def fail(said: str) -> NoReturn:
        raise AssertionError(said)

    assert matches(plain, names, fail) == full_matches([rf"(.*\.)?({one})" for one in plain], names, fail)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_file_that_is_replaced_after_its_check_is_not_followed(
    base: tuple[Path, DecoderSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = write_adapter("plain", base[0], tmp_path / "x")
    path = folder / TENSORS

    def checked(root: Path, name: str) -> Path:
        path.rename(tmp_path / "elsewhere") if path.is_file() and not path.is_symlink() else None
        if not os.path.lexists(path):
            path.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(path)
        return path

    monkeypatch.setattr("millrace.model.lora.tensor_file.checkpoint_file", checked)
    said = refusal(folder, base[1])
    assert "cannot be read" in said if kind == "link" else "is no regular file any more" in said
