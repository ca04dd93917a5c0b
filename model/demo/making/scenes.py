# ruff: noqa: E501  a sentence stays on one line, to be read as one
"""Scenes that more than one plot has: the friend comes, and asks; the hero feels something, and thanks."""

from .story import Story, a
from .world import FEELINGS, OUTDOORS


def meet_friend(s: Story) -> None:
    """The friend comes into the story."""
    h, f = s.hero, s.friend
    who = f"{f.name}, {a(s.pick('kind', 'young', 'friendly', 'clever', 'funny', 'small') + ' ' + f.kind)}"
    s.say(
        f"On the way, {h.she} met {who}.",
        f"Then {who}, came by.",
        f"Near the {s.pick(*OUTDOORS)}, {h.name} saw {who}.",
        f"Just then, {who}, came around the corner.",
        f"{h.hers.title()} friend {f.full_name} came to help.",
        f"{f.full_name} was sitting under a tree.",
    )


def greet(s: Story) -> None:
    h, f = s.hero, s.friend
    s.say(
        f'"Hello, {h.name}," said {f.name}. "Why do you look so {s.pick("sad", "worried", "tired", "unhappy")}?"',
        f'"Good morning!" said {f.name}. "Can I help you?"',
        f'"What is the matter?" asked {f.name}.',
        f'{f.name} looked at {h.name} and said, "You look worried. What happened?"',
        f'"Is something wrong, {h.name}?" {f.name} asked.',
    )


def feel(s: Story, *feelings: str) -> None:
    h = s.hero
    feeling = s.pick(*(feelings or FEELINGS))
    s.say(
        f"{h.name} felt {feeling}.",
        f"This made {h.name} very {feeling}.",
        f"{h.She} was so {feeling} that {h.she} {s.pick('could not speak', 'had to sit down', 'forgot to eat lunch', 'took a deep breath')}.",
        "",
    )


def thank(s: Story) -> None:
    h, f = s.hero, s.friend
    s.say(
        f'"Thank you, {f.name}!" said {h.name}. "You are a good friend."',
        f'"Thank you so much," said {h.name}.',
        f'{h.name} hugged {f.name} and said, "I could not have done it without you."',
        f"{h.name} thanked {f.name} and gave {f.her} {a(s.pick('big hug', 'apple', 'piece of cake', 'red flower', 'cookie'))}.",
    )
    s.say(
        f'"You are welcome," said {f.name}.',
        f'"Friends help each other," {f.name} said with a smile.',
        f"{f.name} smiled.",
        "",
    )
