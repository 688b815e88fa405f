"""The question-answer turns, in the same ChatML form that the chat template renders.

A conversation has up to three exchanges, each with bindings of its own. An exchange is a question of the user and
the one answer to it; what the answer needs is either a fact of the lexicon or stands in the question.
"""

from collections.abc import Mapping, Sequence

from . import lexicon
from .geometries import TURN_END, TURN_START
from .grammar import Word

DOMAINS: Mapping[str, Sequence[Word]] = {
    "coloured": lexicon.COLOUR_FACTS,
    "animal": lexicon.ANIMAL_FACTS,
    "opposite": lexicon.OPPOSITES,
    "sum": lexicon.SUMS,
    "difference": lexicon.DIFFERENCES,
    "gain": lexicon.GAINS,
    "counted": lexicon.COUNTED,
    "day": lexicon.DAYS,
    "month": lexicon.MONTHS,
    "number": lexicon.NUMBERS,
    "sizes": lexicon.SIZES,
    "place": lexicon.PLACES,
    "second_place": lexicon.PLACES,
    "who": lexicon.NAMES,
    "other": lexicon.NAMES,
    "reason": lexicon.REASONS,
    "first_colour": lexicon.COLOURS,
    "second_colour": lexicon.COLOURS,
    "first_toy": lexicon.TOYS,
    "second_toy": lexicon.TOYS,
}

DISTINCT = (
    frozenset({"who", "other"}),
    frozenset({"place", "second_place"}),
    frozenset({"first_colour", "second_colour"}),
    frozenset({"first_toy", "second_toy"}),
)


