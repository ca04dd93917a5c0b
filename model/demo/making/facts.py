# ruff: noqa: E501  a question and its answer stay on one line, to be read as one
"""Questions on the facts of the small world: animals, colours, the calendar, kinds and uses of things."""

import random

from .question import Question
from .story import a, sentence
from .world import (
    ANIMALS,
    CAPITALS,
    COLOUR_OF,
    COLOURS,
    DAYS,
    FLYERS,
    MEMBERS,
    MONTHS,
    NUMBERS,
    OPPOSITES,
    SEASONS,
    SWIMMERS,
    USES,
    WHAT_IS,
    WHY,
)


def _noun(thing: str) -> str:
    """A thing that has a colour, with its article if it takes one."""
    if thing in ("sky", "sun", "sea", "moon", "night sky"):
        return f"the {thing}"
    return thing if thing in ("grass", "snow", "blood", "milk", "coal", "chocolate", "salt", "mud") else a(thing)


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
        return Question(text, sentence(f"{a(animal.name)} is {animal.colour}."), animal.colour)
    thing, is_ = rng.choice(list(COLOUR_OF.items()))
    noun = _noun(thing)
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
    return Question(text, sentence(f"{noun} is {is_}."), is_)


def animal_fact(rng: random.Random) -> Question:
    x = rng.choice(ANIMALS)
    one, One = a(x.name), sentence(a(x.name))
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
        sentence(f"{a(x.name)} {x.sound}."),
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
    answer = sentence(f"{a(right.name)} is {word} than {a(wrong.name)}.")
    return Question(text, answer, f"{right.name} is")


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
        (f"What is {thing} for?", sentence(f"{thing} is used to {purpose}.")),
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


def yes_no(rng: random.Random) -> Question:
    if rng.random() < 0.5:
        thing, is_ = rng.choice(list(COLOUR_OF.items()))
        noun = _noun(thing)
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
