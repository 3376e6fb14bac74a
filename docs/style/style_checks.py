"""The project's own checks for proselint: long sentences, words outside of the glossary, and constructions to rewrite.

Tests: tests/docs/test_prose.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from markdown_prose import sentences
from proselint.registry.checks import Check, CheckFlags, CheckResult
from proselint.registry.checks.engine import Fancy
from proselint.registry.checks.types import PreferredForms

MOST_WORDS = 30
PREFIX = "specdec"

WORDS = {
    r"coins?": "a uniform draw",
    r"captured steps?": "a CUDA-graph step",
    r"(?:sparse|logits?) edits?|edits (?:of|to|over) (?:logits|rows)": "logits processors",
    r"emissions?": "outputs",
    r"houses?(?! rules)": "the project, a package",
    r"(?:tests?|all|every|each|which|longer|these|own) lanes?": "a test suite",
    r"laws?": "a distribution",
    r"(?:the|a|one|two-level|keyed|shared) race(?! condition)": "Gumbel-max",
    r"row equality": "batch invariance",
    r"rooms?(?! for\b)": "a package, a module",
    r"scouts?": "a score-only node",
    r"seams?": "an interface",
    r"stand-?ins?": "a simulated GPU",
    r"taps?": "an auxiliary hidden state",
    r"tosse[sd]|toss(?:ing)?": "samples",
    r"whole[- ]pass(?:es)?": "fused forward",
}
"""Words of our own, each with the term of the field; docs/glossary.md defines the terms."""

_PLACE = r"(?:in|at|on|under|there|beside|behind|between|below|above|over|within)\b"
PLAIN = {
    r"who(?:so)?m?ever": "any caller, every user",
    r"somebody|someone": "a name for who does it",
    r"nobody|no one": "a subject that does something",
    rf"lies?(?= {_PLACE})": "is, is stored",
    rf"lay(?= {_PLACE})": "was, was stored",
    rf"(?:stands?|stood)(?! in for)(?= {_PLACE})": "is",
    r"answer(?:s|ed|ing)? with": "returns",
    r"hear(?:s|d|ing)?(?: of| from)?": "is notified of",
    r"told|tells?": "reports, is notified, is passed",
    r"asked? of|asks? of": "required from",
    r"wish(?:es|ed)? for": "requests",
    r"thereof|therein|thereby|therefor|wherein|whereof|whereby|whereupon": "plain words",
    r"herein|hereby|amongst|whilst|upon": "plain words",
    r"as to (?:how|what|why|whether)": "how, what, why, whether",
    r"the how": "the method",
}
"""Words that plain technical English replaces."""

_BE = r"(?:is|are|was|were|be|been|being)"
_VERB = r"(?:is|are|was|were|do|does|did|has|have|can|could|will|would|may|must|needs?)"
_DONE = r"(?:\w+ed|told|said|heard|known|thought|spoken|drawn|taken|made|paid)"
CONSTRUCTIONS = {
    r"(?<=\. )Of (?!course\b)[a-z][\w-]*": "the subject first",
    rf"(?<=[.;,] )nor {_VERB}\b": "a sentence with a negated verb",
    rf"(?<=\. )(?:So|Such|Neither|Rarely|Seldom|Never|Only then|Not only) {_VERB}\b": "the subject before the verb",
    rf"(?:of|for|to|by|from|with|than|as|over|on) what (?:{_VERB}|it|they|goes|comes)\b": "a noun",
    rf"(?<=\. )What (?!(?:{_VERB}|happens|to|if|you)\b)\w+ [^.?!]*\.(?!\w)": "a sentence with a noun as its subject",
    rf"(?<!\w )what {_BE} (?:not |{_DONE}\b|written|read|given|left|sent|kept|done)(?![^.!]*\?)": "a noun",
    rf"{_BE} {_DONE} (?:at|for|of|upon|behind|over|after)(?=\s*[.,;:])": "active voice",
    r"(?:is|are) (?:said|had|let|told) (?:to|that|of|by)\b": "active voice",
    r"it is (?:\w+ )?(?:that|who|which) (?:\w+s)\b": "the subject first",
    r"those who|he who|one who": "a name for who does it",
}
"""Constructions that a reader reads twice.

These are inversions, clauses in place of nouns, and passives that end in a preposition.
"""

REPEATED = r"\b(?!X+\b)([A-Za-z]{2,})\s+\1\b(?<!that that)(?<!had had)"

_ENGINE = Fancy()


def _forms(words: dict[str, str]) -> PreferredForms:
    """Patterns with what to write instead; an alternation is one word."""
    return PreferredForms({f"(?:{pattern})": better for pattern, better in words.items()})


def repeated_words(text: str, check: Check) -> Iterator[CheckResult]:
    """A word twice in a row (proselint's own check takes numbers and code for words)."""
    for found in check.engine.finditer(REPEATED, text):
        yield CheckResult(check.path, f"'{found[0]}': the word is repeated", found.span(), None)


def long_sentences(text: str, check: Check) -> Iterator[CheckResult]:
    """Sentences of more than MOST_WORDS words."""
    for sentence in sentences(text):
        count = len(sentence.words)
        if count > MOST_WORDS:
            opening = " ".join(sentence.text.split()[:6])
            message = f"sentence of {count} words; at most {MOST_WORDS}; split it: {opening} ..."
            span = (sentence.start, sentence.start + len(sentence.text))
            yield CheckResult(check.path, message, span, None)


def constructions(text: str, check: Check) -> Iterator[CheckResult]:
    """Constructions inside of sentences; a pattern that begins with a full stop also fits the start of a block."""
    forms = _forms(CONSTRUCTIONS)
    for sentence in sentences(text):
        for found in forms.check(". " + sentence.text, check):
            start, end = (sentence.start + at - 2 for at in found.span)
            yield found._replace(span=(start, end))


def _check(kind: object, name: str, message: str) -> Check:
    flags = CheckFlags(allow_quotes=True)
    return Check(check_type=kind, engine=_ENGINE, path=f"{PREFIX}.{name}", message=message, flags=flags)  # type: ignore[arg-type]


CHECKS = (
    _check(repeated_words, "repeated_words", ""),
    _check(long_sentences, "long_sentences", ""),
    _check(_forms(WORDS), "words", "'{1}': write {0}"),
    _check(_forms(PLAIN), "plain", "'{1}': write {0}"),
    _check(constructions, "constructions", "'{1}': write {0}"),
)
