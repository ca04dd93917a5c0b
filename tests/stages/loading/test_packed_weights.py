"""What packed checkpoints become natively: which matrices keep their codes, why others do not, and what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from millrace.deploy.openapi.shapes.server import Weights
from millrace.kernels.layout.grouped_codes import GroupedFormat
from millrace.kernels.native import build, machine
from millrace.model.decoder.native_decoder import native_shape
from millrace.model.families.registry import read_spec
from millrace.model.grouped_matrix import GroupedMatrix
from millrace.stages import LLM, SamplingParams
from millrace.stages.loading.packed_weights import TOGETHER, packed_weights
from tests.families.checkpoint import make_model, write
from tests.families.row import row
from tests.model.quantized.packers import PACKERS

PLAIN = row(
    "packed-weights",
    "llama",
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 32},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
)
Q4, Q8 = GroupedFormat(bits=4, group=32, zero=8), GroupedFormat(bits=8, group=32, zero=128)
LAYER = "model.layers.0"
Q, K, V, O = (f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo")  # noqa: E741
GATE, UP, DOWN = (f"{LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
HEAD = "lm_head.weight"
NUM_PACKED = 256 * (256 + 128 + 128 + 256 + 3 * 512)  # numbers of the layer's matrices


class Source:
    """The packed matrices of a checkpoint."""

    packing = "test, 4 bits"

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found

    def grouped(self, name: str) -> Any:
        found = self.found.get(name)
        return matrix(found) if isinstance(found, GroupedFormat) else found


def matrix(form: GroupedFormat, columns: Any = None) -> GroupedMatrix:
    return GroupedMatrix(form, 64, 256, lambda _: pytest.fail("numbers are not read to decide"), columns=columns)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(PLAIN, make_model(PLAIN), tmp_path_factory.mktemp("plain"))


def decided(
    plain: Path, quantization: str | None = None, **changed: Any
) -> tuple[set[str], dict[str, tuple[str, ...]]]:
    """(the matrices that keep their codes, the others by reason) of a layer in 4 bits, but for those that change."""
    found = {name: Q4 for name in (Q, K, V, O, GATE, UP, DOWN, HEAD)}
    source: Any = Source({**found, **changed})
    weights = packed_weights(source, found, native_shape(read_spec(plain)), quantization)
    return set(weights.matrices), dict(weights.unpacked)


def test_matrices_keep_their_codes_and_others_say_why(plain: Path) -> None:
    everything = {Q, K, V, O, GATE, UP, DOWN, HEAD}
    assert decided(plain) == (everything, {})
    assert decided(plain, **{V: Q8}) == (everything, {}), "whole panels of q, k and v may differ"
    assert decided(plain, **{HEAD: None}) == (everything - {HEAD}, {})
    assert decided(plain, **{UP: Q8}) == (everything - {GATE, UP}, {TOGETHER: (GATE, UP)})
    reasons = {"floats": (K,), TOGETHER: (Q, V)}
    assert decided(plain, **{K: "floats"}) == (everything - {Q, K, V}, reasons)
    ordered = matrix(Q4, np.arange(256, dtype=np.int32))
    assert decided(plain, **{DOWN: ordered, GATE: ordered, UP: ordered}) == (everything, {})
    assert decided(plain, **{UP: ordered}) == (everything - {GATE, UP}, {TOGETHER: (GATE, UP)})
    (told,) = decided(plain, **{O: GroupedFormat(bits=4, group=48, zero=8)})[1]
    assert told.startswith("groups of 48 columns: must be 16, 32")


@pytest.mark.parametrize(
    ("quantization", "told"),
    [("int8", "quantization = int8: they are packed anew"), ("none", "quantization = none")],
)
def test_a_quantization_that_is_asked_for_replaces_the_files(quantization: str, told: str, plain: Path) -> None:
    kept, unpacked = decided(plain, quantization)
    assert not kept and list(unpacked) == [told] and len(unpacked[told]) == 8


def test_rows_are_read_in_portions_that_cover_all() -> None:
    taken: list[tuple[int, int]] = []

    def take(index: Any) -> Any:
        taken.append((index.start, index.stop))

    assert [first for first, _ in GroupedMatrix(Q4, 12, 192, take).portions(5 * 192)] == [0, 5, 10]
    assert taken == [(0, 5), (5, 10), (10, 12)]


# -- engines


def packed(plain: Path, root: Path, name: str) -> Path:
    """The checkpoint with its linear layers packed."""
    config, pack = PACKERS[name]
    tensors, dice = load_file(plain / "model.safetensors"), np.random.default_rng(5)
    for stored, tensor in list(tensors.items()):
        if stored.endswith("_proj.weight"):
            parts = pack(dice, *tensor.shape).tensors
            del tensors[stored]
            tensors |= {stored.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, root / "model.safetensors", {"format": "pt"}
    )
    values = json.loads((plain / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    (root / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    return root


needs_library = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)
SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks": 16, "dtype": "float32", "threads": 1}
PROMPT = [5, 9, 3, 7, 11, 4, 60, 33]


def logprobs(root: Path, **settings: Any) -> tuple[Any, list[float]]:
    """(what is told of the model, the log-probabilities of a prompt's tokens)."""
    with LLM(str(root), **SMALL, **settings) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        told = output.prompt_logprobs
        assert told is not None
        return llm.info, told.logprobs.tolist()


@needs_library
@pytest.mark.parametrize(("name", "bits"), [("ct-int4", 4.5), ("gptq-8", 8.75), ("nf4", 4.5)])
def test_packed_weights_answer_as_the_numbers_that_they_stand_for(
    name: str, bits: float, plain: Path, tmp_path: Path
) -> None:
    root = packed(plain, tmp_path, name)
    info, found = logprobs(root)
    unpacked, expected = logprobs(root, quantization="none")
    assert (info.attention_backend, unpacked.quantization) == ("native", None)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert info.quantization == {"ct-int4": "compressed-tensors, 4 bits", "gptq-8": "gptq, 8 bits"}.get(
        name, "bitsandbytes, fp4"
    )
    assert info.weights is not None and unpacked.weights is not None
    saved = unpacked.weights.num_bytes - info.weights.num_bytes
    assert saved == pytest.approx(NUM_PACKED * (32 - bits) / 8, rel=0.001)
    assert Weights(**info.weights.to_json()).bits_per_weight < unpacked.weights.bits_per_weight == 32.0
    assert f"bits each, as {info.quantization}; a token reads" in info.memory.row("weights").what


@needs_library
def test_codes_in_an_order_of_activations_stay_packed_and_answer_alike(plain: Path, tmp_path: Path) -> None:
    root = packed(plain, tmp_path, "gptq-4-order")
    tensors = load_file(root / "model.safetensors")
    for first, others in ((Q, (K, V)), (GATE, (UP,))):  # as real files have it: their input is one
        for other in others:
            tensors[other.replace("weight", "g_idx")] = tensors[first.replace("weight", "g_idx")].clone()
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    info, found = logprobs(root)
    assert info.attention_backend == "native" and info.quantization == "gptq, 4 bits"
    _, expected = logprobs(root, attention_backend="torch")
    np.testing.assert_allclose(found, expected, atol=5e-3)


@needs_library
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_weights_that_are_packed_anew_row_by_row_are_those_of_whole_matrices(
    quantization: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = packed(plain, tmp_path, "gptq-4-order")
    monkeypatch.setattr("millrace.model.grouped_matrix.UNPACKED_AT_ONCE", 7 * 256)
    _, found = logprobs(root, quantization=quantization)
    monkeypatch.setattr("millrace.stages.loading.packed_weights._by_rows", lambda _: {})
    _, expected = logprobs(root, quantization=quantization)
    assert found == expected
