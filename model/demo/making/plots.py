# ruff: noqa: E501  a sentence stays on one line, to be read as one
"""The plots: each tells the middle of a story, sentence after sentence, each drawn from a few.

A list of data, in Python as most sentences need the words for someone. The model was trained on what it comes to: each
option draws in the order in which it stands here, also if it is not the one that is told.
"""

from collections.abc import Callable

from .scenes import feel, greet, meet_friend, thank
from .story import Story, a
from .world import FLOWERS, FOODS, INGREDIENTS, OUTDOORS, TREASURES


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


def cooking(s: Story) -> None:
    h, f = s.hero, s.friend
    food = s.pick(*FOODS)
    one, two, wrong = s.rng.sample(INGREDIENTS, 3)
    s.say(
        f"One day, {h.name} wanted to make {food}.",
        f'"Today I will make {food}," said {h.name}.',
        f"It was {f.name}'s birthday, and {h.name} wanted to make {food}.",
    )
    s.say(
        f"{h.She} took some {one} and some {two} and a big bowl.",
        f"First {h.she} put the {one} in a bowl. Then {h.she} added the {two}.",
        f"{h.She} needed {one} and {two}, but {h.she} could not find the {two}, so {h.she} asked {f.name} for some.",
    )
    s.say(
        f"But {h.name} was in a hurry, and {h.she} put in the {wrong} instead of the {two}.",
        f"Oh no! By mistake {h.she} added {wrong}.",
        f"But {h.name} forgot the time, and soon there was smoke in the kitchen.",
        "The bowl was too full, and it fell on the floor with a crash.",
    )
    s.say(
        f'"It is ruined," said {h.name}.',
        f"It tasted terrible, and {h.name} began to cry.",
        f'"What shall I do now?" cried {h.name}.',
    )
    s.say(
        f'{f.name} came in and said, "We can try again. This time we will do it slowly."',
        f'"Everyone makes mistakes," said {f.name}. "Let us start again together."',
        f"{f.name} helped {h.her} to clean up, and then they started again.",
    )
    s.say(
        f"They stirred and waited, and soon the whole house smelled of fresh {food}.",
        f"This time the {food} was perfect.",
        f"The second time, {h.name} read every step twice.",
    )
    s.say(
        f"They shared the {food} with all their friends.",
        f'{f.name} took a bite. "This is the best {food} I ever had!" {f.she} said.',
        f"They ate the {food} in the {s.pick('garden', 'kitchen', 'sun')} and were happy.",
    )


