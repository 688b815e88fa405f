"""The words of the stories and of the turns, with the forms that keep them in agreement.

A child word carries its pronouns; a thing carries its article. Words that only make sense together (an animal and
its sound, a place and what helps to reach it) are one entry with several forms, so that no combination is odd.
"""

from collections.abc import Iterable
from itertools import pairwise

from .grammar import PLAIN, Word


def article(noun: str) -> str:
    """`noun` with the indefinite article that its first sound asks for."""
    vowel = noun[0] in "aeiou" or noun.startswith("honest")
    return f"{'an' if vowel else 'a'} {noun}"


def capital(text: str) -> str:
    """`text` with a capital first letter, the rest untouched."""
    return text[:1].upper() + text[1:]


def nouns(*names: str) -> tuple[Word, ...]:
    """Words with their articles: ``plain``, ``a``, ``A``, ``the``, ``The``."""
    return tuple(noun(name) for name in names)


def noun(name: str, **forms: str) -> Word:
    """One word with its articles and whatever other forms belong to it."""
    return Word(
        {
            PLAIN: name,
            "Plain": capital(name),
            "a": article(name),
            "A": capital(article(name)),
            "the": f"the {name}",
            "The": f"The {name}",
            **forms,
        }
    )


def phrases(*texts: str) -> tuple[Word, ...]:
    """Texts that take one form, and the same with a capital."""
    return tuple(Word({PLAIN: text, "Plain": capital(text)}) for text in texts)


_SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself", "child": "girl"}
_HE = {"he": "he", "him": "him", "his": "his", "himself": "himself", "child": "boy"}


def persons(names: Iterable[str], pronouns: dict[str, str]) -> tuple[Word, ...]:
    """Persons who share their pronouns: forms ``he``, ``He``, ``him``, ``his``, ``His``, ``himself``, ``child``."""
    forms = {**pronouns, **{capital(name): capital(pronouns[name]) for name in ("he", "his")}}
    return tuple(Word({PLAIN: name, "Plain": capital(name), **forms}) for name in names)


GIRLS = persons(
    (
        "Lily", "Anna", "Mia", "Rosa", "Nora", "Ella", "Sara", "Lucy", "Emma", "Ruby", "Clara", "Daisy", "Molly",
        "Grace", "Alice", "Zoe", "Ivy", "Hana", "Maya", "Tara", "Julia", "Leila", "Ada", "Wendy",
    ),
    _SHE,
)  # fmt: skip
BOYS = persons(
    (
        "Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Finn", "Oscar", "Noah", "Hugo", "Peter", "Adam", "Toby", "Omar",
        "Ravi", "Luke", "Milo", "Theo", "Felix", "Jonas", "Daniel", "Karim", "Henry", "Will",
    ),
    _HE,
)  # fmt: skip
NAMES = (*GIRLS, *BOYS)
RELATIVES = (
    *persons(("mother", "grandmother", "aunt", "big sister"), _SHE),
    *persons(("father", "grandfather", "uncle", "big brother"), _HE),
)
KINDS = nouns(
    "rabbit", "fox", "bear", "mouse", "hedgehog", "squirrel", "badger", "kitten", "puppy", "frog", "otter", "owl",
    "goat", "donkey", "lamb", "duckling",
)  # fmt: skip
TRAITS = nouns(
    "kind", "brave", "curious", "gentle", "clever", "cheerful", "shy", "quiet", "happy", "careful", "honest",
    "friendly", "patient", "playful", "helpful", "polite",
)  # fmt: skip
HOMES = nouns(
    "small village by the sea",
    "quiet town near the hills",
    "little house at the edge of the forest",
    "farmhouse beside a slow river",
    "white cottage under an old oak tree",
    "tall house near the market",
    "wooden cabin on a green hill",
    "warm house with a crooked roof",
    "sunny valley full of flowers",
    "little house beside a mill",
)
HOBBIES = phrases(
    "climbing trees",
    "singing songs",
    "drawing pictures",
    "reading books",
    "watching the birds",
    "looking at the stars",
    "picking flowers",
    "playing in the garden",
    "making up new games",
    "listening to old stories",
    "running through the long grass",
    "collecting smooth stones",
    "jumping over puddles",
    "telling jokes",
)
TIMES = phrases(
    "one sunny morning",
    "one windy afternoon",
    "one cold morning",
    "one warm evening",
    "one bright day",
    "one cloudy afternoon",
    "one quiet evening",
    "early one morning",
    "late one afternoon",
    "one fine spring day",
    "on the first day of summer",
    "one golden day in autumn",
)
COLOURS = nouns(
    "red", "blue", "green", "yellow", "white", "black", "brown", "purple", "orange", "silver", "pink", "grey",
)  # fmt: skip
TOYS = nouns(
    "kite", "ball", "doll", "drum", "boat", "wooden horse", "train", "whistle", "teddy bear", "spinning top",
    "puppet", "trumpet", "bell", "lantern",
)  # fmt: skip
PLACES = phrases(
    "under the bed",
    "behind the door",
    "in the garden",
    "under the table",
    "behind the old tree",
    "in the kitchen",
    "beside the well",
    "near the pond",
    "in the tall grass",
    "under the bridge",
    "in the barn",
    "behind the fence",
    "on the stairs",
    "next to the gate",
)
YARDS = phrases(
    "behind the old tree",
    "beside the well",
    "near the pond",
    "in the tall grass",
    "under the bridge",
    "behind the barn",
    "behind the fence",
    "next to the gate",
    "in the garden",
    "at the edge of the forest",
)


