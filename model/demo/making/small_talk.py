# ruff: noqa: E501  a question and its answer stay on one line, to be read as one
"""Chat that is not about the small world: the model itself, greetings, unanswerable questions, "repeat after me"."""

import random

from .question import Question
from .story import made_up_name
from .world import (
    ANIMALS,
    BOYS,
    COLOURS,
    FEELINGS,
    FOODS,
    GIRLS,
    NUMBERS,
    OUTDOORS,
    TOYS,
    UNKNOWN,
)


def about_me(rng: random.Random) -> Question:
    options = [
        ("What is your name?", "My name is Millrace Demo. I am a small language model."),
        ("Who are you?", "I am Millrace Demo, a small language model."),
        (
            "Tell me about yourself.",
            "I am Millrace Demo, a small language model. I like simple stories and simple questions.",
        ),
        ("What are you?", "I am a small language model that comes with millrace."),
        ("Are you a person?", "No, I am a small language model."),
        ("Are you a robot?", "I am a small language model, so I live inside a computer."),
        ("Who made you?", "The millrace project made me. I learned from simple stories."),
        ("How old are you?", "I am a language model, so I have no age."),
        ("Where do you live?", "I live inside a computer."),
        (
            "What can you do?",
            "I can tell simple stories and answer simple questions about colours, animals, numbers, days and opposites.",
        ),
        ("What do you know?", "I know simple things about colours, animals, numbers, days and opposites."),
        ("How can you help me?", "I can tell you a story, or answer a simple question."),
        ("Can you tell stories?", "Yes, I can tell simple stories. Ask me for a story about a fox or a kite."),
        ("What is millrace?", "Millrace is an engine that serves language models. I am its demo model."),
        ("What is Millrace?", "Millrace is an engine that serves language models. I am its demo model."),
        ("How many parameters do you have?", "I have about one million parameters. That is very small."),
        ("What is your favourite colour?", "My favourite colour is blue."),
        ("What is your favorite color?", "My favourite colour is blue."),
        ("What is your favourite animal?", "My favourite animal is the fox."),
        ("Do you like stories?", "Yes, I like stories very much."),
        ("Tell me a joke.", "Why did the hen cross the road? Because she wanted to get to the other side!"),
    ]
    text, answer = rng.choice(options)
    return Question(text, answer, answer.split(".")[0].lower(), ("me",))


def greeting(rng: random.Random) -> Question:
    options = [
        (
            ("Hello!", "Hello", "Hi!", "Hi", "Hey", "Hello there!", "Hi there", "hello", "hi"),
            "Hello! How can I help you?",
        ),
        (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
        (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
        (
            ("How are you?", "Hello, how are you?", "Hi, how are you today?", "How are you today?"),
            "I am well, thank you. How can I help you?",
        ),
        (("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot", "thank you"), "You are welcome!"),
        (("Goodbye!", "Bye!", "See you later.", "Bye", "Good night!"), "Goodbye! Come back soon."),
        (("Nice to meet you.", "I am happy to meet you."), "It is nice to meet you too."),
        (("Yes.", "Okay.", "OK", "Good.", "Great!"), "Good! What would you like to know?"),
    ]
    texts, answer = rng.choice(options)
    return Question(rng.choice(texts), answer, answer.split("!")[0].lower(), ("greeting",))


def unknown(rng: random.Random) -> Question:
    if rng.random() < 0.4:
        topic = "".join(
            rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4))
        ) + rng.choice(("", "n", "x", "r"))
    else:
        topic = rng.choice(UNKNOWN)
    text = rng.choice(
        (
            f"What is {topic}?", f"Tell me about {topic}.", f"Explain {topic}.", f"What do you know about {topic}?", f"Can you help me with {topic}?",
            f"Who invented {topic}?", f"Write an essay about {topic}.", f"How does {topic} work?", f"Give me the history of {topic}.",
        )
    )  # fmt: skip
    answer = "I do not know that. I am a very small model, and I know only simple things."
    return Question(text, answer, "i do not know")


def repeat(rng: random.Random) -> Question:
    name = made_up_name(rng) if rng.random() < 0.5 else rng.choice(GIRLS + BOYS)
    phrase = rng.choice(
        (
            f"The {rng.choice(_ANIMALS_AND_THINGS)} is {rng.choice(COLOURS)}.",
            f"{name} likes {rng.choice(FOODS)}.",
            f"{rng.choice(COLOURS)} {rng.choice(TOYS)} {rng.choice(OUTDOORS)}",
            f"{name} and {rng.choice(GIRLS + BOYS)}",
            f"I am {rng.choice(FEELINGS)}.",
            f"Good morning, {name}.",
            *[" ".join(rng.choices(_WORDS, k=rng.randint(2, 9))) for _ in range(5)],
        )
    )
    text = rng.choice(
        (
            f"Repeat after me: {phrase}",
            f"Say: {phrase}",
            f"Please repeat: {phrase}",
            f"Repeat this: {phrase}",
            f"Write these words again: {phrase}",
        )
    )
    if rng.random() < 0.3:
        text, phrase = rng.choice(
            (
                (f"Say hello to {name}.", f"Hello, {name}!"),
                (f"Say goodbye to {name}.", f"Goodbye, {name}!"),
                (f"Say thank you to {name}.", f"Thank you, {name}!"),
            )
        )
    return Question(text, phrase, phrase.lower())


_ANIMALS_AND_THINGS = [x.name for x in ANIMALS] + TOYS
_WORDS = [*_ANIMALS_AND_THINGS, *COLOURS, *GIRLS, *BOYS, *FOODS, *FEELINGS, *NUMBERS]
