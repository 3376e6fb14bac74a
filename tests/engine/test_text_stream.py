"""TextStream: text as it grows, and characters of several tokens."""

from __future__ import annotations

import random

import pytest
from oracles.toy_tokenizer import byte_tokenizer, fallback_ids, fallback_tokenizer

from specdec_fast.engine.text_stream import TextStream

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    """One token per byte, so that borders fall everywhere."""
    return [TOKENIZER.convert_tokens_to_ids(TOKENIZER.byte_names[byte]) for byte in text.encode()]


def put(stream: TextStream, token: int, final: bool = False) -> str:
    """Returns the text that a token adds."""
    stream.push(token)
    return stream.flush(final)


def test_many_tokens_at_once_give_the_text_of_one_by_one() -> None:
    stream = TextStream(TOKENIZER, ids("price: "))
    for token in ids("3 € are enough for a very long text, they say"):
        stream.push(token)
    for final in (False, True):
        stream.flush(final)
        assert stream.text == "3 € are enough for a very long text, they say"


def test_a_character_of_several_tokens_appears_when_it_is_complete() -> None:
    stream = TextStream(TOKENIZER, ids("price: "))
    assert [put(stream, token) for token in ids("3 €!")] == ["3", " ", "", "", "€", "!"]


@pytest.mark.parametrize("held", [1, 2, 3])
def test_whole_characters_do_not_wait_for_the_next_one(held: int) -> None:
    """A step of several tokens may end inside a character, again and again in text of such characters alone."""
    stream, smile = TextStream(TOKENIZER, ids("x")), ids("🙂")
    for _ in range(20):  # beyond the window of decoded tokens
        stream.push(smile[-1]) if stream.text else None
        for token in ids("漢🙂")[: -(4 - held)]:
            stream.push(token)
        assert stream.flush().endswith("漢") and not stream.is_complete
        for token in smile[held:-1]:
            stream.push(token)
        assert stream.flush() == ""
    stream.push(smile[-1])
    assert stream.flush() == "🙂" and stream.text == "漢🙂" * 20 and stream.is_complete


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    stream = TextStream(TOKENIZER, ids("x"))
    assert [put(stream, token) for token in ids("a€")[:3]] == ["a", "", ""]
    stream.flush(final=True)
    assert set(stream.text) == {"a", "�"}


def test_a_prompt_that_ends_inside_a_character_loses_nothing() -> None:
    euro = ids("€")
    stream = TextStream(TOKENIZER, [*ids("ab"), *euro[:2]])
    pieces = [put(stream, token) for token in [euro[2], *ids("cde")]]
    assert "".join(pieces) == "€cde"
    stream = TextStream(TOKENIZER, [*ids("ab"), *euro[:2]])
    assert "".join(put(stream, token) for token in ids("cde")) == "cde"


def test_a_prompt_without_a_whole_character_is_not_emitted_again() -> None:
    names = [f"<0x{byte:02X}>" for byte in "\ufffd漢孭".encode()]  # the last one is of E5 AD AD
    *prompt, last, _ = fallback_tokenizer().convert_tokens_to_ids(names)
    assert put(TextStream(fallback_tokenizer(), prompt), last, final=True) == "�"


@pytest.mark.parametrize("seed", range(4))
def test_pieces_join_to_the_whole_text_however_long(seed: int) -> None:
    source = random.Random(seed)
    text = "".join(source.choice("abc de€fé漢🙂") for _ in range(400))
    stream = TextStream(TOKENIZER, ids("start "))
    assert "".join(put(stream, token) for token in ids(text)) == text == stream.text


RUNS = "ကခဂ", "漢字かな", "é", "🙂🙂", "ab c", " ", ": the ", "ကabခ"


@pytest.mark.parametrize("seed", range(12))
def test_runs_of_bytes_are_not_cut_inside_a_character(seed: int) -> None:
    """With a tokenizer that drops invalid runs of bytes; text is read at every token, at some, or at the end."""
    source = random.Random(seed)
    whole = "".join(source.choice(RUNS) for _ in range(60)).strip() + "!"
    tokens, tokenizer = fallback_ids(whole), fallback_tokenizer()
    assert tokenizer.decode(tokens) == whole
    for often in (1.0, 0.3, 0.02, 0.0):
        for given in (0, 1, 2, 3, 5, 8, 9, 13, 30):
            stream, pieces = TextStream(tokenizer, tokens[:given]), []
            for token in tokens[given:]:
                stream.push(token)
                if source.random() < often:
                    pieces.append(stream.flush())
            pieces.append(stream.flush(final=True))
            before = tokenizer.decode(tokens[:given])
            while given and "�" in before:  # the prompt ends inside a character: the text contains the whole character
                given -= 1
                before = tokenizer.decode(tokens[:given])
            text = "".join(pieces)
            assert text == stream.text and (text == whole[len(before) :] or (given == 0 and text.strip() == whole))


def test_a_run_of_bytes_that_ends_early_keeps_its_whole_characters() -> None:
    tokens = fallback_ids("go: ကခဂ")
    for often in (True, False):
        stream = TextStream(fallback_tokenizer(), tokens[:3])
        for token in tokens[3:-1]:
            stream.push(token)
            if often:
                stream.flush()
        stream.flush(final=True)
        assert stream.text == " ကခ�"


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, [1, 2])
    assert put(stream, 3, final=True) == "" == stream.text
