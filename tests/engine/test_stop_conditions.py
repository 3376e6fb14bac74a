"""StopChecker: stop strings across token borders, special tokens, ends of the text."""

from __future__ import annotations

from typing import Any

import pytest
from oracles.toy_tokenizer import END_OF_TEXT, byte_tokenizer

from specdec_fast.engine.stop_conditions import StopChecker

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    """One token per byte, so that borders fall everywhere."""
    return [TOKENIZER.convert_tokens_to_ids(TOKENIZER.byte_names[byte]) for byte in text.encode()]


def checker(prompt: str = "go", tokenizer: Any = TOKENIZER, **changes: Any) -> StopChecker:
    settings: dict[str, Any] = {"eos_ids": (), "stop": (), "max_new_tokens": 1000, "max_length": 2000} | changes
    return StopChecker(tokenizer, ids(prompt), **settings)


def run(check: StopChecker, tokens: list[int]) -> tuple[str | None, int]:
    for count, token in enumerate(tokens, 1):
        reason = check.push(token)
        if reason is not None:
            return reason, count
    return None, len(tokens)


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


def special_tokenizer() -> Any:
    """Returns a tokenizer with special tokens; the name of the second one is another text in the alphabet of bytes."""
    made = byte_tokenizer.__wrapped__()
    made.add_special_tokens({"additional_special_tokens": ["<|turn|>", "Ġking"]})
    return made


SPECIAL = special_tokenizer()
TURN, KING, END = (SPECIAL.convert_tokens_to_ids(name) for name in ("<|turn|>", "Ġking", END_OF_TEXT))


@pytest.mark.parametrize(
    ("stop", "changes", "text"),
    [
        ("<|turn|>", {}, "max\n"),
        ("<|turn|>", {"include_stop": True}, "max\n"),
        ("<|turn|>", {"skip_special_tokens": False}, "max\n"),
        ("<|turn|>", {"skip_special_tokens": False, "include_stop": True}, "max\n<|turn|>"),
        ("x\n<|turn|>", {}, "ma"),
        ("x\n<|turn|>", {"include_stop": True}, "max\n"),
        ("x\n<|turn|>", {"skip_special_tokens": False}, "ma"),
        ("x\n<|turn|>", {"skip_special_tokens": False, "include_stop": True}, "max\n<|turn|>"),
        ("\n", {"include_stop": True}, "max\n"),
        ("\n", {}, "max"),
    ],
)
def test_stop_strings_may_name_special_tokens(stop: str, changes: dict[str, Any], text: str) -> None:
    """The token itself is hidden, and the text that only seems to begin a stop string is emitted."""
    check = checker(tokenizer=SPECIAL, stop=(stop, "unused<|turn|>"), **changes)
    reason, count = run(check, [*ids("max\n"), TURN, *ids("more")])
    assert (reason, count) == ("stop", 4 if stop == "\n" else 5)
    assert check.text == text and check.released == len(text)


def test_several_special_tokens_with_text_between_them() -> None:
    check = checker(tokenizer=SPECIAL, stop=("<|turn|>ab<|turn|><end>",))
    assert run(check, [*ids("go"), TURN, *ids("ab"), TURN]) == (None, 6)
    assert (check.text, check.released) == ("goab", 2), "text from the first special token on may be cut"
    assert check.push(END) == "stop" and check.text == "go"


def test_the_name_of_a_special_token_counts_though_it_decodes_to_other_text() -> None:
    for skips in (True, False):
        check = checker(tokenizer=SPECIAL, stop=("Ġking",), skip_special_tokens=skips)
        assert run(check, [*ids("the king"), KING, *ids("s")]) == ("stop", 9) and check.text == "the king"
    assert SPECIAL.decode([KING]) == " king"


def test_min_new_tokens_counts_for_special_tokens_too() -> None:
    tokens = [*ids("ab"), TURN, *ids("c"), TURN]
    for stop in ("<|turn|>", "b<|turn|>", "c<|turn|>"):
        check = checker(tokenizer=SPECIAL, stop=(stop,), min_new_tokens=3)
        ends = stop != "b<|turn|>"
        assert run(check, tokens) == (("stop", 5) if ends else (None, 5))
        assert check.text == ("ab" if stop.startswith("c") else "abc")


def test_a_special_token_that_cuts_a_character_ends_the_text_after_it() -> None:
    for stop, text in (("<|turn|>", "a�"), ("�<|turn|>", "a")):
        check = checker(tokenizer=SPECIAL, stop=(stop,))
        assert run(check, [*ids("a€")[:2], TURN]) == ("stop", 3) and check.text == text


@pytest.mark.parametrize(
    ("skips", "includes", "text"), [(True, True, "hi"), (False, False, "hi"), (False, True, "hi<end>")]
)
def test_the_end_of_sequence_is_shown_where_it_is_included(skips: bool, includes: bool, text: str) -> None:
    for stop in ((), ("zz",)):
        check = checker(tokenizer=SPECIAL, eos_ids=(END,), stop=stop, skip_special_tokens=skips, include_stop=includes)
        assert run(check, [*ids("hi"), END]) == ("eos", 3)
        assert check.text == text and check.released == len(text)


def test_an_end_of_sequence_that_completes_a_stop_string_cuts_the_text() -> None:
    check = checker(tokenizer=SPECIAL, eos_ids=(END,), stop=("\n<end>",))
    assert run(check, [*ids("hi\n"), END]) == ("eos", 4) and check.text == "hi"


def test_a_part_of_a_hidden_token_is_no_stop_string() -> None:
    """The text never has it; where special tokens are shown, it counts like other text."""
    check = checker(tokenizer=SPECIAL, stop=("turn",))
    assert run(check, [*ids("a"), TURN, *ids("b")]) == (None, 3) and check.text == "ab"
    check = checker(tokenizer=SPECIAL, stop=("turn",), skip_special_tokens=False)
    assert run(check, [*ids("a"), TURN, *ids("b")]) == ("stop", 2) and check.text == "a<|"
