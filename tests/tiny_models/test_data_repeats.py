"""The data and the tokenizer of the tiny models come from the seed, byte for byte."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sdk_docs.tiny_models import corpus
from sdk_docs.tiny_models.evaluate import RESULTS, held_out_prompts
from sdk_docs.tiny_models.geometries import MODEL_NAMES
from sdk_docs.tiny_models.tokenizer import train_tokenizer

MODELS = Path(__file__).parents[2] / "core" / "trivet" / "models"


@given(count=st.integers(1, 40), number=st.integers(0, 39))
@settings(max_examples=10, deadline=None)
def test_a_document_depends_on_its_number_alone(count: int, number: int) -> None:
    made = corpus.documents(corpus.SEED, corpus.TRAINING, count)
    assert len(made) == count
    if number < count:
        assert made[number] == corpus.document(corpus.SEED, corpus.TRAINING, number)


def test_two_processes_make_what_one_makes() -> None:
    count = 1200  # three tasks
    alone = corpus.documents(corpus.SEED, corpus.TRAINING, count, processes=1)
    assert corpus.documents(corpus.SEED, corpus.TRAINING, count, processes=2) == alone


def test_seed_and_split_change_every_document() -> None:
    first = corpus.documents(corpus.SEED, corpus.TRAINING, 20)
    for seed, split in ((corpus.SEED + 1, corpus.TRAINING), (corpus.SEED, corpus.HELD_OUT)):
        others = corpus.documents(seed, split, 20)
        assert all(one.text != other.text for one, other in zip(first, others, strict=True))


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_the_shipped_tokenizer_is_the_one_that_the_seed_gives(model: str) -> None:
    made = corpus.documents(corpus.SEED, corpus.TRAINING, corpus.TOKENIZER_DOCUMENTS)
    trained = train_tokenizer(document.text for document in made)
    assert (MODELS / model / "tokenizer.json").read_text(encoding="utf-8") == trained.to_str(pretty=True)
    assert corpus.sha256(trained.to_str()) == json.loads(RESULTS.read_text())[model]["tokenizer_sha256"]


def test_held_out_prompts_are_absent_from_the_text_that_they_are_held_out_from() -> None:
    text = corpus.joined(corpus.documents(corpus.SEED, corpus.TRAINING, 300))
    first = held_out_prompts(corpus.SEED, text, 5)
    assert not any(prompt in text for prompt in first)
    assert first[0] not in held_out_prompts(corpus.SEED, text + first[0], 5)
