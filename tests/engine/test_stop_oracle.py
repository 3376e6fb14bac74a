"""StopChecker against a slow definition: decode all tokens after each one, and search all stop strings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from oracles.toy_tokenizer import END_OF_TEXT, byte_tokenizer, fallback_tokenizer

from specdec_fast.engine.stop_conditions import StopChecker

SPECIAL, PLAIN_ADDED = ("<|t|>", "<a>", "ab<b>"), "<tool>"


@cache
def special_tokenizer(kind: str) -> Any:
    """Returns a tokenizer with special tokens, and with an added token that is not special."""
    made = (byte_tokenizer if kind == "bytes" else fallback_tokenizer).__wrapped__()
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    made.add_tokens([PLAIN_ADDED])
    return made


def characters(kind: str) -> list[list[str]]:
    """Names of the tokens of characters and words."""
    if kind == "bytes":
        names = byte_tokenizer().byte_names
        whole = [*"abt<>|", "th", "the", "ab", "bc"]
        return [*([each] for each in whole), [names[byte] for byte in "€".encode()], [names[32]]]
    return [*([each] for each in ("a", "b", "t", "▁a", "▁b", "▁")), [f"<0x{byte:02X}>" for byte in "€".encode()]]


@dataclass
class Case:
    """A random text, random stop strings from it, and how they are treated."""

    tokenizer: Any
    tokens: list[int]
    prompt: list[int]
    stop: tuple[str, ...]
    skip: bool
    include: bool
    least: int
    most: int
    eos: tuple[int, ...]
    marked: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.marked = tuple(each for each in self.stop if any(name in each for name in (*SPECIAL, END_OF_TEXT)))

    def decode(self, count: int, skip: bool, final: bool = False) -> str:
        """The text of the first tokens; an incomplete character at its end is left out, or shown if it is final."""
        before = self.tokenizer.decode(self.prompt, skip_special_tokens=skip)
        texts = [
            self.tokenizer.decode([*self.prompt, *self.tokens[: max(0, count - cut)]], skip_special_tokens=skip)
            for cut in range(4)
        ]
        whole = next(text for text in texts if not text.endswith("�"))
        if final and texts[0].endswith("�"):  # a run of bytes may be lost with its incomplete end
            whole = texts[0] if texts[0].startswith(whole) else whole + "�"
        return whole[len(before) :]

    def shown_length(self, length: int, count: int) -> int:
        """How much of the shown text the first characters of the full text have."""
        at = max(each for each in range(count + 1) if len(self.decode(each, False)) <= length)
        start, rest = len(self.decode(at, self.skip)), length - len(self.decode(at, False))
        grown = len(self.decode(min(at + 1, count), self.skip)) > start
        return start + (rest if grown else 0)

    def find(self, count: int) -> tuple[int, int] | None:
        """End and start of the first stop string in the text of the first tokens, where it is shown."""
        if count <= self.least:
            return None
        found = []
        for texts, strings in ((self.skip, self.stop), (False, self.marked)):
            text, begin = self.decode(count, texts), len(self.decode(self.least, texts))
            for string in strings:
                ends = [at for at in range(begin + 1, len(text) + 1) if text[:at].endswith(string)]
                if ends:
                    place = ends[0], ends[0] - len(string)
                    found.append(place if texts is self.skip else tuple(self.shown_length(at, count) for at in place))
        return min(found, default=None)

    def run(self) -> tuple[str, str | None, int]:
        """The text, the reason and the number of tokens."""
        for count, token in enumerate(self.tokens, 1):
            found, reason = self.find(count), "stop"
            if token in self.eos:
                reason = "eos"
                if found is None:
                    kept = count if self.include else count - 1
                    return self.decode(kept, self.skip, final=True), reason, count
            if found is not None:
                return self.decode(count, self.skip)[: found[not self.include]], reason, count
            if count == self.most:
                return self.decode(count, self.skip, final=True), "length", count
        return self.decode(len(self.tokens), self.skip, final=True), None, len(self.tokens)

    def final_length(self, count: int) -> int:
        """Length of the text that no stop string can cut any more."""
        text, full = self.decode(count, self.skip), self.decode(count, False)
        if self.include:
            return len(text)
        lengths = [len(text)]
        for string in self.stop:
            lengths += [len(text) - size for size in range(1, len(string)) if text.endswith(string[:size])]
        for string in self.marked:
            sizes = [size for size in range(1, len(string)) if full.endswith(string[:size])]
            lengths += [self.shown_length(len(full) - size, count) for size in sizes]
        return min(lengths)


def random_case(kind: str, source: random.Random) -> Case:
    tokenizer, words = special_tokenizer(kind), characters(kind)
    eos = [END_OF_TEXT] if kind == "bytes" else ["<a>"]
    rare = [[each] for each in (*SPECIAL, PLAIN_ADDED, *eos)]
    names = [name for _ in range(24) for name in source.choice(rare if source.random() < 0.25 else words)]
    tokens: list[int] = tokenizer.convert_tokens_to_ids(names)
    stop = []
    for skip in source.choices([False, True], k=source.randrange(4)):
        text = tokenizer.decode(tokens, skip_special_tokens=skip)
        start = source.randrange(len(text))
        stop.append(text[start : start + source.choice([1, 2, 3, 5, 8, 12])])
    stop += source.choices([*SPECIAL, "<|t|><a>", "the<a>", PLAIN_ADDED, "zz"], k=source.randrange(2))
    ends = tuple(tokenizer.convert_tokens_to_ids(eos)) if source.random() < 0.5 else ()
    skip, include = source.random() < 0.6, source.random() < 0.4
    least = source.choice([0, 0, 5, 12])
    prompt = tokenizer.convert_tokens_to_ids(["a", "b", source.choice(["<a>", "t"])])
    return Case(tokenizer, tokens, prompt, tuple(stop), skip, include, least, source.choice([20, 40]), ends)


def make_checker(case: Case) -> StopChecker:
    return StopChecker(
        case.tokenizer,
        case.prompt,
        eos_ids=case.eos,
        stop=case.stop,
        max_new_tokens=case.most,
        max_length=1000,
        min_new_tokens=case.least,
        skip_special_tokens=case.skip,
        include_stop=case.include,
    )


def push_all(checker: StopChecker, tokens: Sequence[int]) -> tuple[str | None, int]:
    for count, token in enumerate(tokens, 1):
        reason = checker.push(token)
        if reason is not None:
            return reason, count
    checker.close()
    return None, len(tokens)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@pytest.mark.parametrize("part", range(2))
def test_text_and_reason_are_those_of_the_definition(kind: str, part: int) -> None:
    source, ended = random.Random(f"{kind}/{part}"), set()
    for number in range(60):
        case = random_case(kind, source)
        checker = make_checker(case)
        reason, count = push_all(checker, case.tokens)
        assert (checker.text, reason, count) == case.run(), (number, case)
        assert checker.released == len(checker.text)
        ended.add((reason, case.skip, case.include))
    assert len(ended) >= 10, "few of the combinations were met"


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@pytest.mark.parametrize("part", range(2))
def test_streams_release_all_that_is_final_and_nothing_else(kind: str, part: int) -> None:
    source = random.Random(f"stream/{kind}/{part}")
    for number in range(60):
        case = random_case(kind, source)
        checker, shown, final = make_checker(case), "", case.run()[0]
        for count, token in enumerate(case.tokens, 1):
            reason = checker.push(token)
            assert checker.text.startswith(shown)
            shown = checker.text[: checker.released]
            assert final.startswith(shown), (number, case)
            if reason is not None:
                break
            assert checker.released == case.final_length(count), (number, case)
        checker.close()
        assert checker.text[: checker.released] == final