def quarrel(s: Story) -> None:
    h, f, thing = s.hero, s.friend, s.thing
    s.say(
        f"One day, {h.name} and {h.hers} friend {f.name} found {a(thing)} near the {s.pick(*OUTDOORS)}.",
        f"{h.name} had {a('new ' + thing)}. {h.hers.title()} friend {f.name} wanted to play with it too.",
        f"There was only one {thing}, but {h.name} and {f.name} both wanted it.",
    )
    s.say(f'"It is mine!" said {h.name}.', f'"I want it!" said {h.name}.', f'"Give it to me!" shouted {h.name}.')
    s.say(
        f'"No, it is mine!" said {f.name}.',
        f'"I saw it first," said {f.name}.',
        f'"You always get everything," said {f.name}.',
    )
    s.say(
        f"They both pulled, and the {thing} broke.",
        f"They pulled and pulled until {h.name} fell down.",
        f"{f.name} ran away and sat alone under a tree.",
        f"{h.name} took the {thing} and went home without a word.",
    )
    feel(s, "sorry", "sad", "lonely")
    s.say(
        f'After a while, {h.name} thought, "It is no fun to play alone."',
        f"{h.name} thought about it. A friend is worth more than {a(thing)}.",
        f'An old {s.pick("owl", "turtle", "woman", "man")} saw it and said, "A thing that you share gives joy to two."',
    )
    s.say(
        f'So {h.she} went to {f.name} and said, "I am sorry. Let us take turns."',
        f'"I am sorry, {f.name}," said {h.name}. "We can share it."',
    )
    s.say(
        f'"I am sorry too," said {f.name}.',
        f'{f.name} smiled. "That is a good idea," {f.she} said.',
        f'"You can go first," said {f.name}.',
    )
    s.say(
        f"They played with the {thing} together all day.",
        f"Now the {thing} belonged to both of them.",
        "They laughed and played until dark.",
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


def birthday(s: Story) -> None:
    h, f, thing = s.hero, s.friend, s.thing
    s.say(
        f"It was {f.name}'s birthday, and {h.name} wanted to give {f.her} a present.",
        f"Tomorrow was the birthday of {h.hers} friend {f.full_name}.",
        f"{h.name} wanted to make {f.name} happy on {f.hers} birthday.",
    )
    s.say(
        f"But {h.name} had no money.",
        f"But all the shops were closed, because it was {s.pick('Sunday', 'late', 'a holiday')}.",
        f"{h.name} did not know what to give.",
    )
    s.say(
        f'"What does {f.name} like best?" {h.she} asked {h.hers} {s.pick("mother", "father", "grandmother", "brother", "sister")}.',
        f"{h.She} thought and thought.",
        f"{h.She} looked everywhere in the house.",
    )
    s.say(
        f"Then {h.she} had an idea. {h.She} would make {a(thing)}!",
        f'"I will make {a(thing)} with my own hands," {h.she} said.',
        f"So {h.she} took some {s.pick('paper', 'wood', 'wool', 'cloth')} and began to make {a(thing)}.",
    )
    s.say(
        f"{h.She} worked all {s.pick('day', 'night', 'morning')}. It was not easy.",
        f"{h.She} painted it {s.pick('red', 'blue', 'green', 'yellow')} and {s.pick('white', 'gold', 'orange')}.",
        "The first one was crooked, and the second one broke, but the third one was just right.",
    )
    s.say(
        f'When {f.name} saw the {thing}, {f.she} jumped for joy. "It is beautiful!" {f.she} said.',
        f'"Did you make this {thing} for me?" asked {f.name}. "Yes," said {h.name}, "because you are my friend."',
        f'{f.name} opened the box. "A {thing}! That is what I always wanted!"',
    )
    s.say(
        "They ate cake and danced until the stars came out.",
        f"{h.name} learned that a present from the heart is the best present.",
        f"All the guests sang a song for {f.name}.",
    )


def building(s: Story) -> None:
    h, f = s.hero, s.friend
    thing = s.pick("boat", "tree house", "kite", "snowman", "tower", "bridge", "sandcastle", "swing", "cart", "hut")
    material = (
        s.pick("wood", "stones", "rope and wood", "old boxes", "sticks")
        if thing not in ("snowman", "sandcastle")
        else "what was there"
    )
    s.say(
        f"{h.name} wanted to build {a(thing)}.",
        f'One day {h.she} said, "I am going to build {a(thing)}!"',
        f"{h.name} dreamed of {a('big ' + thing)}.",
    )
    s.say(
        f"{h.She} made it of {material}.",
        f"{h.She} worked very fast, because {h.she} wanted to finish before {s.pick('dinner', 'night', 'lunch')}.",
        f"{h.She} did not ask anyone for help.",
    )
    s.say(
        f"But the {thing} fell down.",
        f"Crash! The {thing} broke into pieces.",
        f"But when the wind came, the {thing} fell over.",
    )
    feel(s, "sad", "angry", "tired")
    meet_friend(s)
    s.say(
        f'"Why did it fall?" asked {f.name}. "I was too fast," said {h.name}.',
        f'"Do not give up," said {f.name}. "We can build it again together."',
        f'"I can help you," said {f.name}. "Two are stronger than one."',
    )
    s.say(
        f"{h.name} held the pieces, and {f.name} tied them together.",
        f"This time they made a plan first. {f.name} drew it in the sand.",
        f"{f.name} brought more {s.pick('wood', 'rope', 'nails', 'stones')}, and {h.name} did the work.",
    )
    s.say(
        f"In the evening the {thing} was ready, and it was strong.",
        f"At last the {thing} stood there, and it did not fall.",
        f'"Look at our {thing}!" said {h.name}. "It is the best {thing} in the world."',
    )
    s.say(
        f"{h.name} learned that good work needs time.", "Everyone came to see it.", "They played there every day.", ""
    )


def honest(s: Story) -> None:
    h, f = s.hero, s.friend
    owner = s.pick("mother", "father", "grandmother", "grandfather", "aunt", "teacher")
    he = "he" if owner.endswith("father") else "she"
    thing = s.pick("vase", "window", "blue cup", "clock", "lamp", "plate", "flower pot", "mirror")
    s.say(
        f"One day, {h.name} was playing with {h.hers} {s.pick('ball', 'drum', 'friend ' + f.name)} inside.",
        f"One day, {h.name} and {f.name} were running around in the house.",
        f"{h.name} wanted to see the {thing} of {h.hers} {owner}, although {h.she} was not allowed to touch it.",
    )
    s.say(
        f"Crash! The {thing} broke.",
        f"Suddenly the {thing} fell down and broke.",
        f"Then {h.she} slipped, and the {thing} broke into many pieces.",
    )
    feel(s, "afraid", "worried", "sorry")
    s.say(
        f'"Nobody saw it," said {f.name}. "We can hide the pieces."',
        f'"I could say that the {s.pick("cat", "wind", "dog")} did it," thought {h.name}.',
        f"First {h.name} wanted to run away.",
    )
    s.say(
        f"But {h.name} did not want to lie.",
        f"But {h.name} knew that it was wrong.",
        f"All evening {h.name} could not eat, because {h.she} had a bad feeling.",
    )
    s.say(
        f'So {h.she} went to {h.hers} {owner} and said, "I broke the {thing}. I am sorry."',
        f'"It was me," said {h.name} to {h.hers} {owner}. "I broke the {thing}."',
    )
    s.say(
        f'{h.hers.title()} {owner} was quiet for a moment. Then {he} said, "Thank you for telling me the truth."',
        f'"I am sad about the {thing}," said {h.hers} {owner}, "but I am proud that you are honest."',
        f'{h.hers.title()} {owner} smiled. "A {thing} can be replaced," {he} said, "but trust is worth more."',
    )
    s.say(
        f"Together they swept the floor and glued the {thing}.",
        f"{h.name} used {h.hers} own coins to buy a new {thing}.",
        f"After that, {h.name} always played outside.",
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


def garden(s: Story) -> None:
    h, f = s.hero, s.friend
    plant = s.pick(*FLOWERS)
    s.say(
        f"One day, {h.name} found a small seed.",
        f"In spring, {h.hers} {s.pick('grandmother', 'grandfather', 'mother', 'uncle')} gave {h.her} a seed.",
        f"{f.full_name} gave {h.name} a tiny seed.",
    )
    s.say(
        f"{h.She} put it in the ground and gave it some water.",
        f"{h.She} dug a hole in the garden and planted the seed.",
    )
    s.say(
        "The next day, there was nothing to see. The day after, there was still nothing.",
        f"Every morning {h.name} ran to the garden, but nothing happened.",
        f'"Why does it not grow?" asked {h.name}.',
    )
    s.say(
        f'"You must be patient," said {f.name}.',
        f'{f.name} looked at the ground. "It needs sun, water and time," {f.she} said.',
        f'"Good things need time," {f.name} told {h.her}.',
    )
    s.say(
        f"So {h.name} waited. When it was dry, {h.she} brought water. When it was cold, {h.she} covered the ground with straw.",
        f"{h.name} watered it every day, and {f.name} pulled out the weeds.",
        "Days went by, and then weeks.",
    )
    s.say(
        "Then, one morning, there was a small green leaf!",
        f"At last, something green came out of the ground. {h.name} danced around it.",
    )
    s.say(
        f"In summer it was a big {plant}, and it was the most beautiful {plant} of all.",
        f"It grew and grew until it was {a(plant)}, taller than {h.name}.",
        f'"It is {a(plant)}!" cried {h.name}.',
    )
    s.say(
        f"{h.name} learned to be patient.",
        f"{h.She} gave new seeds to all {h.hers} friends.",
        f"{h.name} thanked {f.name} for the good advice.",
    )


def bedtime(s: Story) -> None:
    h, f = s.hero, s.friend
    s.say(
        f"One night, {h.name} could not sleep.",
        f"It was late, but {h.name} was still awake.",
        f"{h.name} lay in bed and looked at the moon.",
    )
    s.say(
        f"{h.She} heard a strange noise outside.",
        f'"I am not tired at all," {h.she} said.',
        f"{h.She} counted {s.pick('sheep', 'stars', 'clouds')}: one, two, three, four, five. It did not help.",
    )
    s.say(
        f"So {h.she} went to the window. There sat {f.full_name}.",
        f"Quietly {h.she} went outside. In the moonlight stood {f.full_name}.",
        f"Then someone knocked on the window. It was {f.full_name}.",
    )
    s.say(
        f'"Can you not sleep either?" asked {f.name}.',
        f'"Come with me," whispered {f.name}. "I will show you something."',
        f'"Look up," said {f.name}. "The stars are bright tonight."',
    )
    s.say(
        "Together they looked at the stars. One of them fell, and they made a wish.",
        f"They sat on the {s.pick('roof', 'hill', 'grass', 'old bench')} and listened to the night.",
        f"They walked to the {s.pick(*OUTDOORS)}, where hundreds of fireflies were dancing.",
    )
    s.say(
        f'"What did you wish for?" asked {h.name}. "If I tell you, it will not come true," said {f.name}.',
        f'"The night is not scary when you are with a friend," said {h.name}.',
        f"{h.name} began to yawn. {f.name} yawned too.",
    )
    s.say(
        f"Soon {h.name} was back in bed, and {h.hers} eyes were heavy.",
        f'"Good night, {f.name}," said {h.name}. "Good night, {h.name}," said {f.name}.',
        f"{h.name} went home, and this time {h.she} fell asleep at once.",
    )


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
