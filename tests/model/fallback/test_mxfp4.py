"""gpt-oss with experts in MXFP4: the numbers that the format's description gives, and answers by all that reads it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from millrace import LLM, SamplingParams
from millrace.kernels.layout.experts import CodedMatrices
from millrace.model.checkpoint.tensor_shapes import open_source
from millrace.model.decoder.experts import coded_item_sizes
from millrace.model.decoder.memory_estimate import weights_bytes
from millrace.model.decoder.weights import load_weights
from millrace.model.errors import CheckpointError
from millrace.model.fallback.checkpoint_loading import load_model, num_weights, read_config
from millrace.model.families import registry
from millrace.model.families.registry import read_spec
from millrace.model.grouped_matrix import GroupedMatrix
from millrace.stages.backends.weights_fit import bytes_kept
from tests.families.checkpoint import make_model, write
from tests.families.row import row

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GPT_OSS = row(
    "gpt-oss-mxfp4",
    "gpt_oss",
    **{"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2},
    **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    swiglu_limit=0.5,  # which most activations exceed, so a path that forgets it differs
)


def packed(
    dice: np.random.Generator, experts: int, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(blocks [E, N, K / 32, 16], scales [E, N, K / 32], numbers [E, N, K]), one number after the other."""
    codes = dice.integers(0, 16, (experts, rows, columns // 32, 32)).astype(np.uint8)
    exponents = dice.integers(122, 127, (experts, rows, columns // 32)).astype(np.uint8)
    numbers = np.array([(-1 if code & 8 else 1) * E2M1[code & 7] for code in codes.reshape(-1)], np.float32)
    numbers = numbers.reshape(codes.shape) * (2.0 ** (exponents.astype(np.float32) - 127))[..., None]
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks, exponents, numbers.reshape(experts, rows, columns)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model twice: with its experts as numbers, and packed as gpt-oss is published."""
    plain, made = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("packed")
    write(GPT_OSS, make_model(GPT_OSS), plain)
    tensors, dice = load_file(plain / "model.safetensors"), np.random.default_rng(5)
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [E, K, N]
            experts, columns, rows = tensor.shape
            blocks, scales, numbers = packed(dice, experts, rows, columns)
            tensors[name] = torch.from_numpy(numbers).transpose(1, 2).contiguous()
            del stored[name]
            stored |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, made / "model.safetensors", {"format": "pt"})
    values = json.loads((plain / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (made / "config.json").write_text(json.dumps(values | {"quantization_config": quantized}))
    (made / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    return plain, made


def test_experts_are_the_numbers_that_were_packed(folders: tuple[Path, Path]) -> None:
    plain, made = folders
    config = read_config(made)
    assert num_weights(made, config, "auto") == sum(map(torch.numel, load_file(plain / "model.safetensors").values()))
    model = load_model(made, config, torch.device("cpu"), torch.float32, "auto")
    found, expected, stored = (
        model.state_dict(),
        load_file(plain / "model.safetensors"),
        load_file(made / "model.safetensors"),
    )
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        if f"{name}_blocks" in stored:
            theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
            assert torch.equal(theirs, tensor), name


WAYS = [
    {"model_impl": "transformers"},
    {"attention_backend": "torch"},
    {"attention_backend": "native"},
    {"attention_backend": "native", "quantization": "none"},
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_greedy_answers_are_those_of_the_unpacked_checkpoint_in_transformers(
    folders: tuple[Path, Path], settings: dict[str, Any]
) -> None:
    plain, made = folders
    prompt = [5, 9, 3, 7, 11, 4]
    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    whole = oracle.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
    small: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks": 32, "block_size": 4}
    with LLM(str(made), dtype="float32", **small, **settings) as llm:
        (output,) = llm.generate(
            [prompt], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False
        )
        assert llm.info.model_impl == settings.get("model_impl", "millrace")
    assert list(output.outputs[0].token_ids) == whole[0, len(prompt) :].tolist()


def test_experts_of_a_stack_have_rows_of_codes_of_their_own(folders: tuple[Path, Path]) -> None:
    plain, made = folders
    source, _ = open_source(made, registry.read_spec(made), "auto")
    for name, rows in (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2)), ("down_proj", slice(None))):
        stack = load_file(plain / "model.safetensors")[f"model.layers.1.mlp.experts.{STACKS[name]}"]
        wanted = stack[2].T[rows].numpy()
        name = f"model.layers.1.mlp.experts.2.{name}.weight"
        matrix = source.grouped(name)
        assert isinstance(matrix, GroupedMatrix) and np.array_equal(source.array(name), wanted)
        assert np.array_equal(np.concatenate([numbers for _, numbers in matrix.unpacked()]), wanted)


STACKS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


@pytest.mark.parametrize(
    ("suffix", "shape", "message"),
    [
        ("_scales", (3, 64, 1), r"_blocks is \[3, 64, 2, 16\], and _scales \[3, 64, 1\]"),
        ("_blocks", (3, 64, 32), r"_blocks is \[3, 64, 32\], and must be \[experts, rows, groups, 16\]"),
        ("_blocks", (2, 64, 2, 16), r"experts\.2\.gate_proj\.weight is missing|experts.gate_up_proj is missing"),
    ],
)
def test_stacks_of_other_shapes_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, suffix: str, shape: tuple[int, ...], message: str
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folders[1] / name).read_bytes())
    stored = load_file(folders[1] / "model.safetensors")
    stored[f"model.layers.0.mlp.experts.gate_up_proj{suffix}"] = torch.zeros(shape, dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        source, _ = open_source(tmp_path, registry.read_spec(tmp_path), "auto")
        source.grouped("model.layers.0.mlp.experts.1.gate_proj.weight")


def test_other_packed_weights_are_still_refused_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    values = json.loads((folders[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(
        CheckpointError, match="quantization_config: 'fp8' weights are not supported for models that run"
    ):
        read_config(tmp_path)


def test_experts_stay_in_their_codes_for_kernels_that_multiply_codes(folders: tuple[Path, Path]) -> None:
    plain, made = folders
    spec = read_spec(made)
    load = partial(load_weights, spec=spec, device=torch.device("cpu"), dtype=torch.float32, stacks_experts=True)
    coded, numbers = load(made), load(plain)
    for ours, theirs in zip(coded.layers, numbers.layers, strict=True):
        stack, want = ours.experts[0].stack, theirs.experts[0].stack
        assert stack is not None and want is not None and not ours.experts[0].experts
        for name in ("gate_up", "down"):
            matrices = getattr(stack, name)
            assert isinstance(matrices, CodedMatrices) and matrices.codes.shape[2] * 2 == matrices.shape[2]
            assert torch.equal(matrices.numbers(), getattr(want, name)), name
        assert stack.gate_up_bias is not None and want.gate_up_bias is not None
        assert torch.equal(stack.gate_up_bias, want.gate_up_bias)
    sizes = coded_item_sizes(open_source(made, spec, "safetensors", None)[0], spec)
    assert set(sizes.values()) == {(4 + 16 / 32) / 8}
    tables = 2 * 2 * 16 * 4  # the values of codes, for each matrix of a layer
    kept = bytes_kept(spec, lambda name: sizes.get(name, 4))
    assert kept + tables == weights_bytes(coded) < weights_bytes(numbers)
