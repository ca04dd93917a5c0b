"""Merged adapters of every kind against PEFT itself, which keeps them beside the base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.lora.greedy import merged_tokens, peft_tokens, prompts
from tests.model.lora.peft_formats import KINDS, write_adapter, write_base

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("base", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_says_the_tokens_of_unmerged_peft(tmp_path: Path, kind: str, base: str) -> None:
    if KINDS[kind].needs_bias and base != "qwen2":
        pytest.skip("the base has no biases")
    folder, asked = write_base(base, tmp_path / "base"), prompts(8)
    adapter = write_adapter(kind, folder, tmp_path / "adapter")
    expected, margin = peft_tokens(folder, adapter, asked, 64)
    plain = merged_tokens(folder, [], asked, 4)
    assert merged_tokens(folder, [(adapter, 1.0)], asked, 64) == expected, f"least margin {margin:g}"
    assert plain != [tokens[:4] for tokens in expected], "the adapter changes nothing"
