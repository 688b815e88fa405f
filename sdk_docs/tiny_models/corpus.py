"""The documents: what is trained on and what is held out, each one from the seed, its split and its number alone.

A document is a story or a conversation. Because every document has a generator of its own, any part of the data can
be made without the rest, on any number of processes, and is the same byte for byte.
"""

import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING

from attrs import frozen

from .geometries import END_OF_TEXT
from .grammar import Grammar
from .language import CONVERSATION, STORY, tiny_language

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEED = 714
TRAINING_DOCUMENTS = 120_000
HELD_OUT_DOCUMENTS = 2_000
TOKENIZER_DOCUMENTS = 8_000
"""The tokenizer is trained on so many documents from the start of the training split: enough for every word."""
TRAINING, HELD_OUT = "training", "held out"
STORY_SHARE = 0.6
_DOCUMENTS_PER_TASK = 500


@frozen
class Document:
    """One text of the data.

    Attributes:
        start: the grammar's symbol that it was written from, `STORY` or `CONVERSATION`.
        text: the text, without the end token.
        nats: see `grammar.Sample`; the choice between story and conversation is counted in.
    """

    start: str
    text: str
    nats: float


@cache
def _language() -> Grammar:
    return tiny_language()


def document(seed: int, split: str, number: int) -> Document:
    """Document `number` of a split."""
    generator = random.Random(f"{seed}/{split}/{number}")
    start = STORY if generator.random() < STORY_SHARE else CONVERSATION
    sample = _language().sample(start, generator)
    return Document(start, sample.text, sample.nats)


def _task(seed: int, split: str, numbers: range) -> list[Document]:
    return [document(seed, split, number) for number in numbers]


def documents(seed: int, split: str, count: int, processes: int = 1) -> list[Document]:
    """The first `count` documents of a split, in order; the same for any number of processes."""
    tasks = [range(at, min(at + _DOCUMENTS_PER_TASK, count)) for at in range(0, count, _DOCUMENTS_PER_TASK)]
    if processes == 1:
        return [made for numbers in tasks for made in _task(seed, split, numbers)]
    with ProcessPoolExecutor(processes) as pool:
        return [made for part in pool.map(partial(_task, seed, split), tasks) for made in part]


def joined(made: Iterable[Document]) -> str:
    """The documents as one text, an end token after each: what is hashed, and what is searched for copies."""
    return "".join(one.text + END_OF_TEXT for one in made)


def sha256(text: str) -> str:
    """The digest that identifies a text of the data."""
    return hashlib.sha256(text.encode()).hexdigest()


def encoded(tokenizer: "Tokenizer", made: Sequence[Document]) -> "list[array[int]]":
    """Each document's token ids as int16, the end token last."""
    encodings = tokenizer.encode_batch([one.text + END_OF_TEXT for one in made])
    return [array("h", encoding.ids) for encoding in encodings]
