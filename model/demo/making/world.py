"""The small world of the demo model: names, things, places, and facts about them. Data only, no grammar."""

from dataclasses import dataclass


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in text.split("|")]


def _pairs(text: str) -> dict[str, str]:
    return {first: second for first, _, second in (pair.partition("-") for pair in text.split())}


GIRLS = _words(
    """
    Lily Mia Anna Ella Zoe Ruby Nora Ivy Clara Emma Rosa Alice Lucy Maya Tilda Hana June Freya Greta Ada Sara Olga
    Nina Leah Dora Elsa Mary Jane Kate Amy Molly Daisy Hazel Iris Lena Vera Yara Eve Kim Sue Tess Pia Wanda Holly
    Edith Martha Flora Cora Nell Bea
    """
)
BOYS = _words(
    """
    Tom Ben Max Sam Leo Jack Finn Oscar Hugo Noah Theo Adam Paul Henry Luke Omar Ravi Felix Arthur Jonas Peter Tim
    Dan Joe Will Nick Mark Eric Carl Otto Emil Ivan Kofi Yusuf Diego Louis Frank George Alan Rob Ned Ted Gus Ralph
    Walter Simon Martin Kai Niels Toby
    """
)
PETS = _words(
    """
    Pip Rusty Fern Bramble Nutmeg Pepper Coco Biscuit Willow Poppy Misty Sunny Shadow Ginger Dusty Maple Acorn
    Clover Button Patch Whisker Pebble Bubbles Sparky Cinnamon Moss Teddy Hop Waddle Quill Thistle Muffin Juniper
    Echo Star Pudding Twig Snowy Olive Domino
    """
)


@dataclass(frozen=True, slots=True)
class Animal:
    """The facts of the small world about one kind of animal."""

    name: str
    colour: str
    sound: str  # third person: "barks"
    food: str
    home: str
    legs: int
    baby: str
    moves: str  # the verb it is best at
    size: int  # larger number, larger animal; no two kinds are compared with the same number
    plural: str


def _animal(line: str) -> Animal:
    name, colour, sound, food, home, legs, baby, moves, size, plural = (part.strip() for part in line.split(","))
    return Animal(name, colour, sound, food, home, int(legs), baby, moves, int(size), plural)


ANIMALS = [
    _animal(line)
    for line in """\
dog, brown, barks, meat, in a house, 4, puppy, run, 30, dogs
cat, grey, meows, fish, in a house, 4, kitten, climb, 20, cats
cow, brown, moos, grass, on a farm, 4, calf, walk, 70, cows
horse, brown, neighs, hay, on a farm, 4, foal, run, 72, horses
sheep, white, bleats, grass, on a farm, 4, lamb, walk, 45, sheep
pig, pink, oinks, corn, on a farm, 4, piglet, dig, 46, pigs
duck, white, quacks, seeds, on a pond, 2, duckling, swim, 15, ducks
hen, brown, clucks, seeds, on a farm, 2, chick, walk, 14, hens
frog, green, croaks, flies, in a pond, 4, tadpole, jump, 4, frogs
fish, silver, makes no sound, small plants, in the water, 0, fry, swim, 5, fish
bee, yellow and black, buzzes, nectar, in a hive, 6, larva, fly, 1, bees
mouse, grey, squeaks, cheese, in a hole, 4, pup, run, 3, mice
lion, yellow, roars, meat, on the plain, 4, cub, run, 65, lions
elephant, grey, trumpets, leaves, on the plain, 4, calf, walk, 90, elephants
bear, brown, growls, honey, in the forest, 4, cub, climb, 66, bears
wolf, grey, howls, meat, in the forest, 4, cub, run, 40, wolves
owl, brown, hoots, mice, in a tree, 2, owlet, fly, 12, owls
fox, red, barks, berries, in a den, 4, cub, run, 25, foxes
rabbit, white, makes almost no sound, carrots, in a burrow, 4, kit, hop, 13, rabbits
squirrel, red, chatters, nuts, in a tree, 4, kit, climb, 8, squirrels
penguin, black and white, honks, fish, on the ice, 2, chick, swim, 22, penguins
monkey, brown, chatters, bananas, in the jungle, 4, infant, climb, 28, monkeys
goat, white, bleats, grass, on a farm, 4, kid, climb, 42, goats
snake, green, hisses, mice, in the grass, 0, hatchling, slide, 11, snakes
spider, black, makes no sound, flies, in a web, 8, spiderling, climb, 2, spiders
crow, black, caws, seeds, in a tree, 2, chick, fly, 10, crows
deer, brown, bleats, leaves, in the forest, 4, fawn, run, 50, deer
hedgehog, brown, snuffles, worms, in the garden, 4, hoglet, walk, 9, hedgehogs
turtle, green, makes no sound, plants, in the sea, 4, hatchling, swim, 24, turtles
whale, blue, sings, tiny shrimps, in the sea, 0, calf, swim, 99, whales""".splitlines()
]
FLYERS = ("bee", "owl", "crow", "duck")
SWIMMERS = ("duck", "frog", "fish", "penguin", "turtle", "whale", "dog", "bear")
HEROES = _words(
    """
    fox rabbit bear mouse hedgehog squirrel owl duck frog cat dog penguin deer wolf goat pig lion monkey turtle
    crow hen elephant
    """
)

