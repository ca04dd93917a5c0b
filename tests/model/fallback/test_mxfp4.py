"""gpt-oss with experts in MXFP4: the numbers that the format's description gives, and answers through the fallback."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from millrace import LLM, SamplingParams
from millrace.model.errors import CheckpointError
from millrace.model.fallback.checkpoint_loading import load_model, num_weights, read_config
from tests.families.checkpoint import make_model, write
from tests.families.row import row

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GPT_OSS = row(
    "gpt-oss-mxfp4",
    "gpt_oss",
    **{"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2},
    **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
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


def test_greedy_answers_are_those_of_the_unpacked_checkpoint_in_transformers(folders: tuple[Path, Path]) -> None:
    plain, made = folders
    prompt = [5, 9, 3, 7, 11, 4]
    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    whole = oracle.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
    with LLM(str(made), device="cpu", max_model_len=64, num_gpu_blocks=32, block_size=4, dtype="float32") as llm:
        (output,) = llm.generate(
            [prompt], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False
        )
        assert llm.info.model_impl == "transformers"
    assert list(output.outputs[0].token_ids) == whole[0, len(prompt) :].tolist()


def test_other_packed_weights_are_still_refused_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    values = json.loads((folders[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(
        CheckpointError, match="quantization_config: 'fp8' weights are not supported for models that run"
    ):
        read_config(tmp_path)
