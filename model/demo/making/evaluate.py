"""Measures the weights on 50 held-out openings and questions and writes `evaluation.json`.

Run as `python -m millrace.model.demo.making.evaluate`. Greedy, in float32, on the CPU, through transformers.
perplexity      per token and per byte of held-out documents: stories and chats whose keys were never trained
repetition      share of 4-grams that occurred before in 100 greedy tokens after an opening; beside it the grammar's own
names kept      openings whose hero is named again; a story has two characters, so at most one other name may come up
right answers   questions whose answer holds the expected words and ends with <|im_end|>
"""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import WEIGHTS
from .corpus import END_OF_TEXT, IM_END, HeldOut, documents, held_out
from .world import BOYS, GIRLS, PETS

SEED = 2
NUM_DOCUMENTS = 300
NUM_TOKENS = 100
NAMES = frozenset((*GIRLS, *BOYS, *PETS))


def main() -> None:
    torch.set_num_threads(2)
    evaluation = evaluate(WEIGHTS)
    (WEIGHTS.parent / "evaluation.json").write_text(json.dumps(evaluation, indent=1) + "\n")
    for name, value in evaluation["figures"].items():
        print(f"{name:42} {value}")
    print()
    for row in evaluation["openings"]:
        print(f"[{'kept' if row['is_name_kept'] else 'LOST'}] {row['prompt']} >>>{row['text']}")
    for row in evaluation["questions"]:
        print(f"[{'right' if row['is_right'] else 'WRONG'}] {row['prompt']} >>> {row['text']}")


def evaluate(weights: Path) -> dict[str, Any]:
    """The figures, and every prompt with its greedy text."""
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    prompts = held_out(SEED)
    openings = [_opening(model, tokenizer, item) for item in prompts if not item.is_question]
    questions = [_question(model, tokenizer, item) for item in prompts if item.is_question]
    per_token, per_byte = _perplexity(model, tokenizer)
    references = [
        tokenizer.encode(item.prompt + item.reference)[:NUM_TOKENS] for item in prompts if not item.is_question
    ]
    figures = {
        "num_openings": len(openings),
        "num_questions": len(questions),
        "perplexity_per_token": round(per_token, 3),
        "perplexity_per_byte": round(per_byte, 3),
        "repeated_4grams": _mean(row["repeated_4grams"] for row in openings),
        "repeated_4grams_of_the_grammar": _mean(repeated_4grams(ids) for ids in references),
        "names_kept": _mean(row["is_name_kept"] for row in openings),
        "at_most_one_other_name": _mean(len(row["other_names"]) <= 1 for row in openings),
        "right_answers": _mean(row["is_right"] for row in questions),
    }
    return {"seed": SEED, "figures": figures, "openings": openings, "questions": questions}


def greedy(model: Any, tokenizer: Any, text: str, max_tokens: int = NUM_TOKENS) -> list[int]:
    """The token ids after `text`; if an end token came, it is the last."""
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (IM_END, END_OF_TEXT)]
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )
    ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return ids


def answer(model: Any, tokenizer: Any, question: str, max_tokens: int = NUM_TOKENS) -> str:
    """The greedy answer to one question, `<|im_end|>` included if it came."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    text: str = tokenizer.decode(greedy(model, tokenizer, prompt, max_tokens))
    return text


def repeated_4grams(ids: list[int]) -> float:
    """The share of 4-grams that have occurred before in `ids`."""
    grams = list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _opening(model: Any, tokenizer: Any, item: HeldOut) -> dict[str, Any]:
    ids = greedy(model, tokenizer, item.prompt)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    others = sorted(NAMES.intersection(re.findall(r"[A-Z][a-z]+", text)) - {item.name})
    return {
        "prompt": item.prompt,
        "text": text,
        "repeated_4grams": round(repeated_4grams(ids), 4),
        "is_name_kept": re.search(rf"\b{item.name}\b", text) is not None,
        "other_names": others,
    }


def _question(model: Any, tokenizer: Any, item: HeldOut) -> dict[str, Any]:
    text = answer(model, tokenizer, item.prompt)
    is_right = item.expect in text.lower() and text.endswith(IM_END)
    return {"prompt": item.prompt, "expect": item.expect, "text": text.removesuffix(IM_END), "is_right": is_right}


def _perplexity(model: Any, tokenizer: Any) -> tuple[float, float]:
    """(per token, per byte) over held-out documents, each alone; a document's first token is given, not predicted."""
    loss, num_tokens, num_bytes = 0.0, 0, 0
    for text in itertools.islice(documents(SEED, "held_out"), NUM_DOCUMENTS):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][:, :2_048]
        with torch.no_grad():
            loss += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        num_tokens += ids.shape[1] - 1
        num_bytes += len(tokenizer.decode(ids[0, 1:]).encode())
    return math.exp(loss / num_tokens), math.exp(loss / num_bytes)


def _mean(values: Any) -> float:
    drawn = [float(v) for v in values]
    return round(sum(drawn) / len(drawn), 4)


if __name__ == "__main__":
    main()
