"""TextStream and StopChecker: text as it grows, characters of several tokens, stop strings across token
borders.
"""

from __future__ import annotations

import random

import pytest
from oracles.toy_tokenizer import byte_tokenizer, fallback_ids, fallback_tokenizer

from specdec_fast.engine.stop_conditions import StopChecker, TextStream

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    """One token per byte, so that borders fall everywhere."""
    return [TOKENIZER.convert_tokens_to_ids(TOKENIZER.byte_names[byte]) for byte in text.encode()]


def checker(prompt: str = "go", **changes: object) -> StopChecker:
    settings = {"eos_ids": (), "stop": (), "max_new_tokens": 1000, "max_length": 2000} | changes
    return StopChecker(TOKENIZER, ids(prompt), **settings)


def run(check: StopChecker, tokens: list[int]) -> tuple[str | None, int]:
    for count, token in enumerate(tokens, 1):
        reason = check.push(token)
        if reason is not None:
            return reason, count
    return None, len(tokens)


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


class Pieces:
    """A byte-level tokenizer with these tokens."""

    def __init__(self, *of: bytes) -> None:
        self.of = of

    def decode(self, tokens: list[int], **_: object) -> str:
        return b"".join(self.of[token] for token in tokens).decode("utf-8", "replace")


def test_a_prompt_token_that_ends_inside_a_character_is_not_emitted_again() -> None:
    tokenizer = Pieces(b"He", b" said", b" \xe2\x80", b"\x9c", b"go", b"\xe2\x80\x9d")
    settings = {"eos_ids": (), "max_new_tokens": 1000, "max_length": 2000}
    check = StopChecker(tokenizer, [0, 1, 2], stop=(" ",), **settings)
    assert run(check, [3, 4, 5]) == (None, 3) and check.text == "“go”"


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


def test_a_stop_string_across_token_borders_is_cut() -> None:
    check = checker(stop=("END",))
    assert run(check, ids("some text END more")) == ("stop", len("some text END"))
    assert check.text == "some text " and check.released == len(check.text)


def test_a_stop_string_inside_one_token_keeps_the_text_before_it() -> None:
    check = checker(stop=("he",))
    token = TOKENIZER.convert_tokens_to_ids("the")
    assert check.push(token) == "stop" and check.text == "t"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    check = checker(stop=("cd", "bcd"))
    assert run(check, ids("abcde")) == ("stop", 4)
    assert check.text == "a"


def test_a_stop_string_of_many_bytes_per_character() -> None:
    check = checker(stop=("€漢",))
    assert run(check, ids("a€b€漢c"))[0] == "stop"
    assert check.text == "a€b"


def test_the_prompt_never_matches() -> None:
    check = checker(prompt="EN", stop=("END",))
    assert run(check, ids("D and so on")) == (None, len("D and so on"))


def test_text_that_could_become_a_stop_string_is_held_back() -> None:
    check = checker(stop=("END",))
    released = []
    for token in ids("aENbE"):
        check.push(token)
        released.append(check.text[: check.released])
    assert released == ["a", "a", "a", "aENb", "aENb"]
    check.close()
    assert check.text[: check.released] == "aENbE"


def test_overlapping_beginnings_of_stop_strings_hold_the_longest() -> None:
    check = checker(stop=("aab", "abx"))
    for token in ids("zaa"):
        check.push(token)
    assert check.text[: check.released] == "z"
    assert check.push(ids("b")[0]) == "stop" and check.text == "z"


def test_end_of_sequence_ids_end_the_text() -> None:
    end = ids("!")[0]
    check = checker(eos_ids=(5, end))
    assert run(check, ids("hi! there")) == ("eos", 3)
    assert check.released == len(check.text)


def test_the_length_is_exact_and_the_context_counts() -> None:
    assert run(checker(max_new_tokens=4), ids("abcdefgh")) == ("length", 4)
    assert run(checker(prompt="abc", max_length=8), ids("abcdefgh")) == ("length", 5)
    check = checker(max_new_tokens=7)
    run(check, ids("abc"))
    assert check.remaining == 4


def test_a_stop_string_on_the_last_token_counts_as_stop() -> None:
    check = checker(stop=("cd",), max_new_tokens=4)
    assert run(check, ids("abcd")) == ("stop", 4)
    assert check.text == "ab"


def test_unfinished_bytes_are_released_at_the_length_limit() -> None:
    check = checker(max_new_tokens=2)
    assert run(check, ids("a€")) == ("length", 2)
    assert check.text.startswith("a") and len(check.text) > 1 and check.released == len(check.text)


@pytest.mark.parametrize("asks", [False, True], ids=["alone", "streamed"])
@pytest.mark.parametrize(
    ("least", "text", "reason"),
    [
        (0, "a ", "stop"),
        (4, "a ", "stop"),  # END is complete with the fifth
        (5, "a END b ", "stop"),  # with that it is text, and so is the beginning that END, ends with
        (11, "a END b END c", "length"),
        (13, "a END b END c", "length"),
    ],
)
def test_stop_strings_within_min_new_tokens_are_text(least: int, text: str, reason: str, asks: bool) -> None:
    """A stop string ends the text at the first token after min_new_tokens; streamed text stays."""
    check = checker(stop=("END", "longer"), min_new_tokens=least, max_new_tokens=13)
    shown = ""
    for token in ids("a END b END c"):
        ended = check.push(token)
        if asks:
            assert check.text.startswith(shown)
            shown = check.text[: check.released]
        if ended:
            break
    assert (check.text, ended) == (text, reason) and (not asks or shown == text)


@pytest.mark.parametrize("asks", [False, True], ids=["alone", "streamed"])
def test_min_new_tokens_may_end_inside_a_character(asks: bool) -> None:
    """The text before the character is still emitted."""
    check = checker(stop=("\n",), min_new_tokens=5)
    for token in ids("a\nbcé d"):
        assert check.push(token) is None
        assert not asks or "a\nbc".startswith(check.text[:4])
    assert run(check, ids("\ne")) == ("stop", 1) and check.text == "a\nbcé d"


def test_a_stop_string_across_min_new_tokens_is_held_back() -> None:
    check = checker(stop=("LEND", "x"), min_new_tokens=5)
    for token in ids("a xLE"):
        assert check.push(token) is None
    assert (check.text, check.released) == ("a xLE", 3)
    assert run(check, ids("ND")) == ("stop", 2) and check.text == "a x"
