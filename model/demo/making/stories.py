# ruff: noqa: E501  a sentence stays on one line, to be read as one
"""Simple stories from a seed: a hero, a place, one of fourteen plots, and one sentence after another.

A story is a pure function of its `random.Random`. Its `key` (name, kind, place) is what the split rule of corpus.py looks at;
each opening holds all three, so a key that is never used for training is an opening that is never seen in training.
"""

from collections.abc import Callable

from .plots_at_home import bedtime, birthday, building, cooking, garden, honest, quarrel
from .plots_outside import brave_day, hurt_animal, lost_thing, new_friend, race, treasure, weather_day
from .story import Story, a, in_place, sentence

# Each tells the middle of a story, sentence after sentence, each drawn from a few. The model was trained on what it comes
# to: each option of a plot draws in the order in which it stands there, also if it is not the one that is told.
PLOTS: tuple[Callable[[Story], None], ...] = (
    lost_thing,
    new_friend,
    hurt_animal,
    weather_day,
    cooking,
    quarrel,
    brave_day,
    treasure,
    birthday,
    building,
    honest,
    race,
    garden,
    bedtime,
)


def tell(story: Story, opening: str | None = None) -> Story:
    """Fills `story` with an opening, a plot and an ending."""
    story.sentences.append(opening or open_story(story))
    plot = story.rng.choice(PLOTS)
    story.theme = plot.__name__
    plot(story)
    close_story(story)
    return story


def open_story(s: Story) -> str:
    """The first sentence or two: name, kind and place, always all three."""
    h, trait, place = s.hero, s.trait, s.place
    where = in_place(place)
    article = a(f"{trait} {h.kind}")
    return s.pick(
        f"Once upon a time, there was {article} named {h.name}. {h.name} lived {where}.",
        f"Once upon a time there lived {article} called {h.name} {where}.",
        f"Once upon a time, {where}, there lived {article} named {h.name}.",
        f"There once was {article} called {h.name} who lived {where}.",
        f"{h.name} was {article} who lived {where}.",
        f"{h.name} was {article}, and {h.she} lived {where}.",
        f"Long ago, {where}, there was {article}. {h.She} was called {h.name}.",
        f"This is the story of {h.name}, {article} who lived {where}.",
        sentence(f"{where} lived {article}. {h.hers.title()} name was {h.name}."),
        f"One {s.pick(*SEASONS_OF_DAY)}, {article} named {h.name} woke up {where}.",
    )


SEASONS_OF_DAY = ("morning", "spring morning", "sunny day", "cold morning", "summer day", "rainy day", "quiet evening")


def close_story(s: Story) -> None:
    h, f = s.hero, s.friend
    s.say(
        f"From that day on, {h.name} and {f.name} were the best of friends.",
        f"That night, {h.name} fell asleep with a smile.",
        f"{h.name} never forgot that day.",
        f"{h.name} was very {s.pick('happy', 'proud', 'glad')}.",
        f"It was the best day of the whole {s.pick('year', 'summer', 'week')}.",
        f"When {h.name} came home, {h.she} told the whole story to {h.hers} {s.pick('mother', 'father', 'grandmother', 'family')}.",
        "And they all lived happily ever after.",
        f"And if you walk there today, you may still hear {h.name} and {f.name} laughing.",
        f'"What a day!" said {h.name}, and {h.she} closed {h.hers} eyes.',
        "",
    )
    s.say("", "", "The end.")
