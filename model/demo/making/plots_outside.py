# ruff: noqa: E501  a sentence stays on one line, to be read as one
"""Plots in the forest, at the river and on the way: a lost thing, a storm, a race. `stories.py` has them all."""

from .scenes import feel, greet, meet_friend, thank
from .story import Story, a
from .world import FOODS, OUTDOORS, TREASURES


def lost_thing(s: Story) -> None:
    h, f, thing = s.hero, s.friend, s.thing
    colour = s.pick("red", "blue", "green", "yellow", "old", "new", "golden", "striped")
    first, second, spot = s.rng.sample(OUTDOORS, 3)
    s.say(
        f"{h.name} had {a(colour + ' ' + thing)}, and {h.she} loved it very much.",
        f"{h.hers.title()} favourite thing was {a(colour + ' ' + thing)}.",
        f"Every day {h.she} played with {h.hers} {colour} {thing}.",
    )
    s.say(
        f"One day, the {thing} was gone.",
        f"One morning, {h.name} could not find the {thing}.",
        f'One day {h.she} looked around and said, "Oh no! Where is my {thing}?"',
    )
    feel(s, "sad", "worried")
    s.say(
        f"{h.She} looked under the bed and behind the door, but the {thing} was not there.",
        f"First {h.she} looked in the {first}. Then {h.she} looked in the {second}. The {thing} was not there.",
        f"{h.She} went to the {first}, but {h.she} found only {s.pick('leaves', 'stones', 'mud', 'an old shoe')}.",
    )
    meet_friend(s)
    greet(s)
    s.say(
        f'"I lost my {thing}," said {h.name}.',
        f'"I cannot find my {colour} {thing}," {h.name} said, and {h.she} began to cry.',
    )
    s.say(
        f'"Let us look together," said {f.name}.',
        f'"Do not worry," said {f.name}. "We will find it."',
        f'"When did you last have it?" asked {f.name}. {h.name} thought about it. "I was at the {spot}!"',
    )
    s.say(
        f"They walked to the {spot}. There, {s.pick('under a bush', 'on a stone', 'behind a tree', 'in the grass')}, was the {thing}!",
        f"They looked and looked. At last {f.name} saw something {s.pick('small', 'bright', 'strange')} near the {spot}. It was the {thing}!",
        f"At the {spot}, {h.name} saw {a(s.pick('crow', 'puppy', 'kitten', 'goat'))}. It was playing with the {thing}!",
    )
    thank(s)


def new_friend(s: Story) -> None:
    h, f = s.hero, s.friend
    s.say(
        f"{h.name} had no one to play with.",
        f"{h.name} often felt lonely, because there were no other children near."
        if h.is_person
        else f"{h.name} often felt lonely.",
        f"All day long, {h.name} played alone.",
    )
    meet_friend(s)
    s.say(
        f"{h.name} wanted to say hello, but {h.she} was too shy.",
        f'"Hello," said {h.name}. "What is your name?" "My name is {f.name}," said {f.name}.',
        f'"I am {h.name}," said {h.name}. "Do you want to play with me?"',
    )
    game = s.pick("hide and seek", "with the ball", "in the leaves", "by the water", "a counting game", "in the snow")
    s.say(
        f'"Yes, please!" said {f.name}. So they played {game} until the sun went down.',
        f"{f.name} smiled, and soon they were playing {game}.",
        f'"I was looking for a friend too," said {f.name}. They played {game} all afternoon.',
    )
    s.say(
        f"{h.name} shared {h.hers} {s.pick(*FOODS)} with {f.name}.",
        f"{f.name} showed {h.name} how to {s.pick('climb a tree', 'whistle', 'skip stones', 'make a crown of flowers', 'catch a leaf')}.",
        "",
    )
    s.say(
        f'"Will you come back tomorrow?" asked {h.name}. "Of course," said {f.name}.',
        f'When it was time to go home, {f.name} said, "See you tomorrow, {h.name}!"',
        f"{h.name} was not lonely any more.",
    )


