"""lm-evaluation-harness against our server: its `local-completions` model on a task in a local file.

It needs `pip install -e ".[clients]"` and is skipped without. The log-likelihoods that it gets of continuations must
be those that transformers has for the same tokens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.model.checkpoint.hub import bundled_model_path
from tests.deploy.running import RunningServer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm_eval is missing: pip install -e '.[clients]'"
    ),
]

QUESTIONS = [
    {"question": "What colour is the sky?", "choices": [" blue", " a green tree", " nine"], "answer": 0},
    {
        "question": "Once upon a time there was a",
        "choices": [" dog.", " little girl who lived in a house"],
        "answer": 1,
    },
    {"question": "The cat sat on", "choices": [" the mat", " of", " \N{GRINNING FACE}"], "answer": 0},
]

TASK = """
task: local_questions
dataset_path: json
dataset_kwargs:
  data_files: {{test: {questions}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


def test_log_likelihoods_of_a_local_task_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "local_questions.yaml").write_text(TASK.format(questions=questions))
    checkpoint = bundled_model_path()
    command = [sys.executable, "-m", "millrace.deploy", "serve", str(checkpoint), "--port", "0"]
    with RunningServer(command=[*command, "--served-model-name", "demo", "--dtype", "float32"]) as server:
        samples = evaluate(server.url, checkpoint, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    told = [
        (answer, *pair) for sample in samples for answer, pair in zip(sample["resps"], asked_of(sample), strict=True)
    ]
    assert len(told) == sum(len(question["choices"]) for question in QUESTIONS)
    for ((logprob, is_greedy),), context, continuation in told:
        right, right_greedy = likelihood(model, tokenizer, context, continuation)
        assert abs(float(logprob) - right) < 1e-3, (context, continuation, logprob, right)
        assert bool(is_greedy) == right_greedy


def evaluate(url: str, tokenizer: Path, tasks: Path) -> list[dict[str, Any]]:
    """What the harness keeps of each question."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "demo",
            "base_url": f"{url}/v1/completions",
            "tokenizer": str(tokenizer),
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "num_concurrent": 1,
            "max_retries": 1,
            "max_length": 256,
        },
        tasks=["local_questions"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples: list[dict[str, Any]] = found["samples"]["local_questions"]
    return samples


def asked_of(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """(context, continuation) of each of its choices."""
    return [tuple(arguments) for arguments in sample["arguments"]]


def likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """transformers' own: sum of log-probabilities of the continuation's tokens, and whether each is the likeliest."""
    whole, before = tokenizer(context + continuation).input_ids, len(tokenizer(context).input_ids)
    with torch.inference_mode():
        logprobs = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
    rows, ids = logprobs[before - 1 :], torch.tensor(whole[before:])
    return float(rows.gather(1, ids[:, None]).sum()), bool((rows.argmax(-1) == ids).all())
