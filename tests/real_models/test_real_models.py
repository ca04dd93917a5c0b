"""Greedy tokens, chats and token ids of the real models against transformers in float32.

A model whose packages are not installed is skipped; tests/README.md has the commands.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from millrace import LLM, SamplingParams
from millrace.model.backend_gaps import Backend, missing
from millrace.model.checkpoint.hub import resolve
from millrace.model.families.registry import read_spec
from millrace.model.text.tokenizer import Tokenizer
from tests.counts import FULL
from tests.deploy.running import RunningServer
from tests.model.text.family_tokenizers import AWKWARD
from tests.real_models.models import MODELS

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
NEAR = 0.02  # between two logits
LONG = " ".join(
    f"On day {day} the mill ground {day * 7 % 40} sacks of flour." for day in range(1, 60)
)  # over 600 tokens
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6, 7,",
    "Water boils at 100 degrees Celsius, and it freezes at",
    "Les trois mousquetaires étaient",
    'Answer in JSON: {"name": "Ada Lovelace", "born":',
    "日本の首都は",
    "Q: Why is the sky blue?\nA:",
    LONG,
)
MORE = (  # with AWKWARD and PROMPTS, 40 texts
    " leading and trailing ",
    "\t\t\tfour\u00a0kinds\u2003of\u3000space\u2028s",
    "e\u0301 é n\u0303 ñ \ufb01 ﬀ Å \u212b",
    "שלום עולם\u200f (abc) مرحبا\u202e!",
    "👍🏽👨🏿‍🚀🏳️‍🌈🇩🇪 ☃︎☃️",
    "क्षत्रिय ਪੰਜਾਬੀ தமிழ் ខ្មែរ မြန်မာ",
    "𝕳𝖊𝖑𝖑𝖔 𐍈𐌰𐌹 𓀀 \U0010ffff",
    "0 00 000 0000 1e-9 0x1F 1_000,000.00 ¼ ② Ⅷ ٣",
    "don't DON'T we'LL I'M y'all'd've ’tis",
    "a.b,c;d:e!f?g/h\\i|j-k_l+m=n*o&p^q%r$s#t@u~v`w",
    '<html>\n  <body class="x">&nbsp;</body>\n</html>\n',
    "SELECT * FROM t WHERE a='\\'' -- x\r\n\r\n;",
    '{"k":[1,2.5,null,true],"é":"\\u00e9\\n"}',
    "https://user:pw@host.example:8080/a/b?c=d&e=%20#f",
    # NOTE: of 32 spaces and more Gemma's file takes the longest token first, as SentencePiece; transformers merges
    "ab" * 200 + " " * 31 + "x" + "\n" * 50,
    "Donaudampfschifffahrtsgesellschaftskapitän Llanfairpwllgwyngyll",
    "CamelCaseIdentifier snake_case_identifier kebab-case SCREAMING_CASE",
    "\x01\x1b[31mred\x1b[0m\x85\u2029",
)
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]

# Gemma 3's turns: its base model has no template, so it is given one.
GEMMA_TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEMPLATES = {"gemma3-270m": GEMMA_TURNS}


@dataclass(frozen=True)
class Real:
    """A model's folder, and the model that transformers makes of it."""

    name: str
    root: Path
    file: Path  # GGUF, with the same weights
    oracle: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def logits_after(self, ids: list[int], answer: list[int]) -> torch.Tensor:
        """The logits at which each token of the answer was chosen, [tokens, vocabulary].

        The answer is transformers' greedy one exactly if each of its tokens is the likeliest there.
        """
        with torch.inference_mode():
            whole = torch.tensor([[*ids, *answer[:-1]]])
            logits: torch.Tensor = self.oracle(whole, logits_to_keep=len(answer)).logits[0]
        return logits


@pytest.fixture(scope="module", params=MODELS)
def real(request: pytest.FixtureRequest) -> Real:
    model = MODELS[request.param]
    if model.missing:
        pytest.skip(f"not installed: {', '.join(model.missing)}")
    root = model.folder()
    tokenizer = AutoTokenizer.from_pretrained(root)
    tokenizer.chat_template = TEMPLATES.get(model.name, tokenizer.chat_template)
    oracle = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    return Real(model.name, root, model.gguf(), oracle, tokenizer)


@pytest.mark.parametrize(("backend", "is_gguf"), [("native", True), ("torch", False)])
def test_greedy_tokens_are_those_of_transformers(real: Real, backend: Backend, is_gguf: bool) -> None:
    if not FULL and (backend == "torch" or real.name == "gemma3-270m"):
        pytest.skip("takes long, and tiny checkpoints and chats are compared in each run; MILLRACE_FULL=1 runs it")
    if gaps := missing(read_spec(real.root), backend):
        pytest.skip(f"{backend} has no {', no '.join(gaps)}")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    model = str(real.file if is_gguf else real.root)
    with LLM(model, dtype="float32", attention_backend=backend, device="cpu", max_model_len=2048) as llm:
        answers = [output.outputs[0].token_ids for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]
    num_equal, differences = 0, []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = real.logits_after(real.tokenizer(prompt)["input_ids"], list(answer))
        likeliest = logits.argmax(-1).tolist()
        num_equal += sum(ours == theirs for ours, theirs in zip(answer, likeliest, strict=True))
        for place, (ours, theirs) in enumerate(zip(answer, likeliest, strict=True)):
            if ours != theirs:
                gap = float(logits[place, theirs] - logits[place, ours])
                if is_gguf and gap < NEAR:  # rows are 16 bits in products of codes, so near ties may fall otherwise
                    continue
                differences.append(f"{prompt[:20]!r}, token {place}: {ours} instead of {theirs}, {gap:.2g} above it")
    print(f"{real.name}, {backend}: {num_equal} of {NUM_TOKENS * len(PROMPTS)} tokens are the likeliest")
    assert not differences, f"{num_equal} of {NUM_TOKENS * len(PROMPTS)} equal; {'; '.join(differences)}"
    assert num_equal >= (0.99 if is_gguf else 1.0) * NUM_TOKENS * len(PROMPTS)


def test_a_chat_over_http_is_answered_as_by_transformers(real: Real) -> None:
    command = [sys.executable, "-m", "millrace.deploy", "serve", str(real.file), "--port", "0", "--dtype", "float32"]
    if given := TEMPLATES.get(real.name):
        command += ["--chat-template", given]
    with RunningServer(command=[*command, "--max-model-len", "1024"]) as server:
        asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
        answer = server.post("/v1/chat/completions", asked).json
    ids = real.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"] == ids
    assert choice["token_ids"] == real.logits_after(ids, choice["token_ids"]).argmax(-1).tolist()
    assert choice["message"]["content"] == real.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    if real.name == "smollm2-135m-instruct":  # the other one is not trained to answer
        assert "Paris" in choice["message"]["content"]


def test_awkward_texts_have_the_ids_and_texts_of_transformers(real: Real) -> None:
    for ours in (Tokenizer.read(real.root), Tokenizer.read(resolve(str(real.file)))):
        for text in (*AWKWARD, *PROMPTS, *MORE):
            for has_specials in (True, False):
                ids = real.tokenizer.encode(text, add_special_tokens=has_specials)
                assert ours.encode(text, has_specials) == ids, text
            assert ours.decode(ids) == real.tokenizer.decode(ids, skip_special_tokens=True), text
            assert ours.decode(ids, False) in (text, text.replace("▁", " ")), "a round trip"