COLOURS = _words("red blue green yellow white black brown orange purple pink grey golden silver")
COLOUR_OF = {
    "sky": "blue", "grass": "green", "snow": "white", "sun": "yellow", "blood": "red", "milk": "white",
    "coal": "black", "banana": "yellow", "lemon": "yellow", "carrot": "orange", "tomato": "red",
    "strawberry": "red", "chocolate": "brown", "night sky": "black", "leaf": "green", "frog": "green",
    "sea": "blue", "pumpkin": "orange", "cherry": "red", "salt": "white", "pea": "green", "cucumber": "green",
    "plum": "purple", "mud": "brown", "cloud": "white", "fire engine": "red", "orange": "orange",
    "sunflower": "yellow", "polar bear": "white", "rose": "red", "moon": "white", "rain cloud": "grey",
}  # fmt: skip
OPPOSITES = _pairs(
    """
    hot-cold big-small up-down day-night happy-sad fast-slow wet-dry old-young open-closed light-dark full-empty
    hard-soft loud-quiet left-right high-low long-short in-out early-late near-far clean-dirty rich-poor
    strong-weak good-bad black-white first-last thick-thin wide-narrow heavy-light brave-afraid awake-asleep
    above-below true-false summer-winter yes-no sweet-sour
    """
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
SEASONS = _words("spring summer autumn winter")
NUMBERS = _words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty
    """
)
CAPITALS = _pairs(
    """
    France-Paris Italy-Rome Spain-Madrid Germany-Berlin England-London Japan-Tokyo Egypt-Cairo Greece-Athens
    Norway-Oslo Sweden-Stockholm Poland-Warsaw Austria-Vienna Portugal-Lisbon Ireland-Dublin Russia-Moscow
    China-Beijing Peru-Lima Cuba-Havana Kenya-Nairobi Canada-Ottawa Finland-Helsinki Denmark-Copenhagen
    Hungary-Budapest Belgium-Brussels
    """
)
MEMBERS = {
    "fruit": ("apple", "banana", "pear", "plum", "cherry", "orange", "lemon", "grape", "strawberry", "peach"),
    "vegetable": ("carrot", "potato", "cabbage", "onion", "pea", "cucumber", "pumpkin", "bean"),
    "animal": ("dog", "cat", "cow", "horse", "fox", "bear", "lion", "rabbit", "mouse", "elephant"),
    "bird": ("owl", "duck", "crow", "hen", "penguin", "robin", "eagle"),
    "colour": ("red", "blue", "green", "yellow", "white", "black", "orange"),
    "tool": ("hammer", "saw", "spade", "rake", "brush"),
    "drink": ("water", "milk", "tea", "juice", "lemonade"),
    "toy": ("ball", "kite", "doll", "puzzle", "drum"),
    "flower": ("rose", "daisy", "tulip", "sunflower", "violet"),
}
USES = {
    "a spoon": "eat soup", "a knife": "cut bread", "an umbrella": "stay dry in the rain",
    "a pencil": "draw and write", "a bed": "sleep", "a lamp": "see in the dark", "a boat": "travel on water",
    "a clock": "tell the time", "a book": "read", "a bucket": "carry water", "a hammer": "hit nails",
    "a broom": "sweep the floor", "a key": "open a door", "a cup": "drink tea", "a map": "find the way",
    "soap": "wash our hands", "a bridge": "cross the river", "an oven": "bake bread", "a coat": "keep warm",
    "a spade": "dig in the garden",
}  # fmt: skip
WHY = {
    "do we sleep": "We sleep because our bodies need rest.",
    "do we eat": "We eat because food gives us energy.",
    "does it get dark at night": "It gets dark at night because the sun goes down.",
    "do plants need water": "Plants need water because it helps them to grow.",
    "do birds build nests": "Birds build nests because they need a safe place for their eggs.",
    "do we wear coats in winter": "We wear coats in winter because it is cold.",
    "does ice melt": "Ice melts because it gets warm.",
    "do bees visit flowers": "Bees visit flowers because they look for nectar.",
    "do we wash our hands": "We wash our hands because it keeps us clean and healthy.",
    "do we need friends": "We need friends because it is good to share joy and trouble.",
    "do leaves fall in autumn": "Leaves fall in autumn because the trees get ready for winter.",
    "do cats purr": "Cats purr because they feel safe and happy.",
    "do we use an umbrella": "We use an umbrella because it keeps us dry in the rain.",
    "do dogs bark": "Dogs bark because they want to tell us something.",
}
WHAT_IS = {
    "a river": "A river is a long stream of water that flows to the sea.",
    "a farm": "A farm is a place where people grow food and keep animals.",
    "a school": "A school is a place where children learn.",
    "a library": "A library is a place where you can read and borrow books.",
    "the moon": "The moon is a round, bright thing that shines in the night sky.",
    "the sun": "The sun is a very hot star that gives us light and warmth.",
    "rain": "Rain is water that falls from the clouds.",
    "snow": "Snow is frozen water that falls from the clouds in winter.",
    "ice": "Ice is water that has frozen.",
    "a friend": "A friend is someone who likes you and helps you.",
    "a forest": "A forest is a place with many trees.",
    "the sea": "The sea is a very large body of salt water.",
    "a mountain": "A mountain is a very high hill of rock.",
    "a garden": "A garden is a place where flowers and vegetables grow.",
    "honey": "Honey is a sweet food that bees make from nectar.",
    "a rainbow": "A rainbow is a band of many colours in the sky after the rain.",
    "a baker": "A baker is a person who bakes bread and cakes.",
    "a doctor": "A doctor is a person who helps sick people.",
    "a farmer": "A farmer is a person who grows food and keeps animals.",
    "a teacher": "A teacher is a person who helps children to learn.",
    "a mill": "A mill is a place where grain is made into flour.",
    "a watermill": "A watermill is a mill whose wheel is turned by water.",
    "a mill race": "A mill race is the fast stream of water that turns the wheel of a mill.",
    "bread": "Bread is a food made from flour and water.",
}
UNKNOWN = _phrases(
    """
    quantum physics | the stock market | the president | machine learning | the Roman Empire | calculus | the best
    phone | football scores | politics | computer programming | Python code | the internet | chemistry | the
    Second World War | black holes | DNA | the latest news | bitcoin | tax law | Shakespeare | the theory of
    relativity | car engines | the Olympic Games | electricity | the brain | philosophy | space rockets | medicine
    | airplanes | dinosaurs | the weather tomorrow | the meaning of life | Napoleon | JavaScript | the human heart
    | volcanoes | movies | video games
    """
)

PLACES = _phrases(
    """
    village | small town | forest | big city | farm | valley | quiet harbour | mountain village | cottage by the
    sea | house near the river | old mill | house on a hill | green meadow | little island | castle | village by a
    lake | house at the edge of the woods | street full of trees | tall house with a red roof | cabin in the snow
    """
)
OUTDOORS = _phrases(
    """
    park | forest | beach | meadow | garden | market | river | hill | pond | orchard | field | woods | lake | old
    bridge | playground | barn | harbour | well
    """
)
TOYS = _words(
    """
    ball kite doll drum puzzle scarf hat book boat whistle lantern basket ring bell blanket mitten coin cup
    """
)
TREASURES = _phrases(
    """
    little key | wooden box | smooth stone | bottle with a letter in it | shell | silver bell | tiny door | map |
    feather | glass marble | old lamp | egg
    """
)
FOODS = _words("soup bread pancakes cookies pie porridge jam cake salad muffins")
INGREDIENTS = _words("flour sugar milk butter eggs apples honey salt nuts berries carrots cheese")
FLOWERS = _phrases("sunflower | rose | tulip | pumpkin | bean | apple tree | daisy | strawberry plant")
TRAITS = _words(
    """
    little kind brave clever shy cheerful curious quiet busy gentle young funny careful lively patient small
    """
)
FEELINGS = _words("happy sad excited worried proud tired surprised afraid lonely angry calm hungry")