def _routes(places: tuple[Word, ...], strides: tuple[int, ...]) -> tuple[Word, ...]:
    """Three different places to go to in turn: forms ``plain``, ``second`` and ``last``."""
    return tuple(
        Word(
            {
                PLAIN: place.plain,
                "second": places[(at + stride) % len(places)].plain,
                "last": places[(at + 2 * stride) % len(places)].plain,
            }
        )
        for at, place in enumerate(places)
        for stride in strides
    )


SEARCHES = _routes(PLACES, (3, 5))
TRAILS = _routes(YARDS, (3, 4))
FOODS = nouns(
    "apple", "pear", "slice of bread", "piece of cake", "sandwich", "cookie", "bun", "plum", "orange", "peach",
    "pancake", "muffin",
)  # fmt: skip
SPOTS = phrases(
    "the market", "the river", "the forest", "the beach", "the school", "the park", "the lake", "the mill", "the farm",
    "the bakery",
)  # fmt: skip

RESCUES = (
    noun("kitten", trapped="high up in a tall tree", cry="Meow", tool="a long ladder",
         deed="climbed up and carried the kitten down"),
    noun("lamb", trapped="deep inside a thorny bush", cry="Baa", tool="a pair of thick gloves",
         deed="pulled the branches apart and lifted the lamb out"),
    noun("duckling", trapped="at the bottom of a deep ditch", cry="Peep", tool="a basket on a rope",
         deed="let the basket down and pulled the duckling up"),
    noun("puppy", trapped="in a dry old well", cry="Woof", tool="a bucket and a strong rope",
         deed="let the bucket down and pulled the puppy up"),
    noun("bird", trapped="in an old fishing net", cry="Tweet", tool="a small pair of scissors",
         deed="cut the net with great care and set the bird free"),
    noun("hedgehog", trapped="under a heavy stone", cry="Squeak", tool="a strong stick",
         deed="raised the stone with it until the hedgehog could crawl out"),
    noun("pony", trapped="in the deep mud", cry="Neigh", tool="a thick rope",
         deed="pulled and pulled until the pony stood on dry ground"),
    noun("goat", trapped="on a small island in the stream", cry="Bleat", tool="a wide plank",
         deed="laid the plank over the water so that the goat could walk across"),
    noun("squirrel", trapped="behind a locked gate", cry="Squeak", tool="an old key",
         deed="turned the key and opened the gate wide"),
    noun("piglet", trapped="between two boards of the fence", cry="Oink", tool="a hammer",
         deed="loosened one of the boards and let the piglet out"),
)  # fmt: skip
YOUNG_ANIMALS = (
    noun("duckling", mother="duck", mother_a="a duck", home="the pond", sound="Quack"),
    noun("lamb", mother="sheep", mother_a="a sheep", home="the green field", sound="Baa"),
    noun("calf", mother="cow", mother_a="a cow", home="the barn", sound="Moo"),
    noun("chick", mother="hen", mother_a="a hen", home="the hen house", sound="Peep"),
    noun("foal", mother="horse", mother_a="a horse", home="the stable", sound="Neigh"),
    noun("piglet", mother="pig", mother_a="a pig", home="the muddy yard", sound="Oink"),
    noun("kitten", mother="cat", mother_a="a cat", home="the bakery", sound="Meow"),
    noun("gosling", mother="goose", mother_a="a goose", home="the lake", sound="Honk"),
)
GIFTS = (
    noun("apple pie", needs="apples", seller="the farmer", maker="baked"),
    noun("honey cake", needs="honey", seller="the old beekeeper", maker="baked"),
    noun("loaf of warm bread", needs="flour", seller="the miller", maker="baked"),
    noun("pot of berry jam", needs="berries", seller="the woman in the forest", maker="cooked"),
    noun("crown of flowers", needs="flowers", seller="the gardener", maker="made"),
    noun("paper lantern", needs="paper", seller="the teacher", maker="made"),
    noun("pair of soft socks", needs="wool", seller="the shepherd", maker="made"),
    noun("little wooden box", needs="nails", seller="the carpenter", maker="made"),
    noun("pot of hot soup", needs="carrots", seller="the man at the market", maker="cooked"),
)
NOISES = (
    noun("tapping", where="at the window", cause="a branch that moved in the wind"),
    noun("scratching", where="at the door", cause="a small cat that wanted to come in"),
    noun("humming", where="in the kitchen", cause="the kettle on the warm stove"),
    noun("rustling", where="under the bed", cause="a tiny mouse with a piece of paper"),
    noun("knocking", where="on the roof", cause="a bird that was building its nest"),
    noun("splashing", where="behind the house", cause="a duck in the rain barrel"),
    noun("creaking", where="on the stairs", cause="the old wood that grew cold in the night"),
    noun("whistling", where="in the chimney", cause="the wind and nothing else"),
)
PLANTS = (
    noun("sunflower", grown="taller than the fence", use="All the birds came to eat its seeds."),
    noun("pumpkin", grown="bigger than a chair", use="There was enough soup for the whole street."),
    noun("bean", grown="up to the roof", use="There were beans for many dinners."),
    noun("tomato", grown="round and red", use="The tomatoes tasted sweet and warm."),
    noun("strawberry", grown="red and sweet", use="Every friend got a small bowl of strawberries."),
    noun("rose", grown="as red as the evening sky", use="The whole garden smelled of roses."),
    noun("apple tree", grown="strong and green", use="Years later it gave shade and sweet apples."),
    noun("carrot", grown="long and orange", use="Even the rabbits got a carrot."),
)
SKILLS = (
    noun("swim", doing="swimming", fails="swallowed a lot of water", done="swam across the whole pond"),
    noun("ride a bicycle", doing="riding", fails="fell into the soft grass", done="rode all the way to the bridge"),
    noun("play the flute", doing="playing", fails="made a terrible noise", done="played a whole song"),
    noun("skate on the ice", doing="skating", fails="sat down on the hard ice", done="skated around the lake"),
    noun("row a boat", doing="rowing", fails="went around in circles", done="rowed to the other shore"),
    noun("paint a horse", doing="painting", fails="painted something like a potato",
         done="painted a fine brown horse"),
    noun("bake bread", doing="baking", fails="burned the crust black", done="baked a golden loaf"),
    noun("whistle", doing="whistling", fails="blew nothing but air", done="whistled like a blackbird"),
    noun("dance", doing="dancing", fails="stepped on many toes", done="danced the whole evening"),
    noun("climb the rope", doing="climbing", fails="slid down again", done="climbed to the very top"),
)  # fmt: skip
FINDS = nouns(
    "purse full of coins", "silver ring", "golden key", "pair of glasses", "small brown book", "pocket watch",
    "letter with a red stamp", "pearl necklace",
)  # fmt: skip
OWNERS = (
    *persons(("old baker", "farmer", "shoemaker", "fisherman", "postman"), _HE),
    *persons(("gardener", "teacher", "doctor", "old lady from the corner", "painter"), _SHE),
)
MENDS = phrases(
    "glue and a piece of string",
    "a needle and some thread",
    "a small hammer and two nails",
    "some paint and a new ribbon",
    "a bit of wire and a lot of patience",
    "tape and strong paper",
)
OBSTACLES = (
    noun("wide stream", help="a fallen tree", deed="walked over the fallen tree like a bridge"),
    noun("high wall", help="an old barrel", deed="rolled the barrel to the wall and climbed over"),
    noun("thick hedge", help="a small hole near the ground", deed="crawled through the hole on hands and knees"),
    noun("dark tunnel", help="a lamp on a hook", deed="lit the lamp and walked through without fear"),
    noun("muddy path", help="a row of flat stones", deed="jumped from stone to stone"),
    noun("steep hill", help="a path that went around it", deed="followed the path around the hill"),
    noun("broken bridge", help="three long boards", deed="laid the boards across and went over one by one"),
)
GAMES = (
    noun("tent", out="blankets and chairs", game="they were explorers in the desert"),
    noun("ship", out="boxes and a bed sheet", game="they sailed to an island of gold"),
    noun("castle", out="pillows", game="they were a king and a queen"),
    noun("train", out="all the chairs of the house", game="they travelled to the cold north"),
    noun("shop", out="a table and some baskets", game="they sold apples for buttons"),
    noun("theatre", out="a curtain and two lamps", game="they acted out a story about a dragon"),
)
FEELINGS = nouns("sad", "worried", "lonely", "upset", "unhappy", "tired")


