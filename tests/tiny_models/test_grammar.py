"""The grammar reads what it writes, and nothing whose agreement is broken."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sdk_docs.tiny_models import corpus
from sdk_docs.tiny_models.grammar import PLAIN, Grammar, Word
from sdk_docs.tiny_models.language import STORY, tiny_language

LANGUAGE = tiny_language()
NUMBERS = st.integers(10**6, 10**7)  # documents that nobody trained on


@given(number=NUMBERS)
@settings(max_examples=60, deadline=None)
def test_every_written_document_is_recognised(number: int) -> None:
    document = corpus.document(corpus.SEED, corpus.HELD_OUT, number)
    assert LANGUAGE.recognise(document.start, document.text).accepted


@given(number=NUMBERS, share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=40, deadline=None)
def test_a_text_that_breaks_off_is_a_prefix_and_not_a_whole(number: int, share: float) -> None:
    story = _story(number)
    begin = story[: int(len(story) * share)]
    assert LANGUAGE.recognise(STORY, begin, prefix=True).accepted
    assert not LANGUAGE.recognise(STORY, begin).accepted


@given(number=NUMBERS, share=st.floats(0, 1, exclude_max=True), inserted=st.sampled_from("#~@7"))
@settings(max_examples=40, deadline=None)
def test_a_foreign_character_is_refused_where_it_stands(number: int, share: float, inserted: str) -> None:
    story = _story(number)
    at = int(len(story) * share)
    recognition = LANGUAGE.recognise(STORY, story[:at] + inserted + story[at:])
    assert not recognition.accepted
    assert recognition.reached_characters == at


@given(number=NUMBERS, name=st.sampled_from(["Lily", "Tom"]))
@settings(max_examples=40, deadline=None)
def test_a_hero_who_changes_name_is_refused(number: int, name: str) -> None:
    story = _story(number)
    hero = next(word.plain for word in LANGUAGE.words("hero") if word.plain in story.split("\n\n")[0])
    before, found, after = story.rpartition(hero)
    assume(hero != name and found and hero in before)
    assert not LANGUAGE.recognise(STORY, before + name + after).accepted


@given(number=NUMBERS)
@settings(max_examples=40, deadline=None)
def test_a_story_out_of_order_or_without_an_end_is_refused(number: int) -> None:
    opening, middle, ending = _story(number).split("\n\n")
    assert not LANGUAGE.recognise(STORY, f"{middle}\n\n{opening}\n\n{ending}").accepted
    assert not LANGUAGE.recognise(STORY, f"{opening}\n\n{middle}").accepted


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("He was happy when he was singing songs.", "She was happy when she was singing songs."),
        ("there was a kind boy named Tom", "there was an kind boy named Tom"),
        ("there was an honest boy named Tom", "there was a honest boy named Tom"),
        ("there was a kind boy named Tom", "there was a kind girl named Tom"),
    ],
)
def test_pronoun_and_article_agree(right: str, wrong: str) -> None:
    opening = "there was an honest boy named Tom" if "honest" in right else "there was a kind boy named Tom"
    text = f"Once upon a time {opening}. He was happy when he was singing songs."
    assert right in text
    assert LANGUAGE.recognise(STORY, text, prefix=True).accepted
    assert not LANGUAGE.recognise(STORY, text.replace(right, wrong), prefix=True).accepted


def test_a_fresh_symbol_forgets_its_bindings_and_restores_those_around_it() -> None:
    domains = {"who": [Word({PLAIN: "a"}), Word({PLAIN: "b"})]}
    grammar = Grammar({"whole": ["{who}<*part>{who}"], "part": ["({who})"]}, domains)
    accepted = {text for text in ("a(a)a", "a(b)a", "a(b)b", "b(a)b") if grammar.recognise("whole", text).accepted}
    assert accepted == {"a(a)a", "a(b)a", "b(a)b"}
    written = {grammar.sample("whole", random.Random(seed)).text for seed in range(40)}
    assert written == {"a(a)a", "a(b)a", "b(a)b", "b(b)b"}


def test_variables_that_must_differ_do() -> None:
    words = [Word({PLAIN: "a"}), Word({PLAIN: "b"})]
    grammar = Grammar({"whole": ["{one}{two}"]}, {"one": words, "two": words}, [frozenset({"one", "two"})])
    assert {grammar.sample("whole", random.Random(seed)).text for seed in range(20)} == {"ab", "ba"}
    assert not grammar.recognise("whole", "aa").accepted


@pytest.mark.parametrize(
    ("production", "message"),
    [("<nowhere>", "no production"), ("{nobody}", "no domain"), ("{who.his}", "'his'")],
)
def test_a_grammar_with_a_hole_is_refused_when_it_is_made(production: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grammar({"whole": [production]}, {"who": [Word({PLAIN: "a"})]})


def _story(number: int) -> str:
    return LANGUAGE.sample(STORY, random.Random(number)).text
