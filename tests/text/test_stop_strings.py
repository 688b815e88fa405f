"""Stop strings end the text where they begin; what only looks like one is released."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.text import StreamDecoder, Tokenizer
from trivet.text.stops import StopScanner

letters = st.text(alphabet="ab😀", max_size=14)
stop_strings = st.lists(st.text(alphabet="ab😀", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> str:
    """`text` up to where the first of the stop strings in it begins."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


@given(st.lists(letters, max_size=8), stop_strings)
@settings(max_examples=400, deadline=None)
def test_text_is_cut_where_the_first_complete_stop_string_begins(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    streamed, so_far = "", ""
    for piece in pieces:
        streamed += scanner.feed(piece)
        so_far += piece
        met = [stop for stop in stops if stop in so_far]
        assert (scanner.stop is not None) == bool(met), "a stop string ends the request as soon as it is complete"
        if met:
            break
        # Nothing is held back that cannot become a stop string, and all that can is.
        held = so_far[len(streamed) :]
        tails = [so_far[place:] for place in range(len(so_far)) if any(s.startswith(so_far[place:]) for s in stops)]
        assert held == max(tails, key=len, default="")
    streamed += scanner.flush()
    assert streamed == cut(so_far, stops)
    if scanner.stop is not None:
        place = len(streamed)
        assert scanner.stop == max((stop for stop in stops if so_far.startswith(stop, place)), key=len)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "metaspace"])
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_streamed_text_is_the_decoding_cut_at_the_stop(all_tokenizers, kind: str, data: st.DataObject) -> None:
    tokenizer: Tokenizer = all_tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=30))
    whole = tokenizer.decode(ids)
    # No U+FFFD in a stop string: at the end of a token it may still become a character, so that a stop which ends
    # before it is complete first, though one with it would begin further to the left.
    alphabet = whole.replace("\ufffd", "") or "a"
    stops = data.draw(st.lists(st.text(alphabet=alphabet, min_size=1, max_size=4), max_size=3))
    decoder = StreamDecoder(tokenizer, tuple(stops))
    streamed, taken = "", []
    for token_id in ids:
        streamed += decoder.push(token_id)
        taken.append(token_id)
        if decoder.stopped:
            break
    streamed += decoder.finish()
    assert streamed == cut(tokenizer.decode(taken), stops)
    assert decoder.stopped == any(stop in tokenizer.decode(taken) for stop in stops)
    if not decoder.stopped:
        assert streamed == whole


def test_a_stop_string_spans_tokens_and_is_removed(all_tokenizers) -> None:
    tokenizer = all_tokenizers["byte fallback"]
    ids = [tokenizer._inner.token_to_id(token) for token in ("▁the", "▁world", "a", "b", "c")]
    decoder = StreamDecoder(tokenizer, ("ldab",))
    assert [decoder.push(token_id) for token_id in ids] == ["the", " wor", "", "", ""]
    assert decoder.stopped
    assert decoder.stop == "ldab"
    assert decoder.finish() == ""


def test_one_that_only_begins_to_match_is_released(all_tokenizers) -> None:
    tokenizer = all_tokenizers["byte fallback"]
    ids = [tokenizer._inner.token_to_id(token) for token in ("▁world", "a", "c")]
    decoder = StreamDecoder(tokenizer, ("ldab", "acx"))
    assert [decoder.push(token_id) for token_id in ids] == ["wor", "", "ld"]
    assert decoder.finish() == "ac"
    assert not decoder.stopped


def test_a_stop_string_completed_by_what_was_withheld_stops_at_the_end(all_tokenizers) -> None:
    """The last allowed token leaves a broken character, and its replacement completes the stop string."""
    tokenizer = all_tokenizers["byte level"]
    incomplete = next(t for t in range(tokenizer.vocab_size) if tokenizer.visible_token(t) == "ð")
    decoder = StreamDecoder(tokenizer, ("�",))
    assert decoder.push(incomplete) == ""
    assert not decoder.stopped
    assert decoder.finish() == ""
    assert decoder.stopped


def test_overlapping_beginnings_are_followed() -> None:
    scanner = StopScanner(["aab"])
    assert [scanner.feed(piece) for piece in ("a", "a", "a", "b")] == ["", "", "a", ""]
    assert scanner.stop == "aab"


def test_a_long_stop_string_costs_no_more_per_character() -> None:
    """A quadratic search would take minutes here."""
    scanner = StopScanner(["a" * 100_000 + "b"])
    released = sum(len(scanner.feed("a" * 100)) for _ in range(3_000))
    assert released == 200_000


def test_many_stop_strings_cost_no_more_per_character() -> None:
    """All begin alike, so that every character could begin any of them; to follow each alone would take hours."""
    scanner = StopScanner([f"aaab{number:05}" for number in range(20_000)])
    released = sum(len(scanner.feed("aaaa")) for _ in range(100_000))
    assert released == 399_997
    assert scanner.stop is None
    assert scanner.feed("b19999c") == ""
    assert scanner.stop == "aaab19999"
