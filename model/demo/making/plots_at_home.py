# ruff: noqa: E501  a sentence stays on one line, to be read as one
"""Plots at home and next door: a cake, a quarrel, a birthday. `stories.py` has them all."""

from .scenes import feel, meet_friend
from .story import Story, a
from .world import FLOWERS, FOODS, INGREDIENTS, OUTDOORS


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
