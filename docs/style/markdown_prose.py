"""The prose of a Markdown document: all else becomes blanks of the same length, so positions stay.

Tests: tests/docs/test_prose.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

CODE = "X"
"""Stands for every character of a code span: a span is one word."""

_BLANKED = (
    re.compile(r"\A---\n.*?\n---$", re.DOTALL | re.MULTILINE),  # front matter
    re.compile(r"^([> ]*)(`{3,}|~{3,}).*?^\1\2`*[ \t]*$", re.DOTALL | re.MULTILINE),  # fenced code
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^:::.*\n(?:^ +.*\n)*", re.MULTILINE),  # mkdocstrings
    re.compile(r"^[ ]*(?:!!!|\?\?\?\+?|===) ?[\w-]*", re.MULTILINE),  # admonitions and tabs
    re.compile(r"^ {0,3}\[[^\]]+\]: .*$", re.MULTILINE),  # link definitions
)
_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_INLINE = (
    re.compile(r"(?<=\])\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)"),  # link targets
    re.compile(r"(?<=\])\[[^\]]*\]"),
    re.compile(r"<https?:[^>]*>|https?:\S+"),
    re.compile(r"</?\w[^>\n]*>"),
    re.compile(r"\{ ?[.:#][^}\n]*\}"),  # attributes
    re.compile(r":(?:material|octicons|fontawesome|simple)-[\w-]+:"),
)
_EMPHASIS = re.compile(r"\*+|(?<!\w)_+|_+(?!\w)")
_MARKER = re.compile(r"[ >]*(?:[-*+]|\d+[.)])[ \t]+(?:\[[ xX]\][ \t]+)?")
_RULE = re.compile(r"[ >]*(?:\|?[ :|-]+\|[ :|-]*|[-*_=]{3,})")
_END = re.compile(r"(?<!\.\.)[.!?][)\]\"”]*(?=\s+\S)")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|et al|cf|vs|resp|incl|Fig|Sec|Eq|No|approx)|(?<![\w.])[A-Z])\.[)\"]*$")


class Sentence(NamedTuple):
    """A sentence and its position in the document."""

    text: str
    start: int

    @property
    def words(self) -> list[str]:
        """Words, numbers and code spans."""
        return re.findall(r"\w[\w'’./+-]*", self.text)


def prose(markdown: str) -> str:
    """A document whose code, addresses and markup are blanks. Its length and its lines stay as they are."""
    text = markdown
    for pattern in _BLANKED:
        text = pattern.sub(_blank, text)
    text = _SPAN.sub(_fill(CODE), text)
    for pattern in _INLINE:
        text = pattern.sub(_blank, text)
    return _EMPHASIS.sub(_blank, text)


def blocks(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of paragraphs, list items, headings and cells of tables in the output of `prose`."""
    start, end, position = None, 0, 0
    for line in text.splitlines(keepends=True):
        body = line.rstrip("\n")
        marker = _MARKER.match(body)
        alone = not body.strip(" >") or _RULE.fullmatch(body) or body.lstrip(" >").startswith(("#", "|"))
        if (alone or marker) and start is not None:
            yield start, end
            start = None
        if body.lstrip(" >").startswith("|") and not _RULE.fullmatch(body):
            for cell in re.finditer(r"(?:\\\||[^|])+", body):
                yield position + cell.start(), position + cell.end()
        elif body.lstrip(" >").startswith("#"):
            yield position, position + len(body)
        elif not alone:
            if start is None:
                start = position + (marker.end() if marker else 0)
            end = position + len(body)
        position += len(line)
    if start is not None:
        yield start, end


def sentences(text: str) -> Iterator[Sentence]:
    """All sentences in the output of `prose`."""
    for start, end in blocks(text):
        block, at = text[start:end], 0
        for stop in _END.finditer(block):
            if not _ABBREVIATION.search(block[at : stop.end()]):
                yield _sentence(block[at : stop.end()], start + at)
                at = stop.end()
        if block[at:].strip(" >#\n"):
            yield _sentence(block[at:], start + at)


def _sentence(text: str, start: int) -> Sentence:
    lead = len(text) - len(text.lstrip(" \n>#"))
    return Sentence(text[lead:].rstrip(), start + lead)


def _fill(mark: str) -> Callable[[re.Match[str]], str]:
    return lambda match: re.sub(r"[^\n]", mark, match[0])


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])
