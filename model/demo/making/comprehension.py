# ruff: noqa: E501  a question and its answer stay on one line, to be read as one
"""Questions on a text that precedes them, and requests for a story."""

import random

from .question import Question
from .stories import tell
from .story import Character, a, draw_character, draw_story, in_place, made_up_name
from .world import (
    COLOURS,
    FEELINGS,
    FOODS,
    OUTDOORS,
    PLACES,
    TOYS,
)


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
    shared = rng.random() < 0.5  # all characters get a fact of one topic, so that the name decides
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
