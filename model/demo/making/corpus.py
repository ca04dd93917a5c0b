"""The training text of the demo model, generated from a seed: stories, and questions with answers in chat form.

A document is a pure function of (seed, index, split). The split rule: what a text is about is its *key* (a story:
hero's name, kind and place; a sum: its numbers; any other question: its words). One key in twenty, chosen by CRC, is
held out, and no training document has such a key. Greetings and questions about the model itself are never held out.
"""

import argparse
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from .question import Question, key_of
from .questions import ask
from .stories import open_story, tell
from .story import Story, draw_story, made_up_name
from .world import BOYS, GIRLS

END_OF_TEXT, IM_START, IM_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant who answers simple questions.",
    "You tell stories to children.",
    "Answer briefly.",
)
Split = Literal["train", "held_out"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A prompt that training never saw."""

    prompt: str  # an opening as plain text, or a user's question
    is_question: bool
    expect: str = ""  # what a right answer holds, in lower case
    name: str = ""  # the hero of the opening
    reference: str = ""  # the text that the grammar itself went on with


def is_held_out(key: tuple[str, ...]) -> bool:
    """The split rule: one key in twenty."""
    return key not in (("me",), ("greeting",)) and zlib.crc32("|".join(key).encode()) % 20 == 0


def documents(seed: int, split: Split = "train") -> Iterator[str]:
    """Endless documents, each ending in `<|endoftext|>`."""
    index = 0
    while True:
        rng = random.Random(f"{seed}:{split}:{index}")
        yield (_story(rng, split) if rng.random() < STORY_SHARE else _conversation(rng, split)) + END_OF_TEXT
        index += 1


def held_out(seed: int, num_openings: int = 25, num_questions: int = 25) -> list[HeldOut]:
    """Openings and questions with held-out keys, no two alike; only questions that have one right answer."""
    rng = random.Random(f"{seed}:prompts")
    openings: dict[str, HeldOut] = {}
    while len(openings) < num_openings:
        story = _draw(lambda: draw_story(rng), lambda s: s.key, "held_out")
        opening = open_story(story)
        text = tell(story, opening).text
        openings[opening] = HeldOut(opening, False, name=story.hero.name, reference=text[len(opening) :])
    questions: dict[str, HeldOut] = {}
    while len(questions) < num_questions:
        q = _draw(lambda: ask(rng), key_of, "held_out")
        if q.expect and len(q.answer) < 120:
            questions[q.text] = HeldOut(q.text, True, expect=q.expect, reference=q.answer)
    return [*openings.values(), *questions.values()]


def render_chat(messages: Sequence[tuple[str, str]]) -> str:
    """ChatML, as the chat template in the tokenizer's configuration writes it. `messages` are (role, content)."""
    return "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in messages)


NEW_NAMES_SHARE = 0.5  # of stories
STORY_SHARE = 0.36  # of documents; about half of the tokens, as a request for a story is answered with one


def _draw(make: Callable[[], T], key: Callable[[T], tuple[str, ...]], split: Split) -> T:
    while True:
        drawn = make()
        if is_held_out(key(drawn)) == (split == "held_out"):
            return drawn


def _story(rng: random.Random, split: Split) -> str:
    story = tell(_draw(lambda: draw_story(rng), lambda s: s.key, split))
    return _renamed(rng, story) if split == "train" and rng.random() < NEW_NAMES_SHARE else story.text


def _renamed(rng: random.Random, story: Story) -> str:
    """The story with made-up names, so that a model must look them up in the preceding text."""
    text = story.text
    for name in (story.hero.name, story.friend.name):
        if name != "Will":  # also the first word of questions
            text = re.sub(rf"\b{name}\b", made_up_name(rng), text)
    return text


def _conversation(rng: random.Random, split: Split) -> str:
    messages = [("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.2 else []
    num_turns = rng.choices((1, 2, 3, 5, 8, 30), (40, 20, 15, 12, 6, 1))[0]
    asked: list[Question] = []
    for _ in range(num_turns):
        question = _draw(lambda: ask(rng), key_of, split)
        asked.append(question)
        messages += [("user", _as_typed(rng, question.text)), ("assistant", question.answer)]
    if rng.random() < 0.06:
        messages += _remembered_name(rng)
    return render_chat(messages)


def _remembered_name(rng: random.Random) -> list[tuple[str, str]]:
    """The user gives a name and asks for it later."""
    name = made_up_name(rng) if rng.random() < 0.6 else rng.choice(GIRLS + BOYS)
    said = rng.choice((f"My name is {name}.", f"Hello, my name is {name}.", f"I am {name}.", f"Hi, I am {name}!"))
    asked = rng.choice(("What is my name?", "Do you know my name?", "Who am I?", "Do you remember my name?"))
    return [
        ("user", said),
        ("assistant", f"Hello, {name}! It is nice to meet you."),
        ("user", asked),
        ("assistant", f"Your name is {name}."),
    ]


def _as_typed(rng: random.Random, text: str) -> str:
    """Sometimes removes a question's capital letter or question mark, as users do."""
    chance = rng.random()
    if chance < 0.08 and len(text) < 120:
        return text.lower()
    if chance < 0.16 and text[-1] in "?.":
        return text[:-1]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-documents", type=int, default=10)
    args = parser.parse_args()
    for _, text in zip(range(args.num_documents), documents(args.seed), strict=False):
        print(text)


if __name__ == "__main__":
    main()
