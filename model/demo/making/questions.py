"""Questions with their answers over the small world, each a pure function of a `random.Random`."""

import random
from collections.abc import Callable

from .comprehension import comprehension, story_question, story_request
from .facts import (
    animal_fact,
    calendar,
    capital,
    colour,
    compare,
    member,
    opposite,
    use,
    what_is,
    which_sound,
    why,
    yes_no,
)
from .question import Question
from .small_talk import about_me, greeting, repeat, unknown
from .sums import arithmetic, count_things, counting, word_problem


def ask(rng: random.Random) -> Question:
    """A question of a kind drawn by weight."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: Kind = rng.choices(kinds, weights)[0]
    return kind(rng)


Kind = Callable[[random.Random], Question]
KINDS: tuple[tuple[Kind, float], ...] = (  # with their weights
    (colour, 6),
    (animal_fact, 14),
    (which_sound, 2),
    (compare, 5),
    (arithmetic, 12),
    (word_problem, 4),
    (counting, 5),
    (count_things, 1),
    (opposite, 5),
    (calendar, 7),
    (capital, 4),
    (member, 4),
    (use, 3),
    (why, 2),
    (what_is, 4),
    (about_me, 5),
    (greeting, 5),
    (unknown, 4),
    (repeat, 12),
    (comprehension, 18),
    (story_question, 1.2),
    (story_request, 6),
    (yes_no, 4),
)
