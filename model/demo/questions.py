# ruff: noqa: E501  a question and its answer stay on one line, to be read as one
"""Questions with their answers over the small world, each a pure function of a `random.Random`.

A question's `key` says what must be unseen for the question to count as unseen: the pair of numbers of a sum, else the words asked.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from .stories import tell
from .story import Character, a, draw_character, draw_story, in_place, made_up_name
from .world import (
    ANIMALS,
    BOYS,
    CAPITALS,
    COLOUR_OF,
    COLOURS,
    DAYS,
    FEELINGS,
    FLYERS,
    FOODS,
    GIRLS,
    MEMBERS,
    MONTHS,
    NUMBERS,
    OPPOSITES,
    OUTDOORS,
    PLACES,
    SEASONS,
    SWIMMERS,
    TOYS,
    UNKNOWN,
    USES,
    WHAT_IS,
    WHY,
)


@dataclass(frozen=True, slots=True)
class Question:
    """One turn of a chat. `expect` is what a right answer contains, in lower case; empty if more than one answer is right."""

    text: str
    answer: str
    expect: str = ""
    key: tuple[str, ...] = ()


def key_of(question: Question) -> tuple[str, ...]:
    """What the split rule looks at. Case, punctuation and spelling do not count, so that no variant of a held-out question is trained."""
    if question.key:
        return question.key
    plain = question.text.lower().replace("color", "colour")
    return ("".join(c if c.isalnum() else " " for c in plain).strip(),)


def ask(rng: random.Random) -> Question:
    """A question of a kind drawn by weight."""
    return rng.choices(_KINDS, _WEIGHTS)[0](rng)


def _the(thing: str) -> str:
    return f"the {thing}" if thing in ("sky", "sun", "sea", "moon", "night sky") else thing


def colour(rng: random.Random) -> Question:
    if rng.random() < 0.3:
        animal = rng.choice(ANIMALS)
        text = rng.choice(
            (
                f"What colour is {a(animal.name)}?",
                f"What is the colour of {a(animal.name)}?",
                f"Which colour does {a(animal.name)} have?",
            )
        )
        return Question(text, f"{a(animal.name)[0].upper()}{a(animal.name)[1:]} is {animal.colour}.", animal.colour)
    thing, is_ = rng.choice(list(COLOUR_OF.items()))
    noun = _the(thing) if thing != _the(thing) else (thing if thing in _MASS else a(thing))
    text = rng.choice(
        (
            f"What colour is {noun}?",
            f"What color is {noun}?",
            f"Tell me the colour of {noun}.",
            f"Which colour does {noun} have?",
            f"What is the colour of {noun}?",
            f"Do you know what colour {noun} is?",
        )
    )
    return Question(text, f"{noun[0].upper()}{noun[1:]} is {is_}.", is_)


_MASS = ("grass", "snow", "blood", "milk", "coal", "chocolate", "salt", "mud")


def animal_fact(rng: random.Random) -> Question:
    x = rng.choice(ANIMALS)
    one, One = a(x.name), a(x.name)[0].upper() + a(x.name)[1:]
    legs = NUMBERS[x.legs] if x.legs else "no"
    many = x.plural
    options = [
        (f"How many legs does {one} have?", f"{One} has {legs} legs.", legs),
        (f"How many legs do {many} have?", f"{many.capitalize()} have {legs} legs.", legs),
        (f"What sound does {one} make?", f"{One} {x.sound}.", x.sound),
        (f"What does {one} say?", f"{One} {x.sound}.", x.sound),
        (f"What does {one} eat?", f"{One} eats {x.food}.", x.food),
        (f"What do {many} eat?", f"{many.capitalize()} eat {x.food}.", x.food),
        (f"What does {one} like to eat?", f"{One} likes to eat {x.food}.", x.food),
        (f"Where does {one} live?", f"{One} lives {x.home}.", x.home),
        (f"Where do {many} live?", f"{many.capitalize()} live {x.home}.", x.home),
        (f"Where can I find {one}?", f"You can find {one} {x.home}.", x.home),
        (f"What is a baby {x.name} called?", f"A baby {x.name} is called {a(x.baby)}.", x.baby),
        (f"What do you call a baby {x.name}?", f"A baby {x.name} is called {a(x.baby)}.", x.baby),
        (f"What is {one}?", f"{One} is an animal. It is {x.colour}, and it lives {x.home}.", "animal"),
        (f"Is {one} an animal?", f"Yes, {one} is an animal.", "yes"),
        (
            f"Tell me about {many}.",
            f"{many.capitalize()} are animals. They live {x.home}, and they eat {x.food}. {One} has {legs} legs.",
            x.food,
        ),
        (f"Tell me something about {one}.", f"{One} is an animal. It lives {x.home}, and it eats {x.food}.", x.food),
        (f"Can {one} {x.moves}?", f"Yes, {one} can {x.moves}.", "yes"),
        (
            f"Can {one} fly?",
            f"Yes, {one} can fly." if x.name in FLYERS else f"No, {one} cannot fly.",
            "yes" if x.name in FLYERS else "no",
        ),
        (
            f"Can {one} swim?",
            f"Yes, {one} can swim." if x.name in SWIMMERS else f"No, {one} does not swim well.",
            "yes" if x.name in SWIMMERS else "no",
        ),
    ]
    text, answer, expect = rng.choice(options)
    return Question(text, answer, expect)


def which_sound(rng: random.Random) -> Question:
    x = rng.choice([x for x in ANIMALS if x.name not in _SHARED_SOUND and "sound" not in x.sound])
    return Question(
        rng.choice((f"Which animal {x.sound}?", f"What animal {x.sound}?")),
        f"A {x.name} {x.sound}." if x.name[0] not in "aeiou" else f"An {x.name} {x.sound}.",
        x.name,
    )


_SHARED_SOUND = ("dog", "fox", "sheep", "goat", "deer", "squirrel", "monkey")


def compare(rng: random.Random) -> Question:
    x, y = rng.sample(ANIMALS, 2)
    big, small = (x, y) if x.size > y.size else (y, x)
    is_big = rng.random() < 0.5
    word = rng.choice(("bigger", "larger")) if is_big else "smaller"
    right, wrong = (big, small) if is_big else (small, big)
    if rng.random() < 0.3:
        truth = right is x
        answer = f"{'Yes' if truth else 'No'}, {a(right.name)} is {word} than {a(wrong.name)}."
        return Question(f"Is {a(x.name)} {word} than {a(y.name)}?", answer, "yes" if truth else "no")
    text = rng.choice(
        (
            f"Which is {word}, {a(x.name)} or {a(y.name)}?",
            f"What is {word}: {a(x.name)} or {a(y.name)}?",
            f"Which animal is {word}, {a(x.name)} or {a(y.name)}?",
        )
    )
    answer = f"{a(right.name)[0].upper()}{a(right.name)[1:]} is {word} than {a(wrong.name)}."
    return Question(text, answer, f"{right.name} is")


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


def opposite(rng: random.Random) -> Question:
    x, y = rng.choice(list(OPPOSITES.items()))
    if rng.random() < 0.5:
        x, y = y, x
    if x in ("light", "black", "white"):  # light has two opposites
        x, y = "hot", "cold"
    text = rng.choice(
        (
            f"What is the opposite of {x}?",
            f"Tell me the opposite of {x}.",
            f"Which word is the opposite of {x}?",
            f"The opposite of {x} is what?",
            f"What is the opposite of the word {x}?",
        )
    )
    return Question(text, f"The opposite of {x} is {y}.", f" {y}.")


def calendar(rng: random.Random) -> Question:
    i, names, what = (rng.randrange(7), DAYS, "day") if rng.random() < 0.5 else (rng.randrange(12), MONTHS, "month")
    now, after, before = names[i], names[(i + 1) % len(names)], names[i - 1]
    options = [
        (f"What {what} comes after {now}?", f"{after} comes after {now}.", f"{after} comes"),
        (f"Which {what} comes after {now}?", f"{after} comes after {now}.", f"{after} comes"),
        (f"What {what} comes before {now}?", f"{before} comes before {now}.", f"{before} comes"),
        (f"Which {what} is before {now}?", f"{before} comes before {now}.", f"{before} comes"),
        (f"If today is {now}, what is tomorrow?", f"If today is {now}, tomorrow is {after}.", f"tomorrow is {after}") if what == "day" else
        (f"What is the month after {now}?", f"{after} comes after {now}.", f"{after} comes"),
        ("How many days are in a week?", "There are seven days in a week.", "seven"),
        ("How many days does a week have?", "A week has seven days.", "seven"),
        ("How many months are in a year?", "There are twelve months in a year.", "twelve"),
        ("How many months does a year have?", "A year has twelve months.", "twelve"),
        ("What are the days of the week?", "The days of the week are " + ", ".join(DAYS[:-1]) + " and Sunday.", "wednesday"),
        ("Name the days of the week.", "The days of the week are " + ", ".join(DAYS[:-1]) + " and Sunday.", "wednesday"),
        ("Name the months of the year.", "The months of the year are " + ", ".join(MONTHS[:-1]) + " and December.", "october"),
        ("What are the four seasons?", "The four seasons are spring, summer, autumn and winter.", "autumn"),
        (f"What season comes after {SEASONS[i % 4]}?", f"{SEASONS[(i + 1) % 4].capitalize()} comes after {SEASONS[i % 4]}.", f"{SEASONS[(i + 1) % 4]} comes"),
        ("How many hours are in a day?", "There are 24 hours in a day.", "24"),
        ("How many minutes are in an hour?", "There are 60 minutes in an hour.", "60"),
    ]  # fmt: skip
    weights = [5] * 5 + [1] * (len(options) - 5)
    text, answer, expect = rng.choices(options, weights)[0]
    return Question(text, answer, expect.lower())


def capital(rng: random.Random) -> Question:
    land, city = rng.choice(list(CAPITALS.items()))
    options = [
        (f"What is the capital of {land}?", f"The capital of {land} is {city}.", city),
        (f"Which city is the capital of {land}?", f"The capital of {land} is {city}.", city),
        (f"Tell me the capital of {land}.", f"The capital of {land} is {city}.", city),
        (f"Where is {city}?", f"{city} is the capital of {land}.", land),
        (f"In which country is {city}?", f"{city} is in {land}.", land),
    ]
    text, answer, expect = rng.choice(options)
    return Question(text, answer, expect.lower())


def member(rng: random.Random) -> Question:
    group, members = rng.choice(list(MEMBERS.items()))
    if rng.random() < 0.5:
        n = rng.randint(2, min(5, len(members)))
        names = rng.sample(members, n)
        plural = group + "s"
        text = rng.choice(
            (
                f"Name {NUMBERS[n]} {plural}.",
                f"Can you name {NUMBERS[n]} {plural}?",
                f"Tell me {NUMBERS[n]} {plural}.",
                f"List {n} {plural}.",
            )
        )
        return Question(text, f"{NUMBERS[n].capitalize()} {plural} are " + ", ".join(names[:-1]) + f" and {names[-1]}.")
    if rng.random() < 0.4:
        name = rng.choice(members)
        return Question(
            rng.choice((f"Name {a(group)}.", f"Tell me the name of {a(group)}.", f"Give me one {group}.")),
            f"One {group} is {name}.",
        )
    other_group = rng.choice(
        [g for g in ("fruit", "vegetable", "colour", "tool", "drink", "toy", "flower") if g != group]
    )
    name = rng.choice(MEMBERS[other_group] if rng.random() < 0.5 else members)
    groups = [g for g, m in MEMBERS.items() if name in m]
    if group in groups:
        return Question(f"Is {name} {a(group)}?", f"Yes, {name} is {a(group)}.", "yes")
    return Question(f"Is {name} {a(group)}?", f"No, {name} is not {a(group)}. It is {a(groups[0])}.", "no")


def use(rng: random.Random) -> Question:
    thing, purpose = rng.choice(list(USES.items()))
    options = [
        (f"What is {thing} for?", f"{thing[0].upper()}{thing[1:]} is used to {purpose}."),
        (f"What do we use {thing} for?", f"We use {thing} to {purpose}."),
        (f"What can I do with {thing}?", f"You can use {thing} to {purpose}."),
        (f"What do we need to {purpose}?", f"We need {thing} to {purpose}."),
        (f"What do you need to {purpose}?", f"You need {thing} to {purpose}."),
    ]
    text, answer = rng.choice(options)
    return Question(text, answer, thing.split()[-1] if "need" in text else purpose)


def why(rng: random.Random) -> Question:
    question, answer = rng.choice(list(WHY.items()))
    text = rng.choice(
        (
            f"Why {question}?",
            f"Can you tell me why {answer[0].lower()}{answer[1:].split(' because')[0]}?",
            f"Please tell me: why {question}?",
        )
    )
    return Question(text, answer, "because")


def what_is(rng: random.Random) -> Question:
    thing, answer = rng.choice(list(WHAT_IS.items()))
    plain = thing.split(maxsplit=1)[-1]
    text = rng.choice(
        (
            f"What is {thing}?",
            f"Can you explain what {thing} is?",
            f"What does the word {plain} mean?",
            f"Explain to me what {thing} is.",
            f"Do you know what {thing} is?",
        )
    )
    return Question(text, answer, answer.split(" is ")[1].split()[1])


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


def _fact_about(rng: random.Random, who: Character, topic: str) -> tuple[str, list[tuple[str, str, str]]]:
    """A sentence about `who`, and questions on it as (text, answer, expect)."""
    name = who.name
    if topic == "thing":
        hue, thing = rng.choice(COLOURS), rng.choice(TOYS)
        return rng.choice(
            (
                f"{name} has {a(hue + ' ' + thing)}.",
                f"{name} found {a(hue + ' ' + thing)}.",
                f"{name} carries {a(hue + ' ' + thing)}.",
            )
        ), [
            (f"What does {name} have?", f"{name} has {a(hue + ' ' + thing)}.", f"{hue} {thing}"),
            (f"Who has the {hue} {thing}?", f"{name} has the {hue} {thing}.", f"{name} has"),
            (f"What colour is {name}'s {thing}?", f"{name}'s {thing} is {hue}.", f"is {hue}"),
        ]
    if topic == "place":
        place = rng.choice(OUTDOORS)
        return rng.choice(
            (f"{name} went to the {place}.", f"{name} is at the {place}.", f"{name} walked to the {place}.")
        ), [
            (f"Where is {name}?", f"{name} is at the {place}.", f"the {place}"),
            (f"Where did {name} go?", f"{name} went to the {place}.", f"the {place}"),
            (f"Who is at the {place}?", f"{name} is at the {place}.", f"{name} is"),
        ]
    if topic == "food":
        food = rng.choice(FOODS)
        return rng.choice((f"{name} likes {food}.", f"{name} wants to eat {food}.", f"{name} made {food}.")), [
            (f"What food does {name} like?", f"{name} likes {food}.", f"likes {food}"),
            (f"Who likes {food}?", f"{name} likes {food}.", f"{name} likes"),
        ]
    if topic == "kind":
        home = rng.choice(PLACES)
        return f"{name} is {a(who.kind)} from {a(home)}.", [
            (f"Who is {name}?", f"{name} is {a(who.kind)} from {a(home)}.", who.kind),
            (f"Where does {name} come from?", f"{name} comes from {a(home)}.", home),
            (f"Is {name} {a(who.kind)}?", f"Yes, {name} is {a(who.kind)}.", "yes"),
        ]
    feeling = rng.choice(FEELINGS)
    return f"{name} is {feeling}.", [
        (f"How does {name} feel?", f"{name} feels {feeling}.", feeling),
        (f"Who is {feeling}?", f"{name} is {feeling}.", f"{name} is"),
    ]


def comprehension(rng: random.Random) -> Question:
    """A few facts about a few characters, and one question about one of them."""
    who: list[Character] = []
    for _ in range(rng.randint(1, 4)):
        drawn = draw_character(rng)
        if rng.random() < 0.25:
            drawn = Character(made_up_name(rng), drawn.kind, drawn.is_female)
        if drawn.name not in [w.name for w in who]:
            who.append(drawn)
    topics = ["thing", "place", "food", "kind", "feeling"]
    facts, questions = [], []
    seen: set[str] = set()
    shared = rng.random() < 0.5  # everybody gets a fact of one topic, so that the name decides
    topic = rng.choice(topics)
    for w in who:
        for t in [topic] if shared else rng.sample(topics, rng.randint(1, 2)):
            sentence, asked = _fact_about(rng, w, t)
            if any(answer_of in seen for _, _, answer_of in asked):
                continue
            seen.update(expect for _, _, expect in asked)
            facts.append(sentence)
            questions.extend(asked)
    if not shared:
        rng.shuffle(facts)
    text, answer, expect = rng.choice(questions)
    story = " ".join(facts)
    shape = rng.choice(
        (f"{story} {text}", f"{story}\n{text}", f"Read this: {story} {text}", f"{story} Question: {text}")
    )
    return Question(shape, answer, expect.lower())


def story_question(rng: random.Random) -> Question:
    """A whole story, and a question about its beginning."""
    s = tell(draw_story(rng))
    h = s.hero
    options = [
        ("Who is the story about?", f"The story is about {h.name}, {a(h.kind)}.", h.name),
        (f"Where did {h.name} live?" if "lived" in s.sentences[0] else f"Where was {h.name}?", f"{h.name} {'lived' if 'lived' in s.sentences[0] else 'was'} {in_place(s.place)}.", s.place),
        (f"What was the name of {h.name}'s friend?", f"The friend's name was {s.friend.name}.", s.friend.name),
        (f"What kind of animal was {h.name}?", f"{h.name} was {a(h.kind)}.", h.kind) if not h.is_person else (f"Was {h.name} a girl or a boy?", f"{h.name} was {a(h.kind)}.", f"a {h.kind}"),
    ]  # fmt: skip
    text, answer, expect = rng.choice(options)
    if s.friend.name not in s.text and "friend" in text:
        text, answer, expect = options[0]
    return Question(
        rng.choice((f"{s.text}\n{text}", f"Read this story: {s.text} {text}")), answer, expect.lower(), s.key
    )


def story_request(rng: random.Random) -> Question:
    """ "Tell me a story about ...": the answer is a story that keeps to it."""
    s = draw_story(rng)
    h = s.hero
    kind = rng.random()
    verb = rng.choice(
        (
            "Tell me a story about",
            "Tell me a short story about",
            "Write a story about",
            "Write a short story about",
            "Can you tell me a story about",
            "I would like a story about",
        )
    )
    end = "?" if verb.startswith("Can") else "."
    if kind < 0.15:
        text = rng.choice(
            (
                "Tell me a story.",
                "Tell me a short story.",
                "Please tell me a story.",
                "Write a story.",
                "Can you tell me a story?",
                "Tell me another story.",
            )
        )
    elif kind < 0.45:
        text = f"{verb} {a(h.kind)}{end}"
    elif kind < 0.75:
        text = f"{verb} {a(h.kind)} named {h.name}{end}"
    elif kind < 0.9:
        text = f"{verb} {a(h.kind)} {in_place(s.place)}{end}"
    else:
        text = f"{verb} {h.name} the {h.kind}{end}"
    return Question(text, tell(s).text, (h.name if h.name in text else h.kind).lower(), s.key)


def yes_no(rng: random.Random) -> Question:
    if rng.random() < 0.5:
        thing, is_ = rng.choice(list(COLOUR_OF.items()))
        noun = _the(thing) if thing != _the(thing) else (thing if thing in _MASS else a(thing))
        hue = is_ if rng.random() < 0.5 else rng.choice([c for c in COLOURS if c != is_])
        if hue == is_:
            return Question(f"Is {noun} {hue}?", f"Yes, {noun} is {hue}.", "yes")
        return Question(f"Is {noun} {hue}?", f"No, {noun} is {is_}.", is_)
    options = [
        ("Is fire hot?", "Yes, fire is hot."), ("Is ice cold?", "Yes, ice is cold."), ("Is fire cold?", "No, fire is hot."), ("Is ice hot?", "No, ice is cold."),
        ("Is the sun hot or cold?", "The sun is hot."), ("Is snow hot or cold?", "Snow is cold."), ("Is a stone hard or soft?", "A stone is hard."),
        ("Is a pillow hard or soft?", "A pillow is soft."), ("Is water wet or dry?", "Water is wet."), ("Is a snail fast or slow?", "A snail is slow."),
        ("Is a mountain high or low?", "A mountain is high."), ("Is sugar sweet or sour?", "Sugar is sweet."), ("Is a lemon sweet or sour?", "A lemon is sour."),
        ("Is a feather heavy or light?", "A feather is light."), ("Is an elephant heavy or light?", "An elephant is heavy."), ("Can a stone swim?", "No, a stone sinks in water."),
        ("Is the moon bigger than the sun?", "No, the sun is bigger than the moon."), ("Does the sun shine at night?", "No, the sun shines during the day."),
        ("Can people fly?", "No, people cannot fly."), ("Can fish walk?", "No, fish cannot walk. They swim."), ("Do trees have leaves?", "Yes, trees have leaves."),
    ]  # fmt: skip
    text, answer = rng.choice(options)
    return Question(text, answer, answer.lower())


_KINDS: list[Callable[[random.Random], Question]] = [
    colour, animal_fact, which_sound, compare, arithmetic, word_problem, counting, count_things, opposite, calendar, capital, member, use, why,
    what_is, about_me, greeting, unknown, repeat, comprehension, story_question, story_request, yes_no,
]  # fmt: skip
_WEIGHTS = [6, 14, 2, 5, 12, 4, 5, 1, 5, 7, 4, 4, 3, 2, 4, 5, 5, 4, 12, 18, 1.2, 6, 4]
