"""The parts of a story: characters, a place, and the sentences so far. All are drawn from a `random.Random`."""

import random
from dataclasses import dataclass, field

from .world import BOYS, GIRLS, HEROES, PETS, PLACES, TOYS, TRAITS


@dataclass(frozen=True, slots=True)
class Character:
    """A character, with its pronouns."""

    name: str
    kind: str  # "girl", "boy" or an animal
    is_female: bool

    @property
    def she(self) -> str:
        return "she" if self.is_female else "he"

    @property
    def She(self) -> str:
        """At the beginning of a sentence."""
        return "She" if self.is_female else "He"

    @property
    def her(self) -> str:
        """The object: "saw her", "saw him"."""
        return "her" if self.is_female else "him"

    @property
    def hers(self) -> str:
        """The possessive: "her hat", "his hat"."""
        return "her" if self.is_female else "his"

    @property
    def full_name(self) -> str:
        """ "Pip the fox", but simply "Tom"."""
        return self.name if self.is_person else f"{self.name} the {self.kind}"

    @property
    def is_person(self) -> bool:
        return self.kind in ("girl", "boy")


@dataclass(slots=True)
class Story:
    """A story in progress: characters, place, and the sentences so far."""

    rng: random.Random
    hero: Character
    friend: Character
    place: str
    trait: str
    thing: str  # the subject of the plot, for requests such as "a story about a kite"
    theme: str = ""
    sentences: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.hero.name, self.hero.kind, self.place)

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    def say(self, *options: str) -> None:
        """Adds one of the sentences, or none if the one drawn is empty."""
        sentence = self.rng.choice(options)
        if sentence:
            self.sentences.append(sentence)

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)


def draw_story(rng: random.Random) -> Story:
    """Characters, place and thing for a story; no sentence yet."""
    hero = draw_character(rng)
    friend = draw_character(rng, hero.is_person or rng.random() < 0.1)
    while friend.name == hero.name:
        friend = draw_character(rng, hero.is_person)
    return Story(rng, hero, friend, rng.choice(PLACES), rng.choice(TRAITS), rng.choice(TOYS))


def draw_character(rng: random.Random, is_person: bool | None = None) -> Character:
    if is_person is None:
        is_person = rng.random() < 0.55
    is_female = rng.random() < 0.5
    if is_person:
        return Character(rng.choice(GIRLS if is_female else BOYS), "girl" if is_female else "boy", is_female)
    return Character(rng.choice(PETS), rng.choice(HEROES), is_female)


def made_up_name(rng: random.Random) -> str:
    name = rng.choice(("", "", "A", "E", "O", "I")) + "".join(
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))
    )
    return (name + rng.choice(("", "", "n", "r", "s", "l"))).capitalize()


def a(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def in_place(place: str) -> str:
    """The place with its article and preposition."""
    return f"{'on' if place in ('farm', 'little island') else 'in'} {a(place)}"


def sentence(text: str) -> str:
    """The text with a capital first letter, otherwise unchanged."""
    return text[0].upper() + text[1:]
