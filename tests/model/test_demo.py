"""The bundled model: its corpus, its split, its weights, and what is said of it."""

import hashlib
import itertools
import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.model.demo import WEIGHTS
from millrace.model.demo.making.corpus import IM_END, HeldOut, documents, held_out, is_held_out
from millrace.model.demo.making.evaluate import NUM_TOKENS, SEED, answer, greedy, repeated_4grams
from millrace.model.demo.making.world import BOYS, GIRLS, HEROES, PETS, PLACES

TRAINING_SEED = 1  # TrainConfig.seed, not imported: training is no part of what is served
MAX_BYTES = 20_000_000


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    """(model in float32, tokenizer), as transformers loads them."""
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32), AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="module")
def evaluation() -> dict[str, Any]:
    return json.loads((WEIGHTS.parent / "evaluation.json").read_text())


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    first, again, other = (list(itertools.islice(documents(seed), 50)) for seed in (7, 7, 8))
    assert first == again
    assert not set(first) & set(other)


def test_the_training_text_is_still_the_one_that_the_bundled_weights_have_read():
    text = "".join(itertools.islice(documents(TRAINING_SEED), 500))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "667ea08ca39056608f436c65b06c5e1b7e6a5be0f90e3cb02be481265899abc9"
    )


@pytest.mark.slow
def test_held_out_prompts_do_not_occur_in_the_training_text():
    training = "".join(itertools.islice(documents(TRAINING_SEED), 20_000)).lower()
    prompts = held_out(SEED)
    assert len(prompts) == 50
    assert [p.prompt for p in prompts if any(form in training for form in forms_in_training(p))] == []


@pytest.mark.slow
def test_an_opening_and_a_question_of_the_training_text_would_be_found():
    training = "".join(itertools.islice(documents(TRAINING_SEED), 20_000)).lower()
    asked = HeldOut("What colour is the sky?", is_question=True)
    opening = HeldOut(next(text for text in documents(TRAINING_SEED) if "<|" not in text[:40]).split(".")[0], False)
    assert all(any(form in training for form in forms_in_training(item)) for item in (asked, opening))


def forms_in_training(item: HeldOut) -> list[str]:
    """How the prompt would stand in the text, in lower case; questions as whole messages: "12 + 0" holds "2 + 0"."""
    prompt = item.prompt.lower()
    if not item.is_question:
        return [prompt]
    return [f"user\n{form}<|im_end|>" for form in (prompt, prompt.rstrip("?."))]


def test_the_split_holds_out_about_one_key_in_twenty():
    keys = list(itertools.product(PETS, HEROES, PLACES))
    share = sum(map(is_held_out, keys)) / len(keys)
    assert 0.04 < share < 0.06


def test_no_name_is_also_the_name_of_an_animal_in_the_world():
    assert len({*GIRLS, *BOYS, *PETS}) == len(GIRLS) + len(BOYS) + len(PETS)


def test_the_bundled_files_stay_under_20_mb():
    assert sum(path.stat().st_size for path in WEIGHTS.parent.rglob("*") if path.is_file()) < MAX_BYTES


def test_text_survives_the_tokenizer_and_no_token_is_added(demo: tuple[Any, Any]):
    _, tokenizer = demo
    for text in ("Once upon a time", "Ünïcödé 你好 🙂", " two  spaces\n\ttabs", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_is_the_form_the_model_was_trained_on(demo: tuple[Any, Any]):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = demo[1].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What colour is the sky?", "The sky is blue."),
        ("Which day comes after Monday?", "Tuesday comes after Monday."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("What is rain?", "Rain is water that falls from the clouds."),
    ],
)
def test_greedy_answers_are_right_and_end(demo: tuple[Any, Any], question: str, expected: str):
    assert answer(*demo, question) == expected + IM_END


@pytest.mark.slow
def test_a_story_ends_and_does_not_repeat_itself(demo: tuple[Any, Any]):
    model, tokenizer = demo
    ids = greedy(model, tokenizer, "Once upon a time, there was a little fox named Pip.", max_tokens=400)
    assert len(ids) < 400
    assert repeated_4grams(ids[:NUM_TOKENS]) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Pip", "Zanemo"])
def test_a_story_keeps_its_hero_even_with_an_unknown_name(demo: tuple[Any, Any], name: str):
    model, tokenizer = demo
    ids = greedy(model, tokenizer, f"Once upon a time, there was a little fox named {name}. {name} lived in a forest.")
    assert tokenizer.decode(ids).count(name) >= 2


def test_the_committed_evaluation_meets_its_bounds(evaluation: dict[str, Any]):
    figures = evaluation["figures"]
    assert (figures["num_openings"], figures["num_questions"]) == (25, 25)
    assert figures["perplexity_per_token"] < 1.9
    assert figures["repeated_4grams"] < 0.05
    assert figures["names_kept"] >= 0.9 and figures["at_most_one_other_name"] >= 0.9
    assert figures["right_answers"] >= 0.7


@pytest.mark.slow
def test_the_committed_evaluation_is_of_the_committed_weights(demo: tuple[Any, Any], evaluation: dict[str, Any]):
    for row in evaluation["questions"][:3]:
        assert answer(*demo, row["prompt"]).removesuffix(IM_END) == row["text"]