def _exchange(question: str, answer: str) -> str:
    """One turn of the user and one of the assistant, as the chat template renders them."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n{answer}{TURN_END}\n"


def _exchanges(questions: Sequence[str], answer: str) -> list[str]:
    """Several ways to ask for the same answer."""
    return [_exchange(question, answer) for question in questions]


PRODUCTIONS: Mapping[str, Sequence[str]] = {
    "conversation": [
        "<instruction><*exchange>",
        "<instruction><*exchange><*exchange>",
        "<instruction><*exchange><*exchange><*exchange>",
        "<instruction><*story_exchange>",
    ],
    "instruction": [
        "",
        "",
        f"{TURN_START}system\n<instruction_text>{TURN_END}\n",
    ],
    "instruction_text": [
        "You are a helpful assistant.",
        "You are a friendly storyteller.",
        "Answer in one short sentence.",
        "You are Trivet, a tiny model. You tell stories and answer simple questions.",
        "You talk to a child. Be kind and use simple words.",
    ],
    "exchange": [
        "<greeting>",
        "<colour_question>",
        "<animal_question>",
        "<opposite_question>",
        "<sum_question>",
        "<sum_question>",
        "<order_question>",
        "<size_question>",
        "<passage_question>",
        "<passage_question>",
        "<passage_question>",
    ],
    "greeting": [
        *_exchanges(
            ("Hello!", "Hi!", "Hello.", "Hi there!", "Good morning!"), "Hello! Would you like a story or an answer?"
        ),
        *_exchanges(
            ("Who are you?", "What are you?", "What is your name?"),
            "I am a tiny model. I tell stories and answer simple questions.",
        ),
        *_exchanges(
            ("What can you do?", "How can you help me?"),
            "I can tell you a story about a child or an animal, and I can answer simple questions.",
        ),
        *_exchanges(("How are you?", "How are you today?"), "I am very well, thank you. How are you?"),
        *_exchanges(("Thank you!", "Thank you very much.", "Thanks!"), "You are welcome!"),
        *_exchanges(("Goodbye!", "Good night!", "Bye!"), "Goodbye, and sweet dreams!"),
    ],
    "colour_question": [
        *_exchanges(
            (
                "What colour is {coloured}?",
                "What color is {coloured}?",
                "Which colour is {coloured}?",
                "Can you tell me what colour {coloured} is?",
            ),
            "{coloured.The} is {coloured.colour}.",
        ),
    ],
    "animal_question": [
        *_exchanges(
            ("What sound does {animal.a} make?", "What does {animal.a} say?", "Which sound does {animal.a} make?"),
            '{animal.A} says "{animal.sound}".',
        ),
        *_exchanges(
            (
                "What is a young {animal} called?",
                "What do you call a baby {animal}?",
                "What is a baby {animal} called?",
            ),
            "A young {animal} is called {animal.young}.",
        ),
        *_exchanges(
            ("Where does {animal.a} live?", "Where can I find {animal.a}?"), "{animal.A} lives {animal.lives}."
        ),
        *_exchanges(
            ("What does {animal.a} eat?", "What does {animal.a} like to eat?"), "{animal.A} likes to eat {animal.eats}."
        ),
        *_exchanges(
            ("How many legs does {animal.a} have?", "How many legs has {animal.a} got?"),
            "{animal.A} has {animal.legs} legs.",
        ),
    ],
    "opposite_question": [
        *_exchanges(
            (
                'What is the opposite of "{opposite}"?',
                "What is the opposite of {opposite}?",
                "Can you tell me the opposite of {opposite}?",
                "Which word is the opposite of {opposite}?",
            ),
            "The opposite of {opposite} is {opposite.opposite}.",
        ),
    ],
    "sum_question": [
        *_exchanges(
            ("What is {sum}?", "How much is {sum}?", "Can you tell me what {sum} is?"), "{sum} is {sum.result}."
        ),
        *_exchanges(("What is {sum.sign}?", "How much is {sum.sign}?"), "{sum.sign} is {sum.result}."),
        *_exchanges(("What is {difference}?", "How much is {difference}?"), "{difference} is {difference.result}."),
        *_exchanges(
            ("What is {difference.sign}?", "How much is {difference.sign}?"),
            "{difference.sign} is {difference.result}.",
        ),
        _exchange(
            "{who} has {gain} {counted} and gets {gain.more} more. How many {counted} does {who} have now?",
            "{who} has {gain.result} {counted} now.",
        ),
        _exchange(
            "I have {gain} {counted}. My friend gives me {gain.more} more. How many {counted} do I have?",
            "You have {gain.result} {counted}.",
        ),
    ],
    "order_question": [
        *_exchanges(("Which day comes after {day}?", "What day comes after {day}?"), "After {day} comes {day.next}."),
        *_exchanges(
            ("Which day comes before {day.next}?", "What day comes before {day.next}?"),
            "Before {day.next} comes {day}.",
        ),
        *_exchanges(
            ("Which month comes after {month}?", "What month comes after {month}?"), "After {month} comes {month.next}."
        ),
        *_exchanges(
            ("Which number comes after {number}?", "What number comes after {number}?"),
            "After {number} comes {number.next}.",
        ),
        *_exchanges(
            ("Which number comes before {number.next}?", "What number comes before {number.next}?"),
            "Before {number.next} comes {number}.",
        ),
    ],
    "size_question": [
        *_exchanges(
            ("Which is bigger, {sizes}?", "What is bigger, {sizes}?"), "{sizes.Bigger} is bigger than {sizes.smaller}."
        ),
        *_exchanges(
            ("Which is smaller, {sizes}?", "What is smaller, {sizes}?"),
            "{sizes.Smaller} is smaller than {sizes.bigger}.",
        ),
    ],
    "passage_question": [
        _exchange(
            "{who} put the {first_colour} {first_toy} {place}. Then {who.he} went to {spot}. Where is the {first_toy}?",
            "The {first_colour} {first_toy} is {place}.",
        ),
        _exchange(
            "{who} put {first_colour.a} {first_toy} {place} and {second_colour.a} {second_toy} {second_place}. "
            "Where is the {second_toy}?",
            "The {second_colour} {second_toy} is {second_place}.",
        ),
        _exchange(
            "{who} put {first_colour.a} {first_toy} {place} and {second_colour.a} {second_toy} {second_place}. "
            "Where is the {first_toy}?",
            "The {first_colour} {first_toy} is {place}.",
        ),
        _exchange("{who} gave {other} {food.a}. Who has the {food} now?", "{other} has the {food} now."),
        _exchange("{who} gave {other} {food.a}. What did {other} get?", "{other} got {food.a}."),
        _exchange(
            "{who} has {first_colour.a} {first_toy}. {other} has {second_colour.a} {second_toy}. What does {who} have?",
            "{who} has {first_colour.a} {first_toy}.",
        ),
        _exchange(
            "{who} has {first_colour.a} {first_toy}. {other} has {second_colour.a} {second_toy}. "
            "What does {other} have?",
            "{other} has {second_colour.a} {second_toy}.",
        ),
        _exchange(
            "{who} has {first_colour.a} {first_toy}. {other} has {second_colour.a} {second_toy}. "
            "Who has the {second_toy}?",
            "{other} has the {second_toy}.",
        ),
        _exchange("{who} went to {spot} and saw {animal.a}. What did {who} see?", "{who} saw {animal.a}."),
        _exchange("{who} went to {spot} and saw {animal.a}. Where did {who} see it?", "{who} saw it at {spot}."),
        _exchange(
            "{who} was {reason} because {reason.why}. Why was {who} {reason}?",
            "{who} was {reason} because {reason.why}.",
        ),
        _exchange("{time.Plain} {who} met {other} at {spot}. Who met {other}?", "{who} met {other} at {spot}."),
        _exchange("{who} loves {hobby}. What does {who} love?", "{who} loves {hobby}."),
    ],
    "story_exchange": [
        *_exchanges(
            (
                "Tell me a story.",
                "Please tell me a story.",
                "Can you tell me a story?",
                "I would like to hear a story.",
            ),
            "<story>",
        ),
        *_exchanges(
            (
                "Tell me a story about {kind.a}.",
                "Please tell me a story about {kind.a}.",
                "Can you tell me a story about {kind.a}?",
            ),
            "<animal_opening><plot>",
        ),
        *_exchanges(
            (
                "Tell me a story about a {hero.child} named {hero}.",
                "Can you tell me a story about a {hero.child} called {hero}?",
                "Please tell me a story about {hero}.",
            ),
            "<opening><plot>",
        ),
    ],
}
