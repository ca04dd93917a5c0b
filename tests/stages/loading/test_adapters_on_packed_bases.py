"""Adapters over bases whose files are quantized: greedy tokens of the numbers that the files stand for, and the update.

The oracle is transformers on a checkpoint of the unpacked base to which B A was added here, in float32.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from millrace.kernels.native import build, machine
from millrace.runtime.env.log import captured_logs
from millrace.stages import Engine, SamplingParams
from tests.counts import FULL
from tests.families.checkpoint import make_model, write
from tests.families.row import row
from tests.model.quantized.packers import PACKERS
from tests.stages.loading.test_packed_weights import packed

RANK, ALPHA, NUM_NEW = 3, 6, 12
SMALL = row(
    "packed-adapters",
    "llama",
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
)
PROMPTS = [[5, 9, 3, 7, 11], [60, 33, 4], [90, 91, 92, 17, 8, 8, 1]]
NATIVE = machine.instruction_sets() and build.find_compiler() is not None
Tensors = dict[str, torch.Tensor]


def write_adapter(folder: Path, base: Tensors, seed: int) -> Tensors:
    """Writes an adapter of all linear layers. Returns s B A by the names of the base's weights."""
    draws, tensors, updates = np.random.default_rng(seed), {}, {}
    for name in sorted(name for name in base if name.endswith("_proj.weight")):
        rows, columns = base[name].shape
        a = (draws.standard_normal((RANK, columns)) / columns**0.5).astype(np.float32)
        b = (draws.standard_normal((rows, RANK)) * 0.2).astype(np.float32)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        updates[name] = torch.from_numpy(np.float32(ALPHA / RANK) * (b @ a))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return updates


def expected_tokens(plain: Path, weights: Tensors) -> list[list[int]]:
    """The greedy answers of transformers with these weights in the place of the checkpoint's."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(weights, strict=False)
    answers = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            for _ in range(NUM_NEW):
                best = model(ids).logits[0, -1].topk(2)
                assert best.values[0] - best.values[1] > 1e-3, "a choice by less may differ by rounding"
                ids = torch.cat([ids, best.indices[:1, None]], dim=1)
            answers.append(ids[0, len(prompt) :].tolist())
    return answers


def served_tokens(model: Path, adapters: Path, backend: str) -> tuple[list[list[int]], list[list[int]], str | None]:
    """(the answers with the adapter, those of the base beside them, how the weights are kept)."""
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)

    async def live() -> Any:
        settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks": 64, "device": "cpu"}
        async with Engine(
            model=str(model), enable_lora=True, lora_dir=str(adapters), attention_backend=backend, **settings
        ) as engine:

            async def answer(prompt: list[int], adapter: str | None) -> list[int]:
                asked = engine.generate(prompt, params, adapter=adapter, output_kind="final")
                (output,) = [one async for one in asked]
                return list(output.outputs[0].token_ids)

            found = await asyncio.gather(*(answer(prompt, name) for name in ("one", None) for prompt in PROMPTS))
        return found[: len(PROMPTS)], found[len(PROMPTS) :], engine.info.quantization

    with captured_logs():
        return asyncio.run(live())


def check(plain: Path, base: Tensors, model: Path, tmp_path: Path, told: str, seed: int) -> None:
    """The adapter and the base in one batch, natively; with FULL and where there is no library by torch."""
    updates = write_adapter(tmp_path / "adapters" / "one", base, seed)
    wanted = expected_tokens(plain, base | {name: base[name] + update for name, update in updates.items()})
    of_base = expected_tokens(plain, base)
    assert wanted != of_base
    for backend in ("native", "torch")[:: 1 if FULL else 2] if NATIVE else ("torch",):
        found, without, kept = served_tokens(model, tmp_path / "adapters", backend)
        assert (found, without) == (wanted, of_base), backend
        assert backend == "torch" or kept == told


FORMATS = {"awq": "awq, 4 bits"} | ({"gptq-8": "gptq, 8 bits", "nf4": "bitsandbytes, fp4"} if FULL else {})


@pytest.mark.parametrize(("name", "told"), FORMATS.items())
def test_an_adapter_over_packed_safetensors_answers_as_the_unpacked_base_and_it(
    name: str, told: str, tmp_path: Path
) -> None:
    plain = write(SMALL, make_model(SMALL), tmp_path / "plain")
    base, dice = load_file(plain / "model.safetensors"), np.random.default_rng(5)  # as `packed` draws
    for stored in [stored for stored in base if stored.endswith("_proj.weight")]:
        base[stored] = torch.from_numpy(PACKERS[name][1](dice, *base[stored].shape).weight)
    (tmp_path / "packed").mkdir()
    check(plain, base, packed(plain, tmp_path / "packed", name), tmp_path, told, seed=4)


@pytest.mark.parametrize("packing", ["Q4_1", *(["Q8_0"] if FULL else [])])
def test_an_adapter_over_a_gguf_file_answers_as_the_unpacked_base_and_it(packing: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from tests.model.gguf.made_files import write_gguf

    plain, file = write_gguf("llama", tmp_path, packing)
    kind = gguf.GGMLQuantizationType[packing]
    base = load_file(plain / "model.safetensors")
    for name, tensor in base.items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            base[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
    check(plain, base, file, tmp_path, f"GGUF {packing}", seed=2)