def hurt_animal(s: Story) -> None:
    h, f = s.hero, s.friend
    small = s.pick("bird", "kitten", "mouse", "hedgehog", "puppy", "butterfly", "lamb", "robin")
    part = "wing" if small in ("bird", "butterfly", "robin") else "leg"
    s.say(
        f"One day, {h.name} was walking near the {s.pick(*OUTDOORS)} when {h.she} heard a small sound.",
        f"After a big storm, {h.name} went out for a walk.",
        f"One afternoon {h.she} heard someone crying in the grass.",
    )
    s.say(
        f"It was a {small} with a hurt {part}.",
        f"On the ground sat a little {small}. Its {part} was hurt.",
        f"There was a tiny {small}, and it could not move its {part}.",
    )
    s.say(
        f'"Do not be afraid," said {h.name}. "I will help you."',
        f'"Poor little {small}," said {h.name}.',
        f"{h.name} was careful not to scare the {small}.",
    )
    s.say(
        f"{h.She} carried the {small} home and made a soft bed for it.",
        f"{h.She} put the {small} in a box with warm straw.",
        f"{h.She} ran to {f.name}, because {f.name} knew a lot about animals.",
    )
    s.say(
        f"Every day {h.name} gave it water and {s.pick('seeds', 'bread', 'milk', 'berries')}.",
        f"{f.name} came too, and together they took care of the {small}.",
        f"{h.name} and {f.name} sang to the {small} every evening.",
    )
    s.say(
        f"After {s.pick('three days', 'a week', 'two weeks', 'some time')}, the {small} was well again.",
        f"Soon the {part} was strong again.",
    )
    s.say(
        f"{h.name} was a little sad to let it go, but {h.she} knew that the {small} wanted to be free.",
        f'"Goodbye, little {small}," said {h.name}. "Come back and visit us!"',
        f"The {small} looked back once, as if to say thank you.",
    )


def weather_day(s: Story) -> None:
    h, f = s.hero, s.friend
    plan = s.pick(
        "have a picnic", "go to the market", "swim in the lake", "fly a kite", "pick berries", "visit Grandmother"
    )
    weather, because = s.rng.choice(
        [
            ("it began to rain", "the rain"),
            ("the wind began to blow", "the wind"),
            ("it began to snow", "the snow"),
            ("thick fog came down", "the fog"),
            ("there was loud thunder", "the storm"),
        ]
    )
    s.say(
        f"{h.name} and {f.name} wanted to {plan}.",
        f'"Today we will {plan}," said {h.name} to {h.hers} friend {f.name}.',
        f"{h.name} was waiting for {f.name}, because they had a plan: they would {plan}.",
    )
    s.say(f"But then {weather}.", f"But as soon as they went out, {weather}.")
    feel(s, "sad", "angry", "worried")
    s.say(
        f'"Now we cannot {plan}," said {h.name}.',
        f'"Because of {because}, we must stay inside," said {f.name}.',
        f'{f.name} looked out of the window. "I do not like {because}," {f.she} said.',
    )
    s.say(
        f'Then {f.name} had an idea. "Let us {s.pick("build a tent from blankets", "bake a cake", "tell stories", "paint pictures", "sing songs")}!"',
        f'"I know!" said {h.name}. "We can {s.pick("make paper boats", "play a game", "read a book", "cook some soup", "dress up")} instead."',
    )
    s.say(
        "They laughed so much that they forgot the weather.",
        "Soon the house was full of laughter.",
        f"It was even more fun than their first plan, {h.name} thought.",
    )
    s.say(
        f"When {because} was over, there was {s.pick('a rainbow in the sky', 'sun on every roof', 'a bright star above the trees')}.",
        f"In the evening {because} stopped, and the sky was clear.",
        "",
    )


def brave_day(s: Story) -> None:
    h, f = s.hero, s.friend
    fear, deed = s.rng.choice(
        [
            ("the dark", "walk through the dark tunnel"),
            ("deep water", "swim across the pond"),
            ("high places", "climb the tall tree"),
            ("thunder", "go out in the storm"),
            ("loud noises", "play the big drum"),
            ("speaking to others", "sing in front of everyone"),
            ("the old bridge", "cross the old bridge"),
        ]
    )
    s.say(
        f"{h.name} was afraid of {fear}.",
        f"There was one thing that {h.name} did not like: {fear}.",
        f"Everyone knew that {h.name} was afraid of {fear}.",
    )
    s.say(
        f'"I will never {deed}," {h.she} always said.',
        f"When the others wanted to {deed}, {h.name} stayed at home.",
        f"At night {h.she} dreamed about it.",
        "",
    )
    s.say(
        f"One day, {h.name} heard a cry. It was {f.full_name}, who needed help.",
        f"One evening, {h.hers} friend {f.full_name} did not come home.",
        f'One day {f.full_name} said, "Come with me. I will hold your hand."',
    )
    s.say(
        f"To help {f.name}, {h.name} had to {deed}.",
        f"There was only one way: {h.name} had to {deed}.",
        f"{h.name} knew that it was time to {deed}.",
    )
    s.say(
        f"{h.hers.title()} heart beat fast, but {h.she} took one step, and then another.",
        f'"I can do it," {h.she} said to {h.her}self.' if h.is_female else '"I can do it," he said to himself.',
        f"{h.She} closed {h.hers} eyes and counted to {s.pick('three', 'five', 'ten')}.",
        f"{h.She} was still afraid, but {h.she} did it anyway.",
    )
    s.say(
        "And it was not so bad after all.",
        f'"You did it!" cried {f.name}. "You are so brave!"',
        f"And soon {h.she} was on the other side, safe and proud.",
    )
    s.say(
        f"{h.name} learned that being brave means doing a thing although you are afraid.",
        f"After that, {h.name} was not afraid of {fear} any more.",
        f"{f.name} told everyone how brave {h.name} was.",
    )