COLOUR_FACTS = tuple(
    Word({PLAIN: thing, "The": capital(thing), "colour": colour})
    for thing, colour in (
        ("the sky", "blue"), ("the grass", "green"), ("the snow", "white"), ("the sun", "yellow"),
        ("coal", "black"), ("a strawberry", "red"), ("a banana", "yellow"), ("a carrot", "orange"),
        ("milk", "white"), ("a leaf", "green"), ("a tomato", "red"), ("a lemon", "yellow"), ("a frog", "green"),
        ("a cherry", "red"), ("the night", "black"), ("a cloud", "white"), ("the sea", "blue"),
        ("chocolate", "brown"), ("a pumpkin", "orange"), ("a plum", "purple"), ("a pig", "pink"),
        ("an elephant", "grey"),
    )
)  # fmt: skip
ANIMAL_FACTS = tuple(
    noun(name, sound=sound, young=young, lives=lives, eats=eats, legs=legs)
    for name, sound, young, lives, eats, legs in (
        ("dog", "woof", "a puppy", "in a house", "bones", "four"),
        ("cat", "meow", "a kitten", "in a house", "fish", "four"),
        ("cow", "moo", "a calf", "in a barn", "grass", "four"),
        ("horse", "neigh", "a foal", "in a stable", "hay", "four"),
        ("sheep", "baa", "a lamb", "in a field", "grass", "four"),
        ("duck", "quack", "a duckling", "on a pond", "seeds", "two"),
        ("pig", "oink", "a piglet", "on a farm", "corn", "four"),
        ("lion", "roar", "a cub", "on the wide plain", "meat", "four"),
        ("frog", "croak", "a tadpole", "in a pond", "flies", "four"),
        ("hen", "cluck", "a chick", "in a hen house", "corn", "two"),
        ("bear", "growl", "a cub", "in a cave", "honey", "four"),
        ("owl", "hoot", "an owlet", "in a tree", "mice", "two"),
        ("mouse", "squeak", "a pup", "in a hole", "cheese", "four"),
        ("goat", "bleat", "a kid", "on a hill", "leaves", "four"),
        ("goose", "honk", "a gosling", "by a lake", "grass", "two"),
        ("wolf", "howl", "a pup", "in the forest", "meat", "four"),
    )
)
_OPPOSITES = (
    "hot cold", "big small", "up down", "day night", "happy sad", "fast slow", "open closed", "hard soft",
    "light dark", "wet dry", "old young", "high low", "full empty", "early late", "loud quiet", "long short",
    "left right", "near far", "strong weak", "clean dirty", "good bad", "inside outside", "first last", "sweet sour",
)  # fmt: skip
OPPOSITES = tuple(
    Word({PLAIN: one, "opposite": other}) for pair in _OPPOSITES for one, other in (pair.split(), pair.split()[::-1])
)
SUMS = tuple(
    Word({PLAIN: f"{left} plus {right}", "sign": f"{left} + {right}", "left": str(left), "right": str(right),
          "result": str(left + right)})
    for left in range(11)
    for right in range(11)
)  # fmt: skip
DIFFERENCES = tuple(
    Word({PLAIN: f"{left} minus {right}", "sign": f"{left} - {right}", "result": str(left - right)})
    for left in range(11)
    for right in range(left + 1)
)
GAINS = tuple(
    Word({PLAIN: str(left), "more": str(right), "result": str(left + right)})
    for left in range(2, 11)
    for right in range(1, 11)
)
COUNTED = phrases("apples", "coins", "stones", "balls", "books", "flowers", "eggs", "buttons", "pears", "shells")


