"""The text behind a prompt of no text, by every way to an answer, against transformers on the whole sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from millrace.stages import LLM, SamplingParams
from tests.model.checkpoints import make_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("skip", [True, False])
def test_an_answer_to_the_begin_token_begins_as_the_whole_sequence_does(tmp_path: Path, skip: bool):
    make_checkpoint("mistral", tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    words = [i for i in range(300, 450) if theirs.convert_ids_to_tokens(i).startswith("▁")]
    prompts = [[1], [1, 1], [1, words[0]]]
    params = SamplingParams(max_tokens=4, temperature=0.0, allowed_token_ids=tuple(words), skip_special_tokens=skip)
    with LLM(str(tmp_path), dtype="float32", device="cpu") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        searched = SamplingParams(temperature=0.0, stop=("zzz",), skip_special_tokens=skip)
        beams = llm.beam_search(prompts, 2, 4, use_tqdm=False, params=searched)
    for prompt, output in zip(prompts * 2, [*outputs, *beams], strict=True):
        ids = list(output.outputs[0].token_ids)
        before = theirs.decode(prompt, skip_special_tokens=skip)
        assert before + output.outputs[0].text == theirs.decode([*prompt, *ids], skip_special_tokens=skip)