def treasure(s: Story) -> None:
    h, f = s.hero, s.friend
    find = s.pick(*TREASURES)
    spot, other = s.rng.sample(OUTDOORS, 2)
    s.say(
        f"One day, {h.name} walked to the {spot}.",
        f"One morning {h.she} went to the {spot} to look for {s.pick('shells', 'berries', 'mushrooms', 'flowers', 'wood')}.",
        f"{h.name} loved to explore the {spot}.",
    )
    s.say(
        f"There, half hidden in the {s.pick('sand', 'grass', 'leaves', 'mud', 'moss')}, {h.she} found {a(find)}.",
        f"Suddenly {h.she} saw {a(find)}.",
        f"{h.She} fell over something hard. It was {a(find)}!",
    )
    feel(s, "surprised", "excited", "curious")
    s.say(
        f'"Where does it come from?" {h.she} wondered.',
        f'"Who lost this?" asked {h.name}.',
        f"{h.She} had never seen anything like it.",
    )
    s.say(
        f"{h.She} showed the {find} to {f.name}, {a('wise ' + f.kind)}.",
        f"{h.She} took the {find} to {f.full_name}.",
    )
    s.say(
        f'"I know this {find}," said {f.name}. "It belongs to the old woman at the {other}."',
        f'"It is magic," said {f.name}. "It gives you one wish."',
        f'"Let us follow the path to the {other}," said {f.name}. "There we will learn more."',
        f'"I lost it long ago," said {f.name}. "I have looked for it everywhere!"',
    )
    s.say(
        f"So {h.name} gave it back, because it was the right thing to do.",
        f"{h.name} thought for a long time. Then {h.she} wished that everyone in the {s.place} would be happy.",
        f"They walked over hills and through the {other} until they found out the truth.",
        f"So {h.name} put the {find} where it belonged.",
    )
    s.say(
        f"As a thank you, {h.name} got {a(s.pick('basket of apples', 'warm scarf', 'golden coin', 'big cake', 'new book'))}.",
        f'"You have a good heart, {h.name}," said {f.name}.',
        f"{h.name} learned that {s.pick('honest hands sleep well', 'the best treasure is a friend', 'small things can be important')}.",
    )


def race(s: Story) -> None:
    h, f = s.hero, s.friend
    s.say(
        f"Every {s.pick('year', 'spring', 'summer', 'autumn')}, there was a big race around the {s.pick(*OUTDOORS)}.",
        f'"I am faster than you," said {f.full_name} one day.',
        f"{h.name} wanted to win the race against {f.full_name}.",
    )
    s.say(
        f"{h.name} trained every morning.",
        f"Everyone thought that {f.name} would win.",
        f'"You will never win," laughed {f.name}.',
    )
    s.say(
        '"One, two, three, go!" called the old owl, and they ran.',
        f"When the race began, {f.name} was far ahead.",
        f"They ran over the {s.pick('hill', 'bridge', 'field', 'meadow')} and past the {s.pick('mill', 'pond', 'barn', 'well')}.",
    )
    s.say(
        f"But then {f.name} fell and hurt {f.hers} foot.",
        f"Halfway, {f.name} fell into the mud and could not get out.",
        f"Near the end, {f.name} was so tired that {f.she} had to stop.",
    )
    s.say(
        f"{h.name} could win now! But {h.she} stopped and went back.",
        f"{h.name} looked at the finish, and then at {f.name}. {h.She} turned around.",
    )
    s.say(
        f'"Take my hand," said {h.name}.',
        f'"Lean on me," said {h.name}. "We will walk together."',
        f"{h.She} helped {f.name} to stand up.",
    )
    s.say(
        "Together they crossed the line, and everyone cheered.",
        f'"You could have won," said {f.name}. "Why did you help me?" "Because you are more important than a race," said {h.name}.',
        "They were the last ones, but they got the loudest cheers.",
    )
