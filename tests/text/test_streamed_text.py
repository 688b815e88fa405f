"""Streamed pieces put together are the tokenizer's own decoding, and none ends inside a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.text import StreamDecoder, Tokenizer

KINDS = ["byte level", "byte fallback", "metaspace", "wide strip"]
REPLACEMENT = "�"


def pieces(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    decoder = StreamDecoder(tokenizer, stops)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_tokens_make_the_tokenizer_s_decoding(all_tokenizers, kind: str, data: st.DataObject) -> None:
    tokenizer = all_tokenizers[kind]
    anything = st.integers(0, tokenizer.vocab_size + 3)
    # Bytes that begin, continue and spoil characters, and spaces, more often than chance has them.
    odd = [token for token in range(tokenizer.vocab_size) if REPLACEMENT in tokenizer.decode([token])]
    odd += [token for token in range(tokenizer.vocab_size) if not tokenizer.decode([token]).strip()]
    ids = data.draw(st.lists(anything | st.sampled_from(odd), max_size=40))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS[:2])
@given(text=st.text(alphabet=st.sampled_from("abc the😀👩‍👩‍👧你世é�\u00ad\u200b"), max_size=30))
@settings(max_examples=100, deadline=None)
def test_no_piece_of_a_text_ends_inside_a_character(all_tokenizers, kind: str, text: str) -> None:
    tokenizer = all_tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed = pieces(tokenizer, ids)
    assert "".join(streamed) == tokenizer.decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in streamed)


def test_a_character_comes_with_its_last_byte(all_tokenizers) -> None:
    tokenizer = all_tokenizers["byte level"]
    single_bytes = {tokenizer.visible_token(token): token for token in range(tokenizer.vocab_size)}
    # The four bytes of U+1F600, as the byte-level alphabet spells them.
    ids = [single_bytes[character] for character in "ðŁĺĢ"]
    assert pieces(tokenizer, ids) == ["", "", "", "😀", ""]
    assert pieces(tokenizer, ids[:3]) == ["", "", "", REPLACEMENT]


def test_a_broken_character_is_replaced_as_soon_as_it_is_known_to_be_broken(all_tokenizers) -> None:
    tokenizer = all_tokenizers["byte level"]
    single_bytes = {tokenizer.visible_token(token): token for token in range(tokenizer.vocab_size)}
    ids = [single_bytes[character] for character in "ðŁa"]
    assert pieces(tokenizer, ids) == ["", "", REPLACEMENT + "a", ""]


def test_a_run_of_fallback_bytes_waits_for_its_end(all_tokenizers) -> None:
    """The library replaces the whole run if one of its bytes is wrong, so none of it is certain before."""
    tokenizer = all_tokenizers["byte fallback"]
    byte = {value: 3 + value for value in range(256)}
    letter = tokenizer.encode("b", add_special_tokens=False)[-1]
    good = [byte[value] for value in "世界".encode()]
    assert pieces(tokenizer, [*good, letter]) == [""] * 6 + ["世界b", ""]
    assert pieces(tokenizer, [*good, byte[0xFF], letter]) == [""] * 7 + [REPLACEMENT * 7 + "b", ""]


def test_only_the_first_token_of_the_answer_loses_its_space(all_tokenizers) -> None:
    tokenizer = all_tokenizers["byte fallback"]
    the, world, space = (tokenizer._inner.token_to_id(token) for token in ("▁the", "▁world", "▁"))
    assert pieces(tokenizer, [the, world, the]) == ["the", " world", " the", ""]
    assert "".join(pieces(tokenizer, [space, the, space, space, world])) == " the   world"


def test_special_tokens_and_ids_beyond_the_tokenizer_give_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the world", add_special_tokens=False)
    with_others = [0, ids[0], 1, 2**20, *ids[1:], 0, 2**40]
    assert "".join(pieces(tokenizer, with_others)) == tokenizer.decode(ids)


def test_nothing_follows_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the world", add_special_tokens=False)
    decoder = StreamDecoder(tokenizer)
    for token_id in ids:
        decoder.push(token_id)
    decoder.finish()
    assert decoder.finish() == decoder.push(ids[0]) == decoder.finish() == ""
    assert not decoder.stopped


class CountingTokenizer(Tokenizer):
    """Counts the tokens that it decodes."""

    decoded_tokens = 0

    def decode(self, token_ids):
        token_ids = list(token_ids)
        self.decoded_tokens += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["text", "broken bytes", "spaces", "nothing"])
def test_the_cost_of_a_token_does_not_grow_with_those_before_it(all_tokenizers, kind: str, what: str) -> None:
    tokenizer = CountingTokenizer(all_tokenizers[kind]._inner)
    token = {
        "text": lambda: tokenizer.encode("the world a b", add_special_tokens=False),
        "broken bytes": lambda: [
            token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]) == REPLACEMENT
        ],
        "spaces": lambda: [tokenizer.encode("  ", add_special_tokens=False)[-1]],
        "nothing": lambda: [0, 2**30],
    }[what]()
    ids = (token * 2000)[:2000]
    expected = tokenizer.decode(ids)
    tokenizer.decoded_tokens = 0
    assert "".join(pieces(tokenizer, ids)) == expected
    assert tokenizer.decoded_tokens <= 40 * len(ids)