def _successions(*names: str) -> tuple[Word, ...]:
    """Each name but the last with the one that follows it."""
    return tuple(Word({PLAIN: name, "next": later}) for name, later in pairwise(names))


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
DAYS = _successions(*_DAYS, _DAYS[0])
MONTHS = _successions(*_MONTHS, _MONTHS[0])
NUMBERS = _successions(*(str(number) for number in range(21)))
_BY_SIZE = ("ant", "bee", "mouse", "frog", "rabbit", "cat", "dog", "sheep", "pig", "cow", "horse", "elephant", "whale")
SIZES = tuple(
    Word({PLAIN: f"{article(one)} or {article(other)}", "Bigger": capital(article(max(one, other, key=_BY_SIZE.index))),
          "bigger": article(max(one, other, key=_BY_SIZE.index)),
          "Smaller": capital(article(min(one, other, key=_BY_SIZE.index))),
          "smaller": article(min(one, other, key=_BY_SIZE.index))})
    for one in _BY_SIZE
    for other in _BY_SIZE
    if one != other
)  # fmt: skip
REASONS = (
    Word({PLAIN: "sad", "why": "it was raining"}),
    Word({PLAIN: "happy", "why": "it was a holiday"}),
    Word({PLAIN: "tired", "why": "the walk was long"}),
    Word({PLAIN: "hungry", "why": "there was no breakfast"}),
    Word({PLAIN: "cold", "why": "the window was open"}),
    Word({PLAIN: "proud", "why": "the picture was finished"}),
    Word({PLAIN: "late", "why": "the clock was broken"}),
    Word({PLAIN: "angry", "why": "the toy was broken"}),
    Word({PLAIN: "wet", "why": "there was a puddle"}),
    Word({PLAIN: "excited", "why": "a friend came to visit"}),
)
