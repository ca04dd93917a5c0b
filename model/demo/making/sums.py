# ruff: noqa: E501  a question and its answer stay on one line, to be read as one
"""Questions with numbers: sums, sums in words, and counting."""

import random

from .question import Question
from .world import (
    BOYS,
    GIRLS,
    NUMBERS,
)


def arithmetic(rng: random.Random) -> Question:
    kind = rng.random()
    x, y = rng.randint(0, 12), rng.randint(0, 12)
    if kind < 0.5:
        total, sign, word = x + y, "+", rng.choice(("plus", "and"))
    elif kind < 0.8:
        x, y = max(x, y), min(x, y)
        total, sign, word = x - y, "-", rng.choice(("minus", "take away"))
    else:
        x, y = rng.randint(0, 6), rng.randint(0, 6)
        total, sign, word = x * y, "*", "times"
    text = rng.choice(
        (
            f"What is {x} {sign} {y}?",
            f"What is {x} {word} {y}?",
            f"How much is {x} {word} {y}?",
            f"{x} {sign} {y} = ?",
            f"Calculate {x} {sign} {y}.",
        )
    )
    shown = {"+": "plus", "-": "minus", "*": "times"}[sign]
    return Question(text, f"{x} {shown} {y} is {total}.", f"is {total}.", ("sum", str(x), sign, str(y)))


def word_problem(rng: random.Random) -> Question:
    who, other = rng.sample(GIRLS + BOYS, 2)
    she = "she" if who in GIRLS else "he"
    thing = rng.choice(("apples", "balls", "books", "eggs", "coins", "cookies", "shells", "stones", "flowers", "nuts"))
    x, y = rng.randint(2, 9), rng.randint(1, 9)
    if rng.random() < 0.5:
        text = f"{who} has {x} {thing}. {other} gives {'her' if she == 'she' else 'him'} {y} more. How many {thing} does {who} have now?"
        return Question(text, f"{who} has {x + y} {thing} now.", f"{x + y} {thing}", ("more", str(x), str(y), thing))
    x, y = max(x, y) + 2, min(x, y)
    text = f"{who} has {x} {thing}. {she.capitalize()} gives {y} to {other}. How many {thing} does {who} have left?"
    return Question(text, f"{who} has {x - y} {thing} left.", f"{x - y} {thing}", ("left", str(x), str(y), thing))


def counting(rng: random.Random) -> Question:
    n = rng.randint(2, 20)
    use_words = rng.random() < 0.4
    kind = rng.random()
    if kind < 0.3:
        end = rng.randint(2, 20)
        numbers = NUMBERS[1 : end + 1] if use_words else [str(i) for i in range(1, end + 1)]
        text = rng.choice(
            (
                f"Count to {numbers[-1]}.",
                f"Please count from {numbers[0]} to {numbers[-1]}.",
                f"Can you count to {numbers[-1]}?",
            )
        )
        return Question(text, ", ".join(numbers) + ".", ", ".join(numbers).lower() + ".")
    if kind < 0.45:
        end = rng.randint(2, 10)
        numbers = [NUMBERS[i] if use_words else str(i) for i in range(end, -1, -1)]
        return Question(
            rng.choice((f"Count down from {numbers[0]}.", f"Count backwards from {numbers[0]}.")),
            ", ".join(numbers) + ".",
            ", ".join(numbers),
        )
    shown = NUMBERS[n - 1] if use_words else str(n - 1)
    if kind < 0.7:
        after = NUMBERS[n] if use_words else str(n)
        return Question(
            rng.choice(
                (
                    f"What number comes after {shown}?",
                    f"What comes after {shown}?",
                    f"Which number is next after {shown}?",
                )
            ),
            f"{after.capitalize()} comes after {shown}.",
            f"{after} comes",
        )
    before = NUMBERS[n - 2] if use_words else str(n - 2)
    return Question(
        rng.choice((f"What number comes before {shown}?", f"What comes before {shown}?")),
        f"{before.capitalize()} comes before {shown}.",
        f"{before} comes",
    )


def count_things(rng: random.Random) -> Question:
    thing, n = rng.choice(("apple", "star", "dog", "ball", "bee", "cat", "tree")), rng.randint(1, 9)
    text = f"How many times do you see the word {thing}? " + " ".join([thing] * n)
    return Question(
        text, f"I see the word {thing} {NUMBERS[n]} {'time' if n == 1 else 'times'}.", f" {NUMBERS[n]} time"
    )
