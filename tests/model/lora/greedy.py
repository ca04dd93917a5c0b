"""Greedy tokens of a base with an adapter: by the decoder here with the adapter merged, and by unmerged PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from millrace.kernels import kernel_set
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.model.lora.merge import Merging
from tests.model.lora.peft_formats import KINDS, write_adapter, write_base
from tests.model.stepping import greedy

Tokens = list[list[int]]


def prompts(count: int, vocab_size: int = 160, length: int = 9) -> Tokens:
    """Random prompts of one length, which may stand in one batch without padding."""
    found: Tokens = np.random.default_rng(5).integers(3, vocab_size - 1, (count, length)).tolist()
    return found


def merged_tokens(base: Path, adapters: list[tuple[Path, float]], asked: Tokens, num_new: int) -> Tokens:
    """The answers of the torch decoder with adapters merged while loading, float32."""
    change, spec = Merging(adapters), read_spec(base)
    weights = load_weights(base, spec, torch.device("cpu"), torch.float32, change=change if adapters else None)
    decoder = Decoder(spec, weights, kernel_set.load("torch"))
    return [sequence.generated for sequence in greedy(decoder, asked, num_new)]


def peft_tokens(base: Path, adapter: Path, asked: Tokens, num_new: int) -> tuple[Tokens, float]:
    """The answers of PEFT, which keeps the adapter beside the base, float32; and the least margin of a choice."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, adapter).eval()
    ids, past, margin = torch.tensor(asked), None, float("inf")
    answers: list[torch.Tensor] = []
    with torch.inference_mode():
        for _ in range(num_new):
            out = model(input_ids=ids, past_key_values=past, use_cache=True)
            best = out.logits[:, -1].topk(2)
            margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
            ids, past = best.indices[:, :1], out.past_key_values
            answers.append(ids[:, 0])
    return torch.stack(answers, dim=1).tolist(), margin


EXPECTED = Path(__file__).with_name("expected.json")  # kind -> what PEFT said on one base


def recorded(kind: str) -> tuple[str, Tokens]:
    """The base on which a kind was recorded, and PEFT's answers to `prompts`."""
    found = json.loads(EXPECTED.read_text())[kind]
    return found["base"], found["tokens"]


def record() -> None:
    """Adds the answers of PEFT for the kinds that have none yet, each on another base in turn. Needs PEFT."""
    found = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for index, (kind, one) in enumerate(KINDS.items()):
        base = "qwen2" if one.needs_bias or "tied" in kind else ("llama", "qwen2", "gemma3")[index % 3]
        if kind in found:
            continue
        with TemporaryDirectory() as work:
            folder = write_base(base, Path(work) / "base")
            adapter = write_adapter(kind, folder, Path(work) / "adapter")
            tokens, margin = peft_tokens(folder, adapter, prompts(2), 4)
        assert margin > 1e-3, f"{kind}: a choice by {margin:g} may differ on another machine"
        found[kind] = {"base": base, "tokens": tokens}
    EXPECTED.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    record()
